"""Verify an exported journal with nothing but the standard library: ``python verify_journal.py run.jsonl``.

For an auditor who trusts nobody: read these lines, then run them. Exit code 0: good; 1: not.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

HIDDEN = re.compile(r'\{"#":\[(\d+),"([0-9a-f]{64})"\]\}')
SALT = re.compile(r'\["((?:[0-9a-f]{2})*)",')


def need(good, why):
    if not good:
        raise ValueError(why)


def split(line):
    """The hash, the values beside the record, and the record itself as it was hashed."""
    begin = line.index('"hidden":') + len('"hidden":')
    _, end = json.JSONDecoder().raw_decode(line, begin)
    need(line.startswith('{"hash":"') and line.startswith(',"record":', end) and line.endswith("}"), "no such line")
    return line[9:73], line[begin:end], line[end + len(',"record":') : -1]


def values(text):
    """(salt, value) of everything that stands beside a record, the value as it was hashed; None where redacted."""
    found, place = [], 1
    while text[place] != "]":
        place += text[place] == ","
        if text.startswith("null", place):
            found, place = [*found, None], place + 4
            continue
        salt = SALT.match(text, place)
        _, end = json.JSONDecoder().raw_decode(text, salt.end())
        found, place = [*found, (bytes.fromhex(salt[1]), text[salt.end() : end])], end + 1
    return found


def verify(lines):
    previous, state, rows, gone, redacted = b"\0" * 32, None, {}, set(), set()
    for number, line in enumerate(lines, 1):
        try:
            seal, beside, text = split(line.strip())
            digest = hashlib.sha256(b"\0" + previous + text.encode()).digest()
            need(digest.hex() == seal, "its hash does not fit it and the record before")
            record, previous, kept = json.loads(text), digest, values(beside)
            need(record["seq"] == number, "it has another number")
            for place, promised in HIDDEN.findall(text):
                salt, value = kept[int(place)] or (None, "")
                gone |= {(number, int(place))} if salt is None else set()
                good = salt is None or hashlib.sha256(salt + value.encode()).hexdigest() == promised
                need(good, "a hidden value was changed")
            if "graph" in record:  # the table under which the run runs; its fingerprint is its hash
                graph, places = record["graph"], {}
                text = json.dumps({k: graph[k] for k in ("states", "transitions")}, separators=(",", ":"))
                need(hashlib.sha256(text.encode()).hexdigest() == graph["fingerprint"], "the graph was changed")
                for source, guard, target, _ in graph["transitions"]:
                    places[source] = places.get(source, -1) + 1
                    rows[f"{source}.{guard}"] = (source, target, "0" * places[source] + "1")
                state = state or record.get("at") or graph["states"][0][0]
            if record["kind"] == "transition":  # in each state, the first row whose guard held
                row = (state, state := record["to"], record["tried"])
                need(rows.get(record["transition"]) == row, f"{record['transition']} is not allowed in {row[0]}")
            if record["kind"] == "redaction":
                redacted.update((record["of"], place) for place in record["places"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return f"record {number}: {error}"
    return f"record {min(gone - redacted)[0]}: a value is gone that was not redacted" if gone - redacted else None


if __name__ == "__main__":
    bad = verify(Path(sys.argv[1]).read_text("utf-8").rstrip("\n").split("\n"))
    print(bad or "good")
    sys.exit(bool(bad))
