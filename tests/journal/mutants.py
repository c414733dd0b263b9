"""Ways to break our own code that would hurt, and the tests that must find each of them.

``python -m tests.journal.mutants [PART/PARTS] [WORD...]`` tries them one at a time (all, those of a part, or those
whose names hold one of the words). It prints each mutant and who caught it, and ends with 1 if one was not.
"""

from __future__ import annotations

import sys

from tests.journal.breaking import Mutant, tried

MIGRATION, APPROVALS = "tests/journal/test_migration.py", "tests/journal/test_approvals.py"
REFUSALS = "tests/journal/test_refusals.py"
STORES, AUDIT = "tests/journal/test_stores.py", "tests/journal/test_audit.py"
REPLAY, RESTORE, SECRETS, STOPPING = (
    "tests/journal/test_replay_fork.py",
    "tests/journal/test_restore.py",
    "tests/journal/test_secrets.py",
    "tests/journal/test_stopping.py",
)

MUTANTS = (
    Mutant(
        "no epoch check",
        "agentfsm/journal/sqlite_rows.py",
        "AND epoch = ?6 AND seq",
        "AND ?6 > 0 AND seq",
        STORES,
    ),
    Mutant(
        "no head check",
        "agentfsm/journal/sqlite_rows.py",
        "seq + 1 = coalesce(?7, seq + 1)",
        "0 < coalesce(?7, 1)",
        STORES,
    ),
    Mutant(
        "lease reopens a finished run",
        "agentfsm/journal/sqlite_rows.py",
        "(status <> 'finished' OR ?3 = 'finished')",
        "?3 <> ''",
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
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        STORES,
    ),
    Mutant(
        "waiters are told in front of the commit",
        "agentfsm/journal/sqlite_writer.py",
        '            db.execute("COMMIT")\n',
        '            _tell(done or []); db.execute("COMMIT")\n',
        "crashes linear",
    ),
    Mutant(
        "synchronous off",
        "agentfsm/journal/sqlite_file.py",
        "PRAGMA synchronous = {level}",
        "PRAGMA synchronous = OFF",
        "tests/journal/test_power.py",
    ),
    Mutant(
        "what was overwritten stays",
        "agentfsm/journal/sqlite_writer.py",
        "if any(wipe for",
        "if False and any(wipe for",
        AUDIT,
    ),
    Mutant(
        "effect before intent",
        "agentfsm/runtime/dispatch.py",
        "    attempts = _write_down(context, ready)\n",
        "    attempts = [1] * len(ready)\n",
        "crashes linear",
    ),
    Mutant(
        "commit after the effect",
        "agentfsm/runtime/dispatch.py",
        "    if context.recorder.keeper is not None:  # one commit for all that run together\n",
        "    if False:\n",
        "crashes linear",
    ),
    Mutant(
        "commit after the effect, in the simulation",
        "agentfsm/runtime/dispatch.py",
        "    if context.recorder.keeper is not None:  # one commit for all that run together\n",
        "    if False:\n",
        "simulation 50",
    ),
    Mutant(
        "doubt is not asked about",
        "agentfsm/runtime/dispatch.py",
        "if entry.started and not _repeatable(context, tool):",
        "if False:",
        "crashes linear",
    ),
    Mutant(
        "results of a cut-off batch are forgotten",
        "agentfsm/runtime/driver.py",
        "self.context.finished.extend(taken_up.results.values())",
        "pass",
        "crashes parallel",
    ),
    Mutant(
        "the end is told in front of its commit",
        "agentfsm/runtime/driver.py",
        "late = await whatever_comes(recorder.commit())",
        "recorder.push()",
        STOPPING,
    ),
    Mutant(
        "hash without prev",
        "agentfsm/journal/records.py",
        'b"\\0" + bytes.fromhex(previous) + body',
        'b"\\0" + body',
        AUDIT,
    ),
    Mutant("verify without links", "agentfsm/journal/chain.py", "if own != row.hash:", "if False:", AUDIT),
    Mutant("verify without legality", "agentfsm/journal/course.py", "if source != self.state:", "if False:", AUDIT),
    Mutant("verify without guards", "agentfsm/journal/course.py", 'if body["tried"] != tried:', "if False:", AUDIT),
    Mutant("verify without commitments", "agentfsm/journal/chain.py", "!= promised:", "== b'':", AUDIT),
    Mutant(
        "verify without the store's note",
        "agentfsm/journal/chain.py",
        "if head is not None and",
        "if False and",
        AUDIT,
    ),
    Mutant(
        "verify without checkpoints",
        "agentfsm/journal/chain.py",
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
        "if isinstance(decision.found, Failure):\n        texts",
        "if False:\n        texts",
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
        "agentfsm/journal/migration.py",
        'if pinned["fingerprint"] == graph.fingerprint:',
        "if True:",
        REPLAY,
    ),
    Mutant(
        "a change of graph is told by each life anew",
        "agentfsm/journal/migration.py",
        'if pinned["fingerprint"] == graph.fingerprint:',
        'if pinned["fingerprint"] == graph.fingerprint and not migrations:',
        "crashes stricter",
    ),
    Mutant(
        "a run that was taken over has its old names when it is taken up again",
        "agentfsm/journal/restore.py",
        "names.rename(self.run)",
        "pass",
        "crashes renamed",
    ),
    Mutant(
        "a path that would have been another is taken over",
        "agentfsm/journal/migration.py",
        "    if not told.same:\n        raise",
        "    if False:\n        raise",
        MIGRATION,
    ),
    Mutant(
        "verify believes that a path was replayed",
        "agentfsm/journal/course.py",
        'if body["judged"] == "replayed":',
        "if False:",
        MIGRATION,
    ),
    Mutant(
        "verify goes on under the old graph",
        "agentfsm/journal/course.py",
        'self._pin(body["graph"])\n        state = names',
        "state = names",
        MIGRATION,
    ),
    Mutant(
        "an answer to something else is taken",
        "agentfsm/agent/going_on.py",
        "if len(self.to) >= _DIGITS and asked[1].startswith(self.to):",
        "if True:",
        APPROVALS,
    ),
    Mutant(
        "verify believes that an answer was asked for",
        "agentfsm/journal/course.py",
        'if "to" in body and self._asked !=',
        "if False and self._asked !=",
        APPROVALS,
    ),
    Mutant(
        "an answer that moves nothing is begun with",
        "agentfsm/runtime/errand.py",
        "    if not moves(machine, run, outcome):\n        what",
        "    if False:\n        what",
        REFUSALS,
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
        "a key that was given in code is written",
        "agentfsm/journal/keeper.py",
        ", *(secret.get_secret_value() for secret in known)",
        "",
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


def main(arguments: list[str]) -> int:
    """Try mutants, and say what became of them."""
    part, parts = 1, 1
    if arguments and "/" in arguments[0]:
        part, parts = map(int, arguments.pop(0).split("/"))
    chosen = [m for m in MUTANTS[part - 1 :: parts] if not arguments or any(word in m.name for word in arguments)]
    missed = 0
    for mutant in chosen:
        found = tried(mutant)
        missed += not found.caught
        sys.stdout.write(f"{'caught' if found.caught else 'MISSED'}  {mutant.name:<45} {found.by}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{missed} missed of {len(chosen)}\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
