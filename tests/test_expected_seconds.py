"""``EXPECTED_SECONDS`` names existing tests, and ``longest_first`` keeps every item."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import EXPECTED_SECONDS, expected_seconds, longest_first

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("prefix", sorted(EXPECTED_SECONDS))
def test_each_prefix_names_an_existing_test(prefix):
    file, _, name = prefix.partition("::")
    assert f"def {name.partition('[')[0] or 'test_'}" in (ROOT / file).read_text(encoding="utf-8")


def test_a_prefix_matches_all_tests_that_begin_with_it():
    assert (
        expected_seconds("tests/cli/test_demo_command.py::test_of_any_name[1]")
        == EXPECTED_SECONDS["tests/cli/test_demo_command.py"]
    )
    assert expected_seconds("tests/cli/test_app.py::test_of_any_name") == 0


@pytest.mark.parametrize(("workers", "order"), [(1, "xcfabdeghi"), (2, "xfabd" + "ceghi"), (3, "xab" + "cde" + "fghi")])
def test_each_workers_part_begins_with_its_share_of_the_long_tests(workers, order):
    seconds = {"c": 4.0, "f": 3.0, "x": 7.0}
    names = list("abcdefghxi")
    assert "".join(longest_first(names, [seconds.get(n, 0.0) for n in names], workers)) == order


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("long", range(8))
def test_every_item_is_kept_exactly_once(workers, long):
    names = list(range(7))
    assert sorted(longest_first(names, [float(n < long) for n in names], workers)) == names
