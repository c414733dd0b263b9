"""Which tests take long, and which of those coverage need not follow: data for ``conftest.py``.

A test is named by its id, or by how that begins. The seconds are those of one run on one core, without coverage;
they say what is begun first, so that no core is left with a long test at the end while the others have none.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FOLLOWED_ELSEWHERE", "SECONDS", "seconds"]

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

FOLLOWED_ELSEWHERE = (
    "tests/analysis/test_analyse.py::test_every_preset_passes",
    "tests/analysis/test_analyse.py::test_rows_that_the_limits_switch_off",
    "tests/analysis/test_analyse.py::test_the_bounds_of_the_default_limits",
    "tests/analysis/test_analyse.py::test_whether_the_end_can_be_reached",
    "tests/analysis/test_spin.py",
    "tests/models/test_streams.py::test_a_stream_cut_anywhere_is_never_half_a_reply_taken_for_whole[anthropic]",
    "tests/models/test_streams.py::test_a_stream_cut_anywhere_is_never_half_a_reply_taken_for_whole[openai]",
    "tests/models/test_streams.py::test_a_stream_cut_anywhere_is_never_half_a_reply_taken_for_whole[responses]",
    "tests/models/test_streams.py::test_a_streamed_reply_is_the_whole_one_wherever",
    "tests/test_docs.py::test_a_page_is_true",
    "tests/test_docstrings.py::test_an_example_runs[analysis/properties.",
    "tests/test_docstrings.py::test_an_example_runs[testing/witness.",
    "tests/testing/test_mutants.py::test_every_mutant",
    "tests/testing/test_mutants.py::test_the_table_itself",
    "tests/testing/test_paths.py::test_more_generous_budgets",
    "tests/testing/test_plugin.py::test_reports_are_the_same",
    "tests/testing/test_review_example.py::test_it_passes",
    "tests/testing/test_strategies.py::test_a_fault_shrinks",
    "tests/testing/test_strategies.py::test_a_gate_that_fails_open",
    "tests/testing/test_strategies.py::test_whatever_happens_a_run_of_any_preset_keeps_its_promises[standard]",
    "tests/testing/test_witness.py::test_its_examples",
    "tests/testing/test_witness.py::test_the_examples_of_the_loops_own",
)
"""Tests that go over the same lines thousands of times, or in processes of their own, all of which others cover too.

Coverage makes them two to three times as slow. They are run in full; only the lines that they pass are not noted.
"""


def seconds(test: str) -> float:
    """How long a test takes, by its id; 0 where that is not worth a mention."""
    return next((taken for start, taken in SECONDS.items() if test.startswith(start)), 0.0)
