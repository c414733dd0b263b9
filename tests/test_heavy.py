"""What is known of long tests is about tests that are there, and brings them into an order that leaves none out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import longest_first, pytest_runtest_protocol
from tests.heavy import FOLLOWED_ELSEWHERE, SECONDS, seconds

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("start", sorted({*SECONDS, *FOLLOWED_ELSEWHERE}))
def test_each_name_is_that_of_a_test(start):
    file, _, name = start.partition("::")
    assert f"def {name.partition('[')[0] or 'test_'}" in (ROOT / file).read_text(encoding="utf-8")


def test_a_name_stands_for_all_tests_that_begin_with_it():
    assert seconds("tests/cli/test_demo.py::test_of_any_name[1]") == SECONDS["tests/cli/test_demo.py"]
    assert seconds("tests/cli/test_app.py::test_of_any_name") == 0


@pytest.mark.parametrize(("workers", "order"), [(1, "xcfabdeghi"), (2, "xfabd" + "ceghi"), (3, "xab" + "cde" + "fghi")])
def test_each_workers_stretch_begins_with_its_share_of_the_long_ones(workers, order):
    taken = {"c": 4.0, "f": 3.0, "x": 7.0}
    names = list("abcdefghxi")
    assert "".join(longest_first(names, [taken.get(n, 0.0) for n in names], workers)) == order


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("long", range(8))
def test_whatever_is_long_all_are_run_once(workers, long):
    names = list(range(7))
    assert sorted(longest_first(names, [float(n < long) for n in names], workers)) == names


@pytest.mark.parametrize(("name", "hidden"), [(FOLLOWED_ELSEWHERE[0], True), ("tests/test_heavy.py::test_x", False)])
def test_coverage_sees_nothing_of_what_others_cover_and_goes_on_behind_it(name, hidden, monkeypatch):
    monkeypatch.setenv("COVERAGE_PROCESS_CONFIG", "of a run")
    sees = sys.gettrace()
    around = pytest_runtest_protocol(SimpleNamespace(nodeid=f"{name}[1]"))
    next(around)
    during = sys.gettrace(), os.environ.get("COVERAGE_PROCESS_CONFIG")
    with pytest.raises(StopIteration) as done:
        around.send("what it came to")
    assert during == ((None, None) if hidden else (sees, "of a run"))
    assert (sys.gettrace(), os.environ["COVERAGE_PROCESS_CONFIG"]) == (sees, "of a run")
    assert done.value.value == "what it came to"
