"""A thief has a copy of everything that a host wrote, and no key: he reads no secret and uses no approval.

He has the store with its write-ahead log, its checkpoint log, an export and a suspension record, knows how agentfsm
works, and runs it himself. What he may do by ``SECURITY.md``: read all that is no secret, and see that two secrets are
equal. ``tests/test_canaries.py`` searches what is written for secrets in many more places.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from pydantic import BaseModel, SecretStr

from agentfsm import Actor, Agent, AgentfsmError, Allow, Approval, Edit, FileReplayGuard, Host, SqliteStore, tool
from agentfsm.journal.adoption import adopt
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.records import export_lines
from agentfsm.journal.redact import redact_text
from agentfsm.journal.verification import GOOD, OPEN, verify_export
from agentfsm.loop.canonical_json import encode
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.loop.withholding import SecretOpener, Withholder
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_rows import unpack_rows
from tests.helpers.secret_search import forms, found_in

SECRET = b"of the host, 32 random bytes or so"
KEYRING = Keyring(SECRET)
THIEF = b"of the thief, who has bytes of his own"
PASSWORD, TOKEN, PIN, KEY, GONE = "hunter-22-horse", "tk_5d41402abc", "4711", "sk-live-0123456789ab", "ann@example.org"
SECRETS = {"password": PASSWORD, "token": TOKEN, "key": KEY, "redacted": GONE, "host": SECRET.decode()}
"""What he must not be able to read; the PIN, which is found by chance in random bytes, has attacks of its own."""


class Login(BaseModel):
    token: SecretStr


@dataclass
class Loot:
    """The copy, and what was done with it."""

    folder: Path
    paid: list[str] = field(default_factory=list[str])

    @property
    def store(self) -> Path:
        return self.folder / "runs.db"

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def everything(self) -> bytes:
        return b"\n".join(file.read_bytes() for file in sorted(self.folder.iterdir()) if file.is_file())

    def placeholders(self) -> list[tuple[str, str]]:
        """Key id and text of each sealed value."""
        return [
            (k.decode(), v.decode()) for k, v in re.findall(rb"\[sealed ([0-9a-f]{8}) ([\w-]+)\]", self.everything())
        ]

    def digests(self) -> set[str]:
        return {found.decode() for found in re.findall(rb"[0-9a-f]{64}", self.everything())}

    def salts(self) -> list[bytes]:
        return [bytes.fromhex(found.decode()) for found in re.findall(rb'\["([0-9a-f]{32})",', self.everything())]

    def agent(self, secret: bytes, script: list[Any], **more: Any) -> Agent:
        """An agent with the tools of the host; what they are called with is written down."""

        @tool(secret=["password", "pin"], requires_approval=True)
        def pay(user: str, password: str, pin: str, login: Login) -> str:
            """Pay."""
            self.paid.append(f"{user} {password} {pin} {login.token.get_secret_value()}")
            return "paid"

        @tool(requires_approval=Approval(n=2, roles=("manager",)))
        def transfer(amount: int) -> str:
            """Transfer."""
            self.paid.append(f"transfer {amount}")
            return "transferred"

        host = Host(clock=FakeClock(), secret=secret, secrets=[SecretStr(KEY)] if secret is SECRET else [], **more)
        return Agent(ScriptedModel(script), tools=[pay, transfer], host=host)


ASKS = call("pay", user="ann", password=PASSWORD, pin=PIN, login={"token": TOKEN})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The host's folder while its store is open, so that the log has what is not in the database yet."""
    folder = tmp_path_factory.mktemp("host")
    loot = Loot(folder)

    async def work() -> None:
        guard = FileReplayGuard(tmp_path_factory.mktemp("used"))
        with SqliteStore(loot.store) as store:
            await loot.agent(SECRET, [ASKS], store=store).run(f"pay with {KEY}", run_id="waits")
            transfers = loot.agent(SECRET, [call("transfer", amount=5)], store=store)
            await transfers.run("transfer", run_id="votes")
            await loot.agent(SECRET, [], store=store).resume("votes", Allow(), by=Actor("bob", ("manager",)))
            await loot.agent(SECRET, ["done"], store=store).run(f"write to {GONE}", run_id="redacted")
            await redact_text(store, GONE, KEYRING)
            waiting = await loot.agent(SECRET, [ASKS], replay_guard=guard).run(f"pay with {KEY}")
            outcome: Any = waiting.outcome
            (folder / "record.json").write_text(outcome.suspension_record.to_json())
            for run_id in ("waits", "votes"):
                lines = "".join(export_lines(await store.records(run_id)))
                (folder / f"{run_id}.jsonl").write_text(lines)
            shutil.copytree(folder, folder / "copy")

    asyncio.run(work())
    return folder / "copy"


