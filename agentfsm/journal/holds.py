"""Puts runs on hold and ends their holds, sealed under the host's key, and finds holds that somebody else changed.

A hold that was ended stays in its store as such. So whoever writes to the store without the secret can neither end a
hold, because that would need its seal, nor remove it without a checkpoint showing that it is gone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace

from agentfsm.journal.maintenance import Damage, Hold
from agentfsm.journal.store import Store
from agentfsm.loop.keys import KeyPurpose, Keyring

__all__ = ["SignedHold", "end_hold", "find_changed_holds", "hold_run", "signed_hold", "why_held"]

SignedHold = tuple[int, str]
"""What a checkpoint signs of a hold: since when it is as it is, in milliseconds since the epoch, and its SHA-256."""


async def hold_run(store: Store, run_id: str, hold: Hold, keyring: Keyring) -> None:
    """Hold a run, whoever owns it: from now on it can be neither purged nor redacted.

    Args:
        store: The store.
        run_id: The run.
        hold: Why and by whom; it is sealed here.
        keyring: The keys of the host; the current one seals it.

    Raises:
        UnknownRunError: There is no such run.
        StoreError: The store cannot be written.
    """
    mac = keyring.current.seal(KeyPurpose.hold, _content(run_id, hold))
    await store.maintenance.set_hold(run_id, replace(hold, mac=mac))


async def end_hold(store: Store, run_id: str, keyring: Keyring, *, by: str = "", now: float | None = None) -> None:
    """End the hold of a run; does nothing if it has none.

    Args:
        store: The store.
        run_id: The run.
        keyring: The keys of the host; the current one seals that it was ended.
        by: Who ends it.
        now: The time, in seconds since the epoch; that of this machine by default.

    Raises:
        StoreError: The store cannot be read or written.
    """
    held = (await store.maintenance.holds()).get(run_id)
    if held is not None:
        at = max(time.time() if now is None else now, held.since)  # a checkpoint misses what is older than it signed
        await hold_run(store, run_id, Hold(held.reason, by, at, ended=True), keyring)


def why_held(run_id: str, hold: Hold | None, keyring: Keyring) -> str | None:
    """Why a run must be neither purged nor redacted; None if it may be.

    Args:
        run_id: The run.
        hold: The last hold of the run, or None.
        keyring: The keys of the host: without the seal of one of them, a hold has not ended.
    """
    if hold is None or (hold.ended and _is_sealed(run_id, hold, keyring)):
        return None
    return "somebody without the secret ended that: agentfsm verify" if hold.ended else hold.reason


def signed_hold(run_id: str, hold: Hold) -> SignedHold:
    """What a checkpoint signs of a hold.

    Args:
        run_id: The run.
        hold: The hold.
    """
    return _milliseconds(hold), hashlib.sha256(_content(run_id, hold)).hexdigest()


def find_changed_holds(
    holds: Mapping[str, Hold], keyring: Keyring | None, signed: Mapping[str, SignedHold] | None = None
) -> list[Damage]:
    """An entry for each hold that no secret of the host sealed, or that is not what a checkpoint signed, or newer.

    Args:
        holds: The holds of a store, by run.
        keyring: The keys of the host; without them, nothing shows who wrote a hold.
        signed: The holds of a checkpoint, by run, without those of runs that were purged; None without a checkpoint.
    """
    found: list[Damage] = []
    for run_id, hold in holds.items():
        if keyring is not None and not _is_sealed(run_id, hold, keyring):
            reason = "its hold was not written with the secret; if it is right, write it again: agentfsm store hold"
            found.append(Damage(run_id, reason))
    for run_id, (since, digest) in (signed or {}).items():
        now = signed_hold(run_id, holds[run_id]) if run_id in holds else None
        if now is None or now[0] < since or (now[0] == since and now[1] != digest):
            gone = "is gone" if now is None else "is older than, or not, that of the checkpoint"
            found.append(Damage(run_id, f"its hold {gone}: somebody removed it, or put an older one back"))
    return found


def _is_sealed(run_id: str, hold: Hold, keyring: Keyring) -> bool:
    return keyring.check_seal(KeyPurpose.hold, _content(run_id, hold), hold.mac) is True


def _content(run_id: str, hold: Hold) -> bytes:
    fields = (run_id, hold.reason, hold.by, _milliseconds(hold), hold.ended)
    return json.dumps(fields, separators=(",", ":"), default=repr).encode()  # a row may have other types


def _milliseconds(hold: Hold) -> int:
    return round(hold.since * 1000)
