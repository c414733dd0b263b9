"""The files in ``diagrams/`` are up to date with the loop and with the examples of the README."""

from __future__ import annotations

import pytest

from agentfsm.diagrams import COMMITTED_FORMATS, FORMATS, diagram
from agentfsm.loop.transition_table import LOOP
from tests.helpers.generated_docs import FOLDER, PICTURES


@pytest.mark.parametrize("form", COMMITTED_FORMATS)
def test_the_committed_diagrams_of_the_loop_are_up_to_date(form: str) -> None:
    path = FOLDER / f"loop{FORMATS[form].suffixes[0]}"
    assert path.read_bytes() == diagram(LOOP, form).encode(), (
        f"{path.name} is out of date; update it: "
        'python -c "from agentfsm.loop.transition_table import LOOP; from agentfsm.diagrams import write_all; '
        "write_all(LOOP, 'diagrams')\""
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_the_committed_diagrams_of_the_readme_are_up_to_date(name: str) -> None:
    drawn = PICTURES[name]()
    assert (FOLDER / name).read_text(encoding="utf-8") == drawn, (
        f"{name} is out of date: python -m tests.helpers.generated_docs"
    )


def test_the_folder_has_no_other_files() -> None:
    loop = {f"loop{FORMATS[form].suffixes[0]}" for form in COMMITTED_FORMATS}
    assert {path.name for path in FOLDER.iterdir()} == {*PICTURES, *loop}
