"""The pictures in ``diagrams/`` are those of the loop as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentfsm.core.loop import LOOP
from agentfsm.diagrams import COMMITTED, FORMATS, diagram

FOLDER = Path(__file__).parents[2] / "diagrams"


@pytest.mark.parametrize("form", COMMITTED)
def test_the_committed_picture_is_that_of_the_loop(form: str) -> None:
    path = FOLDER / f"loop{FORMATS[form].endings[0]}"
    assert path.read_bytes() == diagram(LOOP, form).encode(), (
        f"{path.name} is stale; write it anew: "
        'python -c "from agentfsm.core.loop import LOOP; from agentfsm.diagrams import write_all; '
        "write_all(LOOP, 'diagrams')\""
    )
