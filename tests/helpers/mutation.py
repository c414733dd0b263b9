"""Mutation tests of the journal: deliberate faults in our code, and the tests that must catch each of them.

``python -m tests.helpers.mutation [PART/PARTS] [WORD...]`` tries them one at a time, each in a forked process.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple
from unittest import mock

import hypothesis
import pytest

importlib.import_module("pydantic")  # once, not in every child

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


class Mutant(NamedTuple):
    """One way to break the code: in ``file``, ``old`` becomes ``new``; ``tests`` must then fail.

    ``tests`` is a test file; or ``crashes`` and the names of scenarios, which are killed at every point; or
    ``simulation`` and a number of seeds.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


class MutantResult(NamedTuple):
    """The result of a mutant.

    Attributes:
        caught: Whether a test failed.
        by: The test that failed, or what happened instead.
    """

    caught: bool
    by: str


def try_mutant(mutant: Mutant) -> MutantResult:
    """Break the code in a child, and run the tests there.

    Raises:
        SystemExit: The snippet to replace does not occur in the file, or more than once.
    """
    path = ROOT / mutant.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} occurs {source.count(mutant.old)} times in {mutant.file}")
    assert not any(name.partition(".")[0] == "agentfsm" for name in sys.modules), (
        "a module that is imported already cannot be mutated"
    )
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run_in_child(path, source.replace(mutant.old, mutant.new), mutant.tests, writing)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    result = os.read(reading, 1000).decode()
    os.close(reading)
    if os.WIFSIGNALED(status):
        return MutantResult(os.WTERMSIG(status) == signal.SIGALRM, "it hangs")
    return MutantResult(result.startswith("caught "), result.partition(" ")[2])


def _run_in_child(path: Path, broken: str, tests: str, writing: int) -> None:
    try:
        signal.alarm(LIMIT_S)
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        hypothesis.settings.register_profile("mutants", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
        hypothesis.settings.load_profile("mutants")  # shrinking examples would only cost time
        compile(broken, str(path), "exec")  # a mutant that is not even Python proves nothing
        loaded = _load_broken(path, broken)
        result = " ".join(_run_tests(tests))
        os.write(writing, result.encode() if loaded else b"error the mutated module was never loaded")
    except BaseException as error:
        os.write(writing, f"error {type(error).__name__}: {error}"[:900].encode())
    finally:
        os._exit(0)


def _load_broken(path: Path, broken: str) -> list[str]:
    """Load a module from another text than its file's; its name is added to the returned list when it is loaded."""
    loaded: list[str] = []
    read = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if Path(self.path) == path:
            loaded.append(fullname)
            return self.source_to_code(broken, self.path)
        return read(self, fullname)

    mock.patch.object(SourceFileLoader, "get_code", get_code).start()
    return loaded


def _run_tests(tests: str) -> Iterator[str]:
    """``caught`` or ``missed``, and the test that failed."""
    kind, *names = tests.split()
    if not importlib.util.find_spec("agentfsm"):
        raise RuntimeError("agentfsm is not on the path")
    if kind.endswith(".py"):
        first = _FirstFailure()
        already = "-Wignore::pytest.PytestAssertRewriteWarning"  # hypothesis was imported before pytest started
        ours = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--assert=plain",
            already,
        ]  # pytest's assertion rewriting has its own loader
        code = pytest.main([*ours, str(ROOT / kind)], plugins=[first])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"pytest ended with {code}")
        yield from ("caught", first.failed) if code else ("missed", "")
        return
    from agentfsm import AgentfsmError
    from tests.helpers import crash_injection, fault_simulation

    try:
        if kind == "crashes":
            crash_injection.warm_up(names)
            crash_injection.crash_matrix(scenarios=tuple(names))
        else:
            for seed in range(int(names[0])):
                fault_simulation.simulate(seed)
    except (AssertionError, AgentfsmError) as error:
        yield from ("caught", f"{kind}: {error}"[:200])
    else:
        yield from ("missed", "")


