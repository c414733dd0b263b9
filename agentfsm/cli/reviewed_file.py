"""Files that a person has reviewed and that are kept with the code: compare one with what is true now, or update it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

import click

from agentfsm.cli.options import collect_options, option


@dataclass(frozen=True, kw_only=True)
class ReviewOptions:
    """The options that compare what a command finds with a reviewed file; ``review_options`` declares them."""

    reviewed: Path | None = option(
        "--reviewed",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Exit 1 if the verdicts, bounds and calls that run without a person are not those in FILE.",
    )
    update: bool = option("--update", is_flag=True, help="Write FILE instead, after a review of the change.")


review_options = collect_options(ReviewOptions, "review_opts")


def matches_review(text: str, options: ReviewOptions) -> bool:
    """Whether the reviewed file says the same; what differs is printed as a unified diff."""
    if options.reviewed is None:
        if options.update:
            raise click.UsageError("--update writes a file: name it with --reviewed")
        return True
    path = options.reviewed
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if before == text:
        return True
    show_change(path, before, text)
    if options.update:
        write_reviewed(path, text)
        return True
    advise_review(path, "with --update", missing=not before)
    return False


def advise_review(path: Path, how: str, *, missing: bool = False) -> None:
    """Say on stderr how to write a reviewed file once the change has been reviewed."""
    problem = "is missing" if missing else "differs from what was reviewed"
    click.echo(f"agentfsm: {path} {problem}: review the change, and run the command again {how}", err=True)


def show_change(path: Path, before: str, text: str) -> None:
    """Print what differs between a reviewed file and what it would hold now, as a unified diff."""
    lines = unified_diff(before.splitlines(), text.splitlines(), f"{path} (reviewed)", f"{path} (now)", "", "", 2, "")
    for line in lines:
        click.echo(line)


def write_reviewed(path: Path, text: str) -> None:
    """Write a reviewed file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    click.echo(path, err=True)
