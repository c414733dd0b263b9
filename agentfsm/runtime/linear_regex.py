"""Regular expressions that take linear time, whatever the text: RE2, in the package ``google-re2``.

Python's ``re`` can take exponential time for a text that somebody chose, and holds the interpreter meanwhile.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from agentfsm.errors import MissingExtraError

PATTERN_MEMORY = 1 << 20
"""Bytes that RE2 may use for one pattern; one that needs more is not valid."""


def compile_linear(pattern: str, *, dot_matches_newline: bool = False, any_case: bool = False) -> Any:
    """A compiled RE2 pattern, for bytes of UTF-8.

    Raises:
        ValueError: It is not a valid pattern of RE2; the message says why.
        MissingExtraError: The package ``google-re2`` is not installed.
    """
    try:
        re2 = import_module("re2")
    except ImportError as error:
        raise MissingExtraError("regex=", "regex") from error
    options = re2.Options()
    options.log_errors, options.max_mem = False, PATTERN_MEMORY
    options.dot_nl, options.case_sensitive = dot_matches_newline, not any_case
    try:
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        problem: Any = error.args[0] if error.args else ""
        raise ValueError(problem.decode(errors="replace") if isinstance(problem, bytes) else str(problem)) from None
