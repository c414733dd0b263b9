"""Breaks our own code in ways that would hurt, one at a time, and sees that the tests find each of them.

``python -m tests.journal.mutants`` works on a copy of the tree; it prints each mutant and who caught it, and
ends with 1 if one was not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """One way to break the code: in ``file``, ``old`` becomes ``new``; ``tests`` must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


STORES, CRASHES, AUDIT = "tests/journal/test_stores.py", "tests/journal/test_crashes.py", "tests/journal/test_audit.py"
REPLAY, RESTORE, SECRETS, STOPPING = (
    "tests/journal/test_replay_fork.py",
    "tests/journal/test_restore.py",
    "tests/journal/test_secrets.py",
    "tests/journal/test_stopping.py",
)

MUTANTS = (
    Mutant(
        "no epoch check",
        "agentfsm/journal/sqlite.py",
        "run_id = ? AND epoch = ? AND seq + 1",
        "run_id = ? AND ? > 0 AND seq + 1",
        STORES,
    ),
    Mutant(
        "no head check", "agentfsm/journal/sqlite.py", "seq + 1 = coalesce(?, seq + 1)", "0 < coalesce(?, 1)", STORES
    ),
    Mutant(
        "lease reopens a finished run",
        "agentfsm/journal/sqlite.py",
        "(status <> 'finished' OR ? = 'finished')",
        "? <> ''",
        STORES,
    ),
    Mutant(
        "a run has two holders",
        "agentfsm/journal/sqlite.py",
        "        if held is not None:\n            raise StaleLease",
        "        if False:\n            raise StaleLease",
        STORES,
    ),
    Mutant(
        "no lock on the file",
        "agentfsm/journal/filelock.py",
        "fcntl.flock(descriptor",
        "(lambda *_: None)(descriptor",
        STORES,
    ),
    Mutant(
        "waiters are told in front of the commit",
        "agentfsm/journal/sqlite.py",
        '            db.execute("COMMIT")\n',
        '            _tell(done or []); db.execute("COMMIT")\n',
        CRASHES,
    ),
    Mutant(
        "synchronous off",
        "agentfsm/journal/sqlite.py",
        "PRAGMA synchronous = {self._synchronous}",
        "PRAGMA synchronous = OFF",
        "tests/journal/test_power.py",
    ),
    Mutant(
        "what was overwritten stays",
        "agentfsm/journal/sqlite.py",
        "if any(wipe for",
        "if False and any(wipe for",
        AUDIT,
    ),
    Mutant(
        "effect before intent",
        "agentfsm/runtime/dispatch.py",
        "    attempts = await _write_down(context, ready)\n",
        "    attempts = [1] * len(ready)\n",
        CRASHES,
    ),
    Mutant(
        "intent is not awaited",
        "agentfsm/runtime/dispatch.py",
        "    if recorder.keeper is not None:\n        await recorder.commit()\n    return attempts",
        "    recorder.push()\n    return attempts",
        CRASHES,
    ),
    Mutant(
        "doubt is not asked about",
        "agentfsm/runtime/dispatch.py",
        "if entry.started and not _repeatable(context, tool):",
        "if False:",
        CRASHES,
    ),
    Mutant(
        "results of a cut-off batch are forgotten",
        "agentfsm/runtime/driver.py",
        "self.context.finished.extend(taken_up.results.values())",
        "pass",
        CRASHES,
    ),
    Mutant(
        "the end is told in front of its commit",
        "agentfsm/runtime/driver.py",
        "# durable before anybody is told\n                await recorder.commit()",
        "\n                recorder.push()",
        STOPPING,
    ),
    Mutant(
        "hash without prev",
        "agentfsm/journal/records.py",
        'b"\\0" + bytes.fromhex(previous) + body',
        'b"\\0" + body',
        AUDIT,
    ),
    Mutant("verify without links", "agentfsm/journal/verify.py", "if own != row.hash:", "if False:", AUDIT),
    Mutant("verify without legality", "agentfsm/journal/verify.py", "if source != self.state:", "if False:", AUDIT),
    Mutant("verify without guards", "agentfsm/journal/verify.py", 'if body["tried"] != tried:', "if False:", AUDIT),
    Mutant("verify without commitments", "agentfsm/journal/verify.py", "!= promised:", "== b'':", AUDIT),
    Mutant(
        "verify without the store's note",
        "agentfsm/journal/verify.py",
        "if head is not None and",
        "if False and",
        AUDIT,
    ),
    Mutant(
        "verify without checkpoints",
        "agentfsm/journal/verify.py",
        "if rows[seq - 1].hash != expected:",
        "if False:",
        AUDIT,
    ),
    Mutant(
        "a redaction is not told",
        "agentfsm/journal/redact.py",
        "await store.append(lease, [said], status)",
        "pass",
        AUDIT,
    ),
    Mutant(
        "cancellation is not recorded",
        "agentfsm/journal/scribe.py",
        "if cancel is not None or aborted",
        "if aborted",
        STOPPING,
    ),
    Mutant(
        "failures are not recorded",
        "agentfsm/journal/scribe.py",
        "if isinstance(decision.found, Failure):\n        body",
        "if False:\n        body",
        RESTORE,
    ),
    Mutant("time is not recorded", "agentfsm/journal/scribe.py", "if took or silence else", "if False else", RESTORE),
    Mutant(
        "a fork keeps its parent's id",
        "agentfsm/journal/forks.py",
        "run.run_id, run.parent = new_id, None",
        "run.parent = None",
        REPLAY,
    ),
    Mutant(
        "a graph that changed is not seen",
        "agentfsm/journal/resume.py",
        'if pinned["fingerprint"] == graph.fingerprint:',
        "if True:",
        REPLAY,
    ),
    Mutant("secrets are written", "agentfsm/journal/secrets.py", "if secret in text:", "if False:", SECRETS),
    Mutant(
        "secret arguments are written",
        "agentfsm/journal/secrets.py",
        "if name in secret else value",
        "if False else value",
        SECRETS,
    ),
    Mutant(
        "lost secrets are not asked for",
        "agentfsm/runtime/dispatch.py",
        "    if not lost:\n",
        "    if True:\n",
        SECRETS,
    ),
)


def caught(tree: Path, mutant: Mutant) -> str:
    """The first test that fails under a mutant, or an empty string."""
    path = tree / mutant.file
    whole = path.read_text(encoding="utf-8")
    if whole.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} stands {whole.count(mutant.old)} times in {mutant.file}")
    path.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.tests],
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=180,
            env={**os.environ, "PYTHONPATH": str(tree)},
            check=False,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else ""
    except subprocess.TimeoutExpired:
        return "it hangs"
    finally:
        path.write_text(whole, encoding="utf-8")


def main(names: list[str]) -> int:
    """Try every mutant, or those whose names hold one of the words given."""
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for part in ("agentfsm", "tests", "examples"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for mutant in MUTANTS:
            if names and not any(word in mutant.name for word in names):
                continue
            by = caught(tree, mutant)
            left += not by
            print(f"{'caught ' if by else 'MISSED '} {mutant.name:<45} {by}", flush=True)
    print(f"{left} missed of {len(MUTANTS)}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