@pytest.fixture
def loot(made: Path, tmp_path: Path) -> Loot:
    return Loot(Path(shutil.copytree(made, tmp_path / "copy")))


# -- what he tries to read --------------------------------------------------------------------------------------


def has_secret(data: bytes) -> bool:
    return any(value.encode() in form for form in forms(data, 2) for value in SECRETS.values())


def guesses(loot: Loot) -> Iterator[bytes]:
    """Keys and secrets that somebody may have derived from what is public."""
    key_ids = {key for key, _ in loot.placeholders()}
    yield from (b"", b"agentfsm", b"secret", b"AGENTFSM_SECRET", b"\0" * 32, THIEF, *(k.encode() for k in key_ids))
    yield from (b"waits", b"votes", json.loads(loot.text("record.json"))["record_id"].encode())
    yield from (bytes.fromhex(digest) for digest in list(loot.digests())[:50])
    yield from loot.salts()[:50]


def opened_with(loot: Loot, secret: bytes) -> bytes:
    """Everything, with what this secret opens, whatever key its placeholders name."""
    keyring = Keyring(secret or b"x")
    text = loot.everything().decode(errors="replace")
    renamed = re.sub(r"\[sealed [0-9a-f]{8} ", f"[sealed {keyring.current.key_id} ", text)
    return str(SecretOpener(keyring).open(renamed)).encode()


def decrypted(loot: Loot, keys: Iterator[bytes]) -> Iterator[bytes]:
    for key, (_, text) in itertools.product(keys, set(loot.placeholders())):
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        try:
            yield AESSIV(hashlib.sha512(key).digest()[:32]).decrypt(data, None)
            yield AESSIV(key.ljust(32, b"\0")[:32]).decrypt(data, None)
        except InvalidTag:
            continue


def stretched(loot: Loot, make: Callable[[bytes], bytes]) -> bytes:
    return b"\n".join(decrypted(loot, map(make, guesses(loot))))


def pins(loot: Loot, digest_of: Callable[[str], str]) -> bytes:
    """The PINs whose digest, made in some way, is anywhere in the loot."""
    everything = loot.everything().decode(errors="replace")
    hits = [pin for pin in (f"{n:04}" for n in range(10_000)) if digest_of(pin) in everything]
    return PASSWORD.encode() if PIN in hits else b""


def arguments(pin: str) -> dict[str, Any]:
    """The arguments of the call, of which he knows all but the PIN."""
    return {"login": {"token": TOKEN}, "password": PASSWORD, "pin": pin, "user": "ann"}


def by_salt(loot: Loot, values: list[str]) -> bytes:
    digests = loot.digests()
    for salt, value in itertools.product(loot.salts(), values):
        for text in (value, encode(value), encode({"content": value})):
            if hashlib.sha256(salt + text.encode()).hexdigest() in digests:
                return PASSWORD.encode()
    return b""


def sealed_alike(loot: Loot, value: str) -> bytes:
    """Whether a value that he guesses is sealed like one of those under any key that he can derive."""
    texts = {text for _, text in loot.placeholders()}
    for secret in guesses(loot):
        made = Withholder(Keyring(secret or b"x").current).placeholder_for(value)
        if made.split()[-1].rstrip("]") in texts:
            return PASSWORD.encode()
    return b""


def lengths(loot: Loot) -> bytes:
    """Whether the lengths of sealed values tell short secrets apart."""
    found = {len(text) for _, text in loot.placeholders()}
    return b"" if len(found) == 1 else PASSWORD.encode()


