"""Packages from npm that serve as oracles: installed once into a cache directory, or the test is skipped.

The directory is ``AGENTFSM_TEST_CACHE``, else ``~/.cache/agentfsm-tests``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

__all__ = ["node", "package"]

INSTALL_S = 300


def node() -> str:
    """Where node is; the test is skipped where it is not."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed: no oracle from outside")
    return found


def package(name: str, version: str, only: str = "") -> Path:
    """The folder of a package, or one file of it, that needs no other package; the test is skipped without it."""
    cache = Path(os.environ.get("AGENTFSM_TEST_CACHE") or Path.home() / ".cache" / "agentfsm-tests")
    home = cache / f"{name}-{version}"
    if not home.exists():
        _unpack(name, version, only, cache, home)
    return home / "package" / only


def _unpack(name: str, version: str, only: str, cache: Path, home: Path) -> None:
    """Unpack it beside its home and move it there whole: several test processes may be at it at once."""
    npm, tar = shutil.which("npm"), shutil.which("tar")
    if npm is None or tar is None:
        pytest.skip(f"{name} needs npm and tar, and they are not on the path")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="installing-", dir=cache))
    except OSError as error:
        pytest.skip(f"{name} cannot be installed: {error}")
    try:
        for command in (
            [npm, "pack", "--silent", "--pack-destination", str(fresh), f"{name}@{version}"],
            [tar, "-xzf", f"{name}-{version}.tgz", f"package/{only}"],
        ):
            done = subprocess.run(command, cwd=fresh, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode != 0:
                pytest.skip(f"{name} cannot be installed: {done.stderr.strip()[-300:]}")
        (fresh / f"{name}-{version}.tgz").unlink()
        try:
            fresh.rename(home)
        except OSError:
            if not home.exists():
                raise
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} cannot be installed: npm took more than {INSTALL_S} s")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
