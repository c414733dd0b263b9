"""Virtual environments with what somebody gets who installs the wheel of this checkout, and with nothing else."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Collection, Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def build(folder: Path) -> None:
    """Build the wheel and the sdist of this checkout."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)],
        cwd=ROOT, check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def install(wheel: Path, wanted: Collection[str], folder: Path) -> Path:
    """Create an environment, install the wheel in it, and return its Python.

    Nothing is downloaded: the files of what is required are links to those that are installed here. Then pip installs
    the wheel, and refuses if anything is missing.

    Args:
        wheel: The wheel.
        wanted: What is named after ``pip install``, such as ``agentfsm[cli,view]``.
        folder: For the environment.

    Raises:
        PackageNotFoundError: Something that is required is not installed here.
        ValueError: The wheel has no such extra.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    for each in _required(wheel, map(Requirement, wanted)):
        for file in each.files or ():
            if ".." not in file.parts:  # its commands are elsewhere
                link = Path(paths["purelib"], file)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(str(each.locate_file(file)))
    python = Path(paths["scripts"], "python")
    named = [f"{each} @ {wheel.as_uri()}" if Requirement(each).name == "agentfsm" else each for each in wanted]
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", "--no-index", *named], check=True, timeout=120)
    return python


def _required(wheel: Path, wanted: Iterator[Requirement]) -> Iterator[Distribution]:
    """What is to be installed with the wheel, whatever requires it."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        ours = PathDistribution(zipfile.Path(archive, metadata.removesuffix("METADATA")))
        pending, done = list(wanted), set[tuple[str, str]]()
        while pending:
            requirement = pending.pop()
            name = canonicalize_name(requirement.name)
            found = ours if name == "agentfsm" else distribution(name)
            if found is ours and (unknown := requirement.extras - {*ours.metadata.get_all("Provides-Extra", [])}):
                raise ValueError(f"the wheel has no extra {', '.join(sorted(unknown))}")
            if found is not ours and (name, "") not in done:
                yield found
            extras = {extra for extra in ("", *requirement.extras) if (name, extra) not in done}
            done |= {(name, extra) for extra in extras}
            for each in map(Requirement, found.requires or ()):
                if any(each.marker is None or each.marker.evaluate({"extra": extra}) for extra in extras):
                    pending.append(each)