def freed_pages(loot: Loot) -> bytes:
    with contextlib.closing(sqlite3.connect(loot.store, isolation_level=None)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return b"" if db.execute("PRAGMA integrity_check").fetchone()[0] != "ok" else loot.store.read_bytes()


def dumped(loot: Loot) -> bytes:
    with contextlib.closing(sqlite3.connect(loot.store, isolation_level=None)) as db:
        return "\n".join(db.iterdump()).encode()


def by_command(loot: Loot, *words: str) -> bytes:
    from click.testing import CliRunner

    from agentfsm.cli.app import app

    result = CliRunner().invoke(app, [*words, "--store", str(loot.store)], env={"AGENTFSM_SECRET": THIEF.decode()})
    return result.output.encode() + repr(result.exception).encode()


READS: dict[str, Callable[[Loot], bytes]] = {
    "the database": lambda loot: loot.store.read_bytes(),
    "the write-ahead log": lambda loot: (loot.folder / "runs.db-wal").read_bytes(),
    "its shared memory": lambda loot: (loot.folder / "runs.db-shm").read_bytes(),
    "the suspension record": lambda loot: loot.text("record.json").encode(),
    "the exports": lambda loot: (loot.text("waits.jsonl") + loot.text("votes.jsonl")).encode(),
    "a dump of the database": dumped,
    "pages that were freed": freed_pages,
    "all of it at once": lambda loot: loot.everything(),
    "opened with a secret of his own": lambda loot: opened_with(loot, THIEF),
    "opened with the empty secret": lambda loot: opened_with(loot, b""),
    "opened with the key id": lambda loot: opened_with(loot, loot.placeholders()[0][0].encode()),
    "opened with the name of the variable": lambda loot: opened_with(loot, b"AGENTFSM_SECRET"),
    "opened with every guess": lambda loot: b"".join(opened_with(loot, guess) for guess in guesses(loot)),
    "decrypted with what is public": lambda loot: stretched(loot, bytes),
    "decrypted with its SHA-256": lambda loot: stretched(loot, lambda guess: hashlib.sha256(guess).digest()),
    "decrypted with its HMAC": lambda loot: stretched(loot, lambda g: hmac.digest(b"agentfsm", g, "sha256")),
    "decrypted with derived keys": lambda loot: stretched(
        loot, lambda guess: Keyring(guess or b"x").current.key(KeyPurpose.sealing)
    ),
    "decrypted with keys for other purposes": lambda loot: stretched(
        loot, lambda guess: Keyring(guess or b"x").current.key(KeyPurpose.record)
    ),
    "a guessed password, by the salts": lambda loot: by_salt(loot, [PASSWORD, TOKEN, KEY]),
    "the redacted address, by the salts": lambda loot: by_salt(loot, [GONE, f"write to {GONE}"]),
    "a guessed password, sealed by himself": lambda loot: sealed_alike(loot, PASSWORD),
    "the length of what is sealed": lengths,
    "the PIN by its SHA-256": lambda loot: pins(loot, lambda pin: hashlib.sha256(pin.encode()).hexdigest()),
    "the PIN by that of its JSON": lambda loot: pins(
        loot, lambda pin: hashlib.sha256(encode(pin).encode()).hexdigest()
    ),
    "the PIN by that of the arguments": lambda loot: pins(
        loot, lambda pin: hashlib.sha256(encode(arguments(pin)).encode()).hexdigest()
    ),
    "the PIN by the signature of the call": lambda loot: pins(
        loot, lambda pin: "pay:" + hashlib.sha256(encode(arguments(pin)).encode()).hexdigest()[:8]
    ),
    "the PIN by an HMAC with the key id": lambda loot: pins(
        loot, lambda pin: hmac.new(loot.placeholders()[0][0].encode(), pin.encode(), "sha256").hexdigest()[:32]
    ),
    "agentfsm show": lambda loot: by_command(loot, "show", "waits"),
    "agentfsm show --json": lambda loot: by_command(loot, "show", "waits", "--json"),
    "agentfsm export": lambda loot: by_command(loot, "export", "waits"),
    "agentfsm replay": lambda loot: by_command(loot, "replay", "--json"),
    "agentfsm verify": lambda loot: by_command(loot, "verify"),
    "agentfsm redact --text": lambda loot: by_command(loot, "redact", "--text", "hunter-", "--dry-run"),
    "agentfsm resume, which is refused": lambda loot: by_command(loot, "resume", "waits", "--model", "openai:m"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_no_secret_can_be_read(name: str, loot: Loot) -> None:
    assert not has_secret(READS[name](loot))


def test_with_the_key_the_same_attacks_find_all_of_them(loot: Loot) -> None:
    """Without this, attacks that read nothing at all would prove nothing."""
    opened = opened_with(loot, SECRET)
    assert all(value.encode() in opened for name, value in SECRETS.items() if name not in ("redacted", "host"))
    (loot.folder / "opened").write_bytes(opened)
    assert found_in([loot.folder / "opened"], {"password": [PASSWORD.encode()]})
    signature = "pay:" + hashlib.sha256(encode(arguments(PIN)).encode()).hexdigest()[:8]
    (loot.folder / "opened").write_text(signature)
    assert pins(loot, lambda pin: "pay:" + hashlib.sha256(encode(arguments(pin)).encode()).hexdigest()[:8])


# -- what he tries to use ---------------------------------------------------------------------------------------


async def resumed(loot: Loot, secret: bytes, run: Any, reply: Any = None, **more: Any) -> None:
    with SqliteStore(loot.store) as store:
        agent = loot.agent(secret, ["done"], store=store, **more)
        await agent.resume(run, reply or Allow(), **({"by": "mallory"} if "authenticate" in more else {}))


async def adopted(loot: Loot, run: str, then: bytes) -> None:
    with SqliteStore(loot.store) as store:
        await adopt(store, run, Keyring(THIEF), by="mallory")
    await resumed(loot, then, run)


def record(loot: Loot, **changes: Any) -> str:
    return json.dumps({**json.loads(loot.text("record.json")), **changes})


def resigned(loot: Loot, key: bytes, **changes: Any) -> str:
    """The record, signed again with another key."""
    data = {**json.loads(loot.text("record.json")), **changes}
    signed = json.dumps({k: v for k, v in data.items() if k != "signature"}, sort_keys=True, separators=(",", ":"))
    return json.dumps({**data, "signature": hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()})


def with_records(change: Callable[[str], str]) -> Callable[[Loot], Any]:
    """Change the bodies in the copy, with hashes that fit, and give it to the host as its store."""

    async def use(loot: Loot) -> None:
        unpack_rows(loot.store)
        with contextlib.closing(sqlite3.connect(loot.store, isolation_level=None)) as db:
            for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
                db.execute(f"DROP TRIGGER {name}")
            head, last = GENESIS_HASH, 0
            for key, body in db.execute("SELECT key, body FROM journal WHERE key >> 32 = 2 ORDER BY key").fetchall():
                head, last = record_hash(head, change(body)), key & 0xFFFFFFFF
                db.execute(
                    "UPDATE journal SET body = ?, hash = ? WHERE key = ?", (change(body), bytes.fromhex(head), key)
                )
            db.execute("UPDATE run SET hash = ?, seq = ? WHERE id = 2", (bytes.fromhex(head), last))
        with SqliteStore(loot.store) as store:
            await loot.agent(SECRET, ["done"], store=store).resume("votes", Allow(), by=Actor("bob", ("manager",)))

    return use


def refuse(token: Any) -> Actor | None:
    """The host's check of who answers: it knows one token, which the thief does not have."""
    return Actor("ann", ("manager",)) if token == "a token of the app" else None


GUESSED = Keyring(THIEF).current
USES: dict[str, Callable[[Loot], Any]] = {
    "resumes the copy with a secret of his own": lambda loot: resumed(loot, THIEF, "waits"),
    "resumes it without a secret": lambda loot: resumed(loot, b"x", "waits"),
    "resumes it with an edit": lambda loot: resumed(
        loot, THIEF, "waits", Edit({"user": "ann", "password": "x", "pin": "1", "login": {"token": "x"}})
    ),
    "adds the second vote": lambda loot: resumed(loot, THIEF, "votes"),
    "adopts the copy, and resumes it": lambda loot: adopted(loot, "waits", THIEF),
    "adopts the copy, and gives it back to the host": lambda loot: adopted(loot, "waits", SECRET),
    "adopts the run with a vote": lambda loot: adopted(loot, "votes", THIEF),
    "resumes the record with a secret of his own": lambda loot: resumed(loot, THIEF, loot.text("record.json")),
    "says that his key signed the record": lambda loot: resumed(loot, THIEF, record(loot, key_id=GUESSED.key_id)),
    "signs the record again": lambda loot: resumed(
        loot, SECRET, resigned(loot, GUESSED.key(KeyPurpose.suspension)), authenticate=refuse
    ),
    "signs it with his key id": lambda loot: resumed(
        loot, SECRET, resigned(loot, GUESSED.key(KeyPurpose.suspension), key_id=GUESSED.key_id)
    ),
    "signs it with the key id of the host as the key": lambda loot: resumed(
        loot, SECRET, resigned(loot, KEYRING.current.key_id.encode())
    ),
    "signs it as version 1": lambda loot: resumed(loot, SECRET, resigned(loot, b"", version=1, key_id="")),
    "leaves the signature empty": lambda loot: resumed(loot, SECRET, record(loot, signature="")),
    "takes the MAC of a record for the signature": lambda loot: resumed(loot, SECRET, record(loot, signature="0" * 64)),
    "makes the record valid for longer": lambda loot: resumed(loot, SECRET, record(loot, expires_at=None)),
    "names another run": lambda loot: resumed(loot, SECRET, record(loot, run_id="waits")),
    "gives the record a fresh id": lambda loot: resumed(loot, SECRET, record(loot, record_id="0" * 16)),
    "sends the record to the host without a token": lambda loot: resumed(
        loot, SECRET, loot.text("record.json"), authenticate=refuse
    ),
    "answers a stored run without a token": lambda loot: resumed(loot, SECRET, "waits", authenticate=refuse),
    "makes one vote enough": with_records(lambda body: body.replace('"n":2', '"n":1')),
    "lets another person have voted": with_records(lambda body: body.replace('"bob"', '"eve"')),
    "raises the amount": with_records(lambda body: body.replace('"transfer"', '"pay"')),
}


@pytest.mark.parametrize("name", USES)
def test_no_approval_can_be_used(name: str, loot: Loot) -> None:
    with contextlib.suppress(AgentfsmError):
        asyncio.run(USES[name](loot))
    assert loot.paid == []


def test_the_host_itself_goes_on_with_its_file(loot: Loot) -> None:
    asyncio.run(resumed(loot, SECRET, "waits"))
    assert loot.paid == [f"ann {PASSWORD} {PIN} {TOKEN}"]


# -- what he tries to pass off as authentic ---------------------------------------------------------------------


def lines_of(loot: Loot) -> list[Any]:
    return [json.loads(line) for line in loot.text("votes.jsonl").splitlines()]


def written(lines: list[Any], sealer: Callable[[str], str] | None = None) -> str:
    """An export with hashes that fit, and the MACs that are there, or others."""
    head, text = GENESIS_HASH, ""
    for line in lines:
        body = encode(line["record"])
        head = record_hash(head, body)
        mac = line.get("mac", "") if sealer is None else sealer(head)
        hidden = json.dumps(line["hidden"], separators=(",", ":"), ensure_ascii=False)
        sealed = f'"mac":"{mac}",' if mac else ""
        text += f'{{"hash":"{head}","hidden":{hidden},{sealed}"record":{body}}}\n'
    return text


def changed(line: Any, **record: Any) -> Any:
    return {**line, "record": {**line["record"], **record}}


FORGERIES: dict[str, Callable[[list[Any]], str]] = {
    "a changed time": lambda lines: written([changed(lines[0], ts=1), *lines[1:]]),
    "another graph": lambda lines: written([changed(lines[0], rules={}), *lines[1:]]),
    "a record less in the middle": lambda lines: written([*lines[:3], *lines[4:]]),
    "MACs of his own": lambda lines: written(lines, lambda h: GUESSED.seal(KeyPurpose.record, bytes.fromhex(h))),
    "no MACs": lambda lines: written(lines, lambda _: ""),
    "MACs moved by one": lambda lines: written([{**line, "mac": lines[n - 1]["mac"]} for n, line in enumerate(lines)]),
    "MACs of the key id": lambda lines: written(lines, lambda _: KEYRING.current.key_id + "0" * 32),
    "values of his own": lambda lines: written([{**lines[0], "hidden": [["00" * 16, "x"]]}, *lines[1:]]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forged_export_is_authentic(name: str, loot: Loot) -> None:
    honest = verify_export(loot.text("votes.jsonl"), None, KEYRING)
    assert (honest.code in (GOOD, OPEN), honest.doubt) == (True, "")
    report = verify_export(FORGERIES[name](lines_of(loot)), None, KEYRING)
    assert report.code not in (GOOD, OPEN) or report.doubt


def test_the_attacks_are_counted(counted: Callable[[str], None]) -> None:
    attacks = len(READS) + len(USES) + len(FORGERIES)
    assert attacks >= 40
    counted(f"a thief of a backup: {attacks} attacks, 0 succeeded")
