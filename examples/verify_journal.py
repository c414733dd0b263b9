"""Verify an exported journal with only the standard library: ``python verify_journal.py run.jsonl [checkpoint log]``.

For an auditor who does not want to trust agentfsm: read these lines, then run them. Exit code 0: good; 1: not. The
journal must have every record that the log has of it, and the log must begin with what the checkpoint signed; openssl
can check its Ed25519 signature. With the secrets of the host in AGENTFSM_SECRET, one a line, MACs are checked,
too: of records that were written together, the last one has one, which vouches for all before it.
"""

import base64
import hashlib
import hmac
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

IGNORED = ("redaction", "checkpoint", "run.adopted")  # what may come at any time


def dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def sha256(data: bytes, text: str) -> str:
    return hashlib.sha256(data + text.encode()).hexdigest()


def require(good: object, problem: str) -> None:
    if not good:
        raise ValueError(problem)


def derive(secret: bytes, purpose: str) -> bytes:  # HKDF-SHA256 (RFC 5869), of which one block is used
    return hmac.digest(hmac.digest(b"agentfsm", secret, "sha256"), purpose.encode() + b"\1", "sha256")


def root_hash(entries: list[str]) -> bytes:  # of the Merkle tree of RFC 6962
    if len(entries) < 2:
        return hashlib.sha256(b"".join(b"\0" + entry.encode() for entry in entries)).digest()
    half = 1 << (len(entries) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + root_hash(entries[:half]) + root_hash(entries[half:])).digest()


