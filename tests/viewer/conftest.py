"""A browser that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.browser import running_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium; while it is there, this thread has an event loop: see ``elsewhere``."""
    with running_browser() as running:
        yield running
