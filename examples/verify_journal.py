"""Verify an exported journal with nothing but the standard library: ``python verify_journal.py run.jsonl [note]``.

For an auditor who trusts nobody: read these lines, then run them. Exit code 0: good; 1: not. Where a checkpoint's
note is named too, it must know the journal's last record; openssl can check the note's Ed25519 signature.
"""

import hashlib
import json
import re
import sys
from pathlib import Path


def dumps(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def sha256(data, text):
    return hashlib.sha256(data + text.encode()).hexdigest()


def need(good, why):
    if not good:
        raise ValueError(why)


def verify(lines, note=""):
    seals, gone, redacted, epoch, over = ["00" * 32], set(), set(), 0, False
    state, table, fingerprint, asked, begun, ended = None, {}, None, None, set(), set()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            record, kind = entry["record"], entry["record"]["kind"]
            need(dumps(entry) == line.strip(), "it is not written as a journal is")
            need(dumps(record).count('{"#":[') == len(entry["hidden"]), "it keeps other values hidden than it says")
            seals.append(sha256(b"\0" + bytes.fromhex(seals[-1]), dumps(record)))
            need((seals[-1], number) == (entry["hash"], record["seq"]), "its hash or its number does not fit")
            for place, promised in re.findall(r'\{"#":\[(\d+),"([0-9a-f]{64})"\]\}', dumps(record)):
                salt, value = entry["hidden"][int(place)] or (None, gone.add((number, int(place))))
                need(salt is None or sha256(bytes.fromhex(salt), dumps(value)) == promised, "a value was changed")
            redacted |= {(record["of"], place) for place in record.get("places", ())}
            aside, taken = kind in ("redaction", "checkpoint"), kind.startswith("run.") and kind != "run.finished"
            need(aside or not over, "the run had ended")
            need(record["epoch"] == epoch or (record["epoch"] > epoch and (aside or taken)), "its epoch is wrong")
            epoch, over = record["epoch"], over or kind == "run.finished"
            if "graph" in record:  # the table under which the run goes on; its fingerprint is its hash
                graph, places, table = record["graph"], {}, {}
                text = json.dumps({k: graph[k] for k in ("states", "transitions")}, separators=(",", ":"))
                need(sha256(b"", text) == graph["fingerprint"], "the graph was changed")
                need(record.get("from") == fingerprint, "the run was on another graph")
                for source, guard, target, _ in graph["transitions"]:
                    places[source] = places.get(source, -1) + 1
                    table[f"{source}.{guard}"] = (source, target, "0" * places[source] + "1")
                state, fingerprint = record.get("to") or record.get("at") or graph["states"][0][0], graph["fingerprint"]
            if kind == "transition":  # in each state, the first row whose guard held, on results of effects
                row, ((_, out),) = (state, state := record["to"], record["tried"]), record["out"].items()
                need(table.get(record["transition"]) == row, f"{record['transition']} is not allowed in {row[0]}")
                need(ended.issuperset(r for r in out.get("results", ()) if isinstance(r, str)), "a result is missing")
            eid = {record["eid"]} if kind in ("effect.intent", "effect.result") else set()
            need(kind != "effect.result" or eid <= begun, "the effect had not begun, or has a result already")
            begun, ended = (begun | eid, ended) if kind == "effect.intent" else (begun - eid, ended | eid)
            need(kind != "run.resumed" or record.get("to", asked) == asked, "it answers what nobody asks")
            asked = {"run.suspended": {"seq": number, "hash": seals[-1]}, "run.resumed": None}.get(kind, asked)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return f"record {number}: {error}"
    bad = [f"record {of}: a value is gone that nobody redacted" for of, _ in sorted(gone - redacted)]
    known = {json.loads(name): (int(n), seal) for n, seal, name in re.findall(r'(?m)^(\d+) (\w{64}) (".*")$', note)}
    seq, seal = known.get(json.loads(lines[0])["record"].get("run"), (0, ""))
    if note and seals[seq : seq + 1] != [seal]:  # record 0: the note does not know this run
        bad.append(f"record {seq}: the note knows another one: the end was cut off, or all was written anew")
    return bad[0] if bad else None


if __name__ == "__main__":
    journal, *notes = (Path(n).read_text("utf-8", "surrogateescape") for n in sys.argv[1:] or sys.exit(__doc__))
    told = verify(lines := journal.rstrip("\n").split("\n"), *notes)
    over = told or any(json.loads(line)["record"]["kind"] == "run.finished" for line in lines)
    print(told or ("good" if over else "good so far: the run is not at its end, or its end was cut off"))
    sys.exit(bool(told))
