"""``llms.txt``: the index of the site for language models, with a line on each page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from reference_pages import PACKAGES

import agentfsm

SUMMARY = "Runs an AI agent's loop as a declared state machine: reviewed, proved, tested and audited."
_CONTENTS = re.compile(r"```\{toctree\}\n:caption: ([^\n]*)\n:hidden:\n\n(.*?)\n```", re.DOTALL)


def llms_index(folder: Path) -> str:
    """The index of the pages in a folder, in the order of the site's contents.

    A guide is linked as its source. The source of a page of the reference only names what is read from the code, so
    those are linked as HTML. Links are relative to the root of the site, wherever that is.
    """
    lines = ["# agentfsm", "", f"> {SUMMARY}"]
    for caption, names in _CONTENTS.findall((folder / "index.md").read_text(encoding="utf-8")):
        lines += ["", f"## {caption}", ""]
        for name in names.split():
            match name:
                case "reference/index":
                    lines += _reference()
                case "reference/examples":
                    lines.append("- [Examples](reference/examples.html): programs that run as they are.")
                case _:
                    lines.append(_guide(folder, name))
    return "\n".join(lines) + "\n"


def _reference() -> Iterator[str]:
    for package in PACKAGES:
        place = Path(agentfsm.__file__).parent.joinpath(*package.split(".")[1:])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        yield f"- [{package}](reference/{package}.html): {about.splitlines()[0].replace('``', '`')}"


def _guide(folder: Path, name: str) -> str:
    text = (folder / f"{name}.md").read_text(encoding="utf-8")
    if included := re.match(r"```\{include\} (\S+)", text):
        text = (folder / included[1]).read_text(encoding="utf-8")
    title, _, rest = text.removeprefix("# ").partition("\n")
    return f"- [{title}](_sources/{name}.md.txt): {_first_sentence(rest)}"


def _first_sentence(text: str) -> str:
    """The first sentence of the first paragraph that is prose, without its links."""
    paragraphs = (p for p in re.split(r"\n\s*\n", text.strip()) if re.match(r"[\w`*(]", p))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(next(paragraphs, "").split()))
    return re.split(r"(?<=[.?])\s", plain, maxsplit=1)[0].rstrip(":")
