"""What several tests of the journal set up."""

from __future__ import annotations

import pytest

from agentfsm.journal import snapshot


@pytest.fixture
def snapshots_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs get a snapshot wherever they may."""
    monkeypatch.setattr(snapshot, "EVERY_RECORDS", 1)
    monkeypatch.setattr(snapshot, "WAITING_RECORDS", 1)
