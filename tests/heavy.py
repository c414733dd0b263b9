"""Which tests take long: data for ``conftest.py``, which begins them first.

So no core is left with a long test at the end while the others have none. A test is named by its id, or by how that
begins; the seconds are those of one run on one core.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SECONDS", "seconds"]

SECONDS: Mapping[str, float] = {
    "tests/journal/test_crashes.py::test_a_run_that_is_killed_at_any_point": 40,
    "tests/journal/test_crashes.py::test_a_run_that_is_killed_again_and_again": 12,
    "tests/journal/test_crashes.py::test_starting_interpreters": 8,
    "tests/journal/test_simulation.py::test_whatever_happens": 10,
    "tests/journal/test_mutants.py::test_each_mutant_is_caught": 9,
    "tests/journal/test_mutants.py::test_what_breaks_nothing": 3,
    "tests/journal/test_restore.py::test_the_journal_gives": 3,
    "tests/analysis/test_spin.py::test_the_loop": 9,
    "tests/analysis/test_spin.py::test_random_tables": 6,
    "tests/analysis/test_spin.py::test_what_paths": 3,
    "tests/analysis/test_analyse.py::test_every_preset_passes": 3,
    "tests/analysis/test_analyse.py::test_whether_the_end_can_be_reached": 3,
    "tests/diagrams/test_viewers.py": 12,
    "tests/diagrams/test_engines.py": 5,
    "tests/test_docs.py::test_a_page_is_true": 6,
    "tests/test_properties.py": 3,
    "tests/testing/test_review_example.py": 5,
    "tests/testing/test_plugin.py::test_reports_are_the_same": 3,
    "tests/testing/test_plugin.py::test_prime_paths": 3,
    "tests/testing/test_mutants.py": 2,
    "tests/models/test_streams.py::test_a_stream": 4,
    "tests/cli/test_demo.py": 2.5,
    "tests/cli/test_killed.py": 3,
}


def seconds(test: str) -> float:
    """How long a test takes, by its id; 0 where that is not worth a mention."""
    return next((taken for start, taken in SECONDS.items() if test.startswith(start)), 0.0)
