"""What is known of long tests is about tests that are there, and brings them into an order that leaves none out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import EXPECTED_SECONDS, expected_seconds, longest_first

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("start", sorted(EXPECTED_SECONDS))
def test_each_name_is_that_of_a_test(start):
    file, _, name = start.partition("::")
    assert f"def {name.partition('[')[0] or 'test_'}" in (ROOT / file).read_text(encoding="utf-8")


def test_a_name_stands_for_all_tests_that_begin_with_it():
    assert expected_seconds("tests/cli/test_demo.py::test_of_any_name[1]") == EXPECTED_SECONDS["tests/cli/test_demo.py"]
    assert expected_seconds("tests/cli/test_app.py::test_of_any_name") == 0


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