def verify(lines: list[str], checkpoint: str = "", log: str = "", secrets: Iterable[bytes] = ()) -> str | None:
    keys, strangers = {derive(s, "key id")[:4].hex(): derive(s, "journal record") for s in secrets}, list[int]()
    sealed: bool | None = None  # whether the last record has a MAC; None before the first
    mac, hashes, redacted, started, ended = "", ["00" * 32], set[tuple[int, int]](), set[str](), set[str]()
    table, epoch, finished, state, fingerprint, request = dict[str, tuple[str, str, str]](), 0, False, None, None, None
    for number, line in enumerate(lines, 1):
        try:
            record, kind = (entry := json.loads(line))["record"], entry["record"]["kind"]
            require(dumps(entry) == line.strip(), "it is not formatted like a line of an export")
            require(dumps(record).count('{"#":[') == len(entry["hidden"]), "a hidden value is missing or added")
            hashes.append(sha256(b"\0" + bytes.fromhex(hashes[-1]), dumps(record)))
            require((hashes[-1], number) == (entry["hash"], record["seq"]), "its hash or its number does not match")
            for place, digest in re.findall(r'\{"#":\[(\d+),"([0-9a-f]{64})"\]\}', dumps(record)):
                pair = entry["hidden"][int(place)]  # a salt and a value; null if the value is gone
                require(not pair or sha256(bytes.fromhex(pair[0]), dumps(*pair[1:])) == digest, "a value was changed")
            redacted |= {(record["of"], place) for place in record.get("places", ())}
            mac, before, sealed = entry.get("mac", ""), sealed, "mac" in entry
            adopted = kind == "run.adopted"  # somebody vouched for all records before it
            require(sealed or not before, "it has no MAC, and the record before it has")
            require(adopted or not sealed or before is not False, "it has a MAC, and the record before it has none")
            seal = hmac.digest(keys.get(mac[:8], b""), bytes.fromhex(entry["hash"]), "sha256")[:16].hex()
            require(
                mac[:8] not in keys or mac[8:] == seal, "its MAC does not match: it was not written with the secret"
            )
            unknown = keys and mac != "next" and mac[:8] not in keys  # next: the MAC of the next record vouches for it
            strangers = [*([] if adopted else strangers), *([number] if unknown else [])]
            ignored, acquired = kind in IGNORED, kind.startswith("run.") and kind != "run.finished"
            require(ignored or not finished, "the run had finished")
            require(epoch == record["epoch"] or (epoch < record["epoch"] and (ignored or acquired)), "wrong epoch")
            epoch, finished = record["epoch"], finished or kind == "run.finished"
            if "graph" in record:  # the table under which the run continues; its fingerprint is its hash
                graph, places, table = record["graph"], dict[str, int](), {}
                parts = {k: graph[k] for k in ("states", "transitions", "counters") if k in graph}
                text = json.dumps(parts, separators=(",", ":"))
                require(sha256(b"", text) == graph["fingerprint"], "the graph was changed")
                require(record.get("from") == fingerprint, "the run was on another graph")
                for source, guard, target, *declared in graph["transitions"]:
                    place = places[source] = places.get(source, -1) + 1
                    raised = "|0*e1" if "aborted" in declared else ""  # e: a guard raised, which aborts the run
                    table[f"{source}.{guard}"] = (source, target, f"0{{{place}}}1{raised}")
                state, fingerprint = record.get("to") or record.get("at") or graph["states"][0][0], graph["fingerprint"]
            if kind == "transition":  # in each state, the first row whose guard is true, on results of effects
                (source, target, asked), ((_, out),) = table[record["transition"]], record["out"].items()
                allowed = (source, target) == (state, record["to"]) and re.fullmatch(asked, record["tried"])
                require(allowed, f"{record['transition']} is not allowed in {state}")
                state = record["to"]
                require(ended >= {r for r in out.get("results", ()) if isinstance(r, str)}, "a result is missing")
            eid = {record["eid"]} if kind.startswith("effect.") else set[str]()
            require(kind != "effect.result" or eid <= started, "the effect was not started, or has a result already")
            started, ended = (started | eid, ended) if kind == "effect.intent" else (started - eid, ended | eid)
            require(kind != "run.resumed" or record.get("to", request) == request, "it replies to another request")
            request = {"run.suspended": {"seq": number, "hash": hashes[-1]}, "run.resumed": None}.get(kind, request)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return f"record {number}: {error}"
    missing = {(n, i) for n, t in enumerate(lines, 1) for i, h in enumerate(json.loads(t)["hidden"]) if not h}
    problems = [f"record {of}: a value is gone, and was not redacted" for of, _ in sorted(missing - redacted)]
    problems += [f"record {number}: it was not sealed under a secret that was given" for number in strangers]
    if checkpoint:
        entries = log.split("\n")[: int(checkpoint.split("\n")[1])]
        if base64.b64encode(root_hash(entries)).decode() != checkpoint.split("\n")[2]:
            return "the log does not begin with the entries that the checkpoint signed"
        heads = [re.fullmatch(r'(\d+) (\w{64}) (".*")', entry) for entry in entries]
        own = [(int(h[1]), h[2]) for h in heads if h and json.loads(h[3]) == json.loads(lines[0])["record"].get("run")]
        for seq, digest in own or [(0, "")]:  # record 0: the checkpoint does not have this run
            if hashes[seq : seq + 1] != [digest]:
                problems += [f"record {seq}: the checkpoint has another one: the journal was truncated or rewritten"]
    problems += [f"record {len(lines)}: the record after it, whose MAC vouches for it, is missing"] * (mac == "next")
    return problems[0] if problems else None


if __name__ == "__main__":
    journal, *signed = (Path(n).read_text("utf-8", "surrogateescape") for n in sys.argv[1:] or sys.exit(__doc__))
    secrets = os.environ.get("AGENTFSM_SECRET", "").encode().splitlines()
    checkpoint, log = signed or ("", "")
    problem = verify(lines := journal.rstrip("\n").split("\n"), checkpoint, log, secrets)
    end = problem or any(json.loads(line)["record"]["kind"] == "run.finished" for line in lines)
    print(problem or ("good" if end else "good so far: the run has not finished, or its end was truncated"))
    if not secrets:
        print("not checked without the secret (AGENTFSM_SECRET): who wrote the records", file=sys.stderr)
    if not signed:
        print("not checked without a checkpoint and its log: whether the end was cut off", file=sys.stderr)
    sys.exit(bool(problem))
