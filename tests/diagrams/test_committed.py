"""The pictures in ``diagrams/`` are those of the loop, and of the README's examples, as they are."""

from __future__ import annotations

import pytest

from agentfsm.diagrams import COMMITTED_FORMATS, FORMATS, diagram
from agentfsm.loop.table import LOOP
from tests.helpers.generated_docs import FOLDER, PICTURES


@pytest.mark.parametrize("form", COMMITTED_FORMATS)
def test_the_committed_picture_is_that_of_the_loop(form: str) -> None:
    path = FOLDER / f"loop{FORMATS[form].suffixes[0]}"
    assert path.read_bytes() == diagram(LOOP, form).encode(), (
        f"{path.name} is stale; write it anew: "
        'python -c "from agentfsm.loop.table import LOOP; from agentfsm.diagrams import write_all; '
        "write_all(LOOP, 'diagrams')\""
    )


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_of_the_readme_is_what_its_code_draws(name: str) -> None:
    drawn = PICTURES[name]()
    assert (FOLDER / name).read_text(encoding="utf-8") == drawn, (
        f"{name} is stale: python -m tests.helpers.generated_docs"
    )


def test_nothing_else_is_there() -> None:
    loop = {f"loop{FORMATS[form].suffixes[0]}" for form in COMMITTED_FORMATS}
    assert {path.name for path in FOLDER.iterdir()} == {*PICTURES, *loop}
