"""Durable execution: hash-chained records, stores, resuming, verification, replay, migration and redaction.

Here are what ``Runs`` takes and returns, and what keeps a store: holds, retention, tenants, verification. Names load on
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from agentfsm.journal.checkpoint import verify_store
    from agentfsm.journal.erasure import ErasureQuery, ErasureReport
    from agentfsm.journal.listing import rebuild_run_info
    from agentfsm.journal.load import StoredRequest
    from agentfsm.journal.maintenance import Hold
    from agentfsm.journal.purge import KeptRun, PurgeReport, RetentionRule, end_hold, hold_run
    from agentfsm.journal.redact import TextRedaction
    from agentfsm.journal.replay import Divergence, Replay, ReplayTotals
    from agentfsm.journal.replay_settings import ReplaySettings
    from agentfsm.journal.tenant_store import TenantStore
    from agentfsm.journal.text_search import RunFilter
    from agentfsm.journal.verification import VerificationReport
    from agentfsm.loop.keys import Keyring

__all__ = [
    "Divergence",
    "ErasureQuery",
    "ErasureReport",
    "Hold",
    "KeptRun",
    "Keyring",
    "PurgeReport",
    "Replay",
    "ReplaySettings",
    "ReplayTotals",
    "RetentionRule",
    "RunFilter",
    "StoredRequest",
    "TenantStore",
    "TextRedaction",
    "VerificationReport",
    "end_hold",
    "hold_run",
    "rebuild_run_info",
    "verify_store",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "agentfsm.journal.checkpoint": "verify_store",
            "agentfsm.journal.erasure": "ErasureQuery ErasureReport",
            "agentfsm.journal.listing": "rebuild_run_info",
            "agentfsm.journal.load": "StoredRequest",
            "agentfsm.journal.maintenance": "Hold",
            "agentfsm.journal.purge": "KeptRun PurgeReport RetentionRule end_hold hold_run",
            "agentfsm.journal.redact": "TextRedaction",
            "agentfsm.journal.text_search": "RunFilter",
            "agentfsm.journal.replay": "Divergence Replay ReplayTotals",
            "agentfsm.journal.replay_settings": "ReplaySettings",
            "agentfsm.journal.tenant_store": "TenantStore",
            "agentfsm.journal.verification": "VerificationReport",
            "agentfsm.loop.keys": "Keyring",
        },
    )