class _FirstFailure:
    """Records the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


MIGRATION, APPROVALS = "tests/journal/test_migration.py", "tests/journal/test_approvals.py"
REFUSALS = "tests/journal/test_require_transition.py"
STORES, VERIFICATION = "tests/journal/test_stores.py", "tests/journal/test_verification.py"
SNAPSHOTS, FORGED_SNAPSHOTS = "tests/journal/test_snapshots.py", "tests/journal/test_forged_snapshots.py"
FORK, RESTORE, SECRETS, STOPPING = (
    "tests/journal/test_fork.py",
    "tests/journal/test_rehydrate.py",
    "tests/journal/test_secrets.py",
    "tests/journal/test_cancel_and_store_errors.py",
)

MUTANTS = (
    Mutant(
        "no epoch check",
        "agentfsm/journal/sqlite/sqlite_store.py",
        "AND epoch = ? AND seq",
        "AND ? > 0 AND seq",
        STORES,
    ),
    Mutant(
        "the MAC of a row is not checked",
        "agentfsm/journal/verification.py",
        "        macs.verify_head(head)\n    except InvalidRecordError as error:",
        "    except InvalidRecordError as error:",
        "tests/journal/test_tampered_store.py",
    ),
    Mutant(
        "the seal of a snapshot is not checked",
        "agentfsm/journal/snapshot.py",
        "    if not keyring.check_seal(KeyPurpose.snapshot, _content_bytes(sealed), sealed.mac):\n",
        "    if False:\n",
        FORGED_SNAPSHOTS,
    ),
    Mutant(
        "the records after a snapshot are not verified",
        "agentfsm/journal/load.py",
        "    if not fits or not verify_after(",
        "    if not fits or None is verify_after(",
        FORGED_SNAPSHOTS,
    ),
    Mutant(
        "the records before a snapshot are not compared with it",
        "agentfsm/journal/load.py",
        "        if (len(records), records[-1].hash) != self._last:\n",
        "        if False:\n",
        FORGED_SNAPSHOTS,
    ),
    Mutant(
        "a snapshot is used with another first record",
        "agentfsm/journal/snapshot.py",
        'if first.hash != data["first"] or was_redacted(first):',
        "if was_redacted(first):",
        FORGED_SNAPSHOTS,
    ),
    Mutant(
        "a snapshot loses the instructions",
        "agentfsm/journal/snapshot.py",
        "(*self._system, *compaction.kept)",
        "compaction.kept",
        SNAPSHOTS,
    ),
    Mutant(
        "a snapshot forgets what earlier records withhold",
        "agentfsm/journal/snapshot.py",
        "            withholder.placeholder_for(secret)\n",
        "            pass\n",
        SNAPSHOTS,
    ),
    Mutant(
        "a snapshot is made in the midst of the calls of a state",
        "agentfsm/journal/snapshot.py",
        "if run.state_calls or len(run.batch) > MAX_CALLS:",
        "if len(run.batch) > MAX_CALLS:",
        SNAPSHOTS,
    ),
    Mutant(
        "votes after a snapshot are not held against its request",
        "agentfsm/journal/history_verifier.py",
        "            new._request_ref, new._quorum = known.request_ref, known.quorum\n",
        "            new._request_ref = known.request_ref\n",
        FORGED_SNAPSHOTS,
    ),
    Mutant(
        "records after a snapshot may be sealed under any secret",
        "agentfsm/journal/verification.py",
        "    return not macs.doubt() and (head.seq, head.hash)",
        "    return (head.seq, head.hash)",
        FORGED_SNAPSHOTS,
    ),
    Mutant(
        "no head check",
        "agentfsm/journal/sqlite/sqlite_store.py",
        "epoch = ? AND seq = ? AND owner",
        "epoch = ? AND -2 < ? AND owner",
        STORES,
    ),
    Mutant(
        "lease reopens a finished run",
        "agentfsm/journal/sqlite/sqlite_store.py",
        "{_FENCE} AND status <> 'finished'",
        "{_FENCE}",
        STORES,
    ),
    Mutant(
        "a run has two owners",
        "agentfsm/journal/sqlite/sqlite_store.py",
        "            if current is not None:\n                raise StaleLease",
        "            if False:\n                raise StaleLease",
        STORES,
    ),
    Mutant(
        "no lock on the file",
        "agentfsm/journal/sqlite/store_file.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        STORES,
    ),
    Mutant(
        "futures are resolved before the commit",
        "agentfsm/journal/sqlite/sqlite_writer.py",
        '            db.execute("COMMIT")\n',
        '            _resolve_futures(completions or [], None); db.execute("COMMIT")\n',
        "crashes linear",
    ),
    Mutant(
        "synchronous off",
        "agentfsm/journal/sqlite/sqlite_schema.py",
        "PRAGMA synchronous = {level}",
        "PRAGMA synchronous = OFF",
        "tests/journal/test_power_loss.py",
    ),
    Mutant(
        "what was overwritten stays in the log",
        "agentfsm/journal/sqlite/sqlite_writer.py",
        "if any(truncate_wal for",
        "if False and any(truncate_wal for",
        VERIFICATION,
    ),
    Mutant(
        "effect before intent",
        "agentfsm/runtime/tool_dispatch.py",
        "        attempts.append(_record_intent(context, effect_id, tool))\n",
        "        attempts.append(1)\n",
        "crashes linear",
    ),
    Mutant(
        "commit after the effect",
        "agentfsm/runtime/tool_dispatch.py",
        "    if context.recorder.sink is not None:  # one commit for all calls that run together\n",
        "    if False:\n",
        "crashes linear",
    ),
    Mutant(
        "commit after the effect, in the simulation",
        "agentfsm/runtime/tool_dispatch.py",
        "    if context.recorder.sink is not None:  # one commit for all calls that run together\n",
        "    if False:\n",
        "simulation 50",
    ),
    Mutant(
        "a call in doubt is run again",
        "agentfsm/runtime/approval.py",
        "if call_state.started and not is_repeatable(context, tool):",
        "if False:",
        "crashes linear",
    ),
    Mutant(
        "results of an interrupted batch are forgotten",
        "agentfsm/runtime/driver.py",
        "self.context.completed_results.extend(resume_point.results.values())",
        "pass",
        "crashes parallel",
    ),
    Mutant(
        "the last event is emitted before its commit",
        "agentfsm/runtime/driver.py",
        "cancellation = await shielded(recorder.commit())",
        "recorder.push(); cancellation = None",
        STOPPING,
    ),
    Mutant(
        "hash without prev",
        "agentfsm/journal/hash_chain.py",
        'b"\\0" + previous + body',
        'b"\\0" + body',
        VERIFICATION,
    ),
    Mutant(
        "verify without links",
        "agentfsm/journal/hash_chain.py",
        "if expected != record.hash:",
        "if False:",
        VERIFICATION,
    ),
    Mutant(
        "verify without legality",
        "agentfsm/journal/history_verifier.py",
        "if source != self.state:",
        "if False:",
        VERIFICATION,
    ),
    Mutant(
        "verify without guards",
        "agentfsm/journal/history_verifier.py",
        '        self._verify_guards(row, body["tried"])\n',
        "",
        VERIFICATION,
    ),
    Mutant("verify without commitments", "agentfsm/journal/hash_chain.py", "!= digest:", "== '':", VERIFICATION),
    Mutant(
        "verify without the store's head",
        "agentfsm/journal/hash_chain.py",
        "if head is not None and",
        "if False and",
        VERIFICATION,
    ),
    Mutant(
        "verify without checkpoints",
        "agentfsm/journal/hash_chain.py",
        "if records[seq - 1].hash != expected:",
        "if False:",
        VERIFICATION,
    ),
    Mutant(
        "a redaction is not recorded",
        "agentfsm/journal/redact.py",
        "await store.append(lease, written, status)",
        "pass",
        VERIFICATION,
    ),
    Mutant(
        "cancellation is not recorded",
        "agentfsm/journal/journal_writer.py",
        "if cancel is not None or aborted",
        "if aborted",
        STOPPING,
    ),
    Mutant(
        "failures are not recorded",
        "agentfsm/journal/journal_writer.py",
        "if isinstance(decision.guard_result, Failure):\n        texts",
        "if False:\n        texts",
        RESTORE,
    ),
    Mutant(
        "time is not recorded",
        "agentfsm/journal/journal_writer.py",
        "if elapsed_us or silence_us else",
        "if False else",
        RESTORE,
    ),
    Mutant(
        "a fork keeps its parent's id",
        "agentfsm/journal/fork.py",
        "run.run_id, run.parent = new_id, None",
        "run.parent = None",
        FORK,
    ),
    Mutant(
        "a changed graph is not detected",
        "agentfsm/journal/migration.py",
        'if pinned["fingerprint"] == graph.fingerprint:',
        "if True:",
        FORK,
    ),
    Mutant(
        "each process records the migration again",
        "agentfsm/journal/migration.py",
        'if pinned["fingerprint"] == graph.fingerprint:',
        'if pinned["fingerprint"] == graph.fingerprint and not migrations:',
        "crashes stricter",
    ),
    Mutant(
        "a migrated run has its old names when it is resumed",
        "agentfsm/journal/rehydrate.py",
        "names.rename(self.run)\n        self.visited",
        "self.visited",
        "crashes renamed",
    ),
    Mutant(
        "a run whose path would have been different is migrated",
        "agentfsm/journal/migration.py",
        "    if not replayed.same:\n        raise",
        "    if False:\n        raise",
        MIGRATION,
    ),
    Mutant(
        "verify believes that a path was replayed",
        "agentfsm/journal/history_verifier.py",
        'if body["judged"] == "replayed":',
        "if False:",
        MIGRATION,
    ),
    Mutant(
        "verify continues with the old graph",
        "agentfsm/journal/history_verifier.py",
        'self._pin_graph(body["graph"])\n        state = names',
        "state = names",
        MIGRATION,
    ),
    Mutant(
        "a reply to another request is accepted",
        "agentfsm/loop/suspension.py",
        "if digest.startswith(to) and not too_short:",
        "if True:",
        APPROVALS,
    ),
    Mutant(
        "verify believes that there was a request for a reply",
        "agentfsm/journal/history_verifier.py",
        'if "to" in body and self._request_ref !=',
        "if False and self._asked !=",
        APPROVALS,
    ),
    Mutant(
        "a reply for which there is no transition is used",
        "agentfsm/runtime/run_request.py",
        "    if row is not None and raised is None:",
        "    if row is not None or raised is None:",
        REFUSALS,
    ),
    Mutant(
        "secrets are written",
        "agentfsm/loop/withholding.py",
        "present = [form for form in self._forms if form in text]",
        "present = list[str]()",
        SECRETS,
    ),
    Mutant(
        "secret arguments are written",
        "agentfsm/loop/withholding.py",
        'return value if value is None or value == "" else self.placeholder_for(value)',
        "return value",
        SECRETS,
    ),
    Mutant(
        "a key that was passed in code is written",
        "agentfsm/agent/config.py",
        "for secret in (*host.secrets, *secrets_of(model), *chain(*of_servers)))",
        "for secret in (*host.secrets, *chain(*of_servers)))",
        SECRETS,
    ),
    Mutant(
        "missing secrets are not asked for",
        "agentfsm/runtime/approval.py",
        "    if tool is None or not missing:\n",
        "    if True:\n",
        SECRETS,
    ),
)


def main(arguments: list[str]) -> int:
    """Try mutants and print their results."""
    part, parts = 1, 1
    if arguments and "/" in arguments[0]:
        part, parts = map(int, arguments.pop(0).split("/"))
    chosen = [m for m in MUTANTS[part - 1 :: parts] if not arguments or any(word in m.name for word in arguments)]
    missed = 0
    for mutant in chosen:
        result = try_mutant(mutant)
        missed += not result.caught
        sys.stdout.write(f"{'caught' if result.caught else 'MISSED'}  {mutant.name:<60} {result.by}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{missed} missed of {len(chosen)}\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
