"""Fixtures for the tests of the command line: it runs in this process, in an empty folder, without API keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agentfsm.cli.app import app
from tests.helpers.terminal import clean_environment

Cli = Callable[..., Result]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs ``agentfsm`` with arguments in an empty folder; keyword arguments are environment variables."""
    monkeypatch.chdir(tmp_path)
    clean = clean_environment(tmp_path)
    for name in set(os.environ) - set(clean):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    def call(*words: str, stdin: str = "", **environment: str) -> Result:
        return CliRunner().invoke(app, list(words), input=stdin, env=environment, prog_name="agentfsm")

    return call
