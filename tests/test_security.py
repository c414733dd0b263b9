"""SECURITY.md: each line of the threat model that says what holds is linked to a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL = (ROOT / "SECURITY.md").read_text().partition("## Threat model\n")[2].partition("\n## ")[0]
LINKS = re.findall(r"\]\((tests/[\w/]+\.py)#(\w+)\)", MODEL)
ADVERSARIES = {
    heading: text
    for heading, _, text in (part.partition("\n") for part in re.split(r"^### ", MODEL, flags=re.MULTILINE)[1:])
}


@pytest.mark.parametrize(("path", "name"), sorted(set(LINKS)))
def test_each_linked_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in [each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_each_line_that_says_what_holds_is_linked_and_what_does_not_hold_is_said(adversary: str) -> None:
    lines = re.findall(r"^- .*(?:\n  .*)*", ADVERSARIES[adversary], flags=re.MULTILINE)
    assert len(lines) >= 3
    assert [line for line in lines if not re.search(r"\]\(tests/", line)] == []
    assert "\nNot held: " in ADVERSARIES[adversary]


def test_the_adversaries_are_those_that_were_thought_of() -> None:
    assert list(ADVERSARIES) == [
        "A prompt-injected model",
        "A malicious tool server",
        "An insider with the file",
        "A thief of a backup",
        "A person of another tenant",
        "A person without the role",
    ]
    assert len(LINKS) >= 25
