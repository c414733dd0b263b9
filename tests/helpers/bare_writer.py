"""A bare loop that writes the rows of stored runs again, to compare a store with.

Run as ``python -m tests.helpers.bare_writer FROM_URL TO_URL COUNT``: it writes so many runs with the rows of those at
one database to another one, as soon as it gets a line. Each row is a transaction of one fenced statement. It prints
when it began, when it ended, and how many records the rows have.
"""

from __future__ import annotations

import itertools
import sys
import time
import uuid
from typing import Any

import psycopg

SAMPLE = 20

SELECT = """
    SELECT run, seq, body, records, hash, hidden, hidden_values, mac FROM agentfsm.journal
    WHERE run IN (SELECT id FROM agentfsm.run WHERE status = 'finished' ORDER BY id LIMIT %s) ORDER BY run, seq
"""

INSERT_RUN = "INSERT INTO agentfsm.run (run_id, epoch, owner, hash) VALUES (%s, 1, 'bare', '\\x00') RETURNING id"

APPEND = """
    WITH fence AS (
        UPDATE agentfsm.run SET seq = %s, hash = %s WHERE id = %s AND epoch = 1 AND seq = %s AND owner IS NOT NULL
        RETURNING id
    )
    INSERT INTO agentfsm.journal (run, seq, body, records, hash, hidden, hidden_values, mac)
    SELECT id, %s, %s, %s, %s, %s, %s, %s FROM fence
"""


def sample(url: str) -> list[list[tuple[Any, ...]]]:
    """The rows of some finished runs."""
    with psycopg.connect(url) as db:
        rows = db.execute(SELECT, (SAMPLE,)).fetchall()
    return [[row[1:] for row in group] for _, group in itertools.groupby(rows, key=lambda row: row[0])]


def main(source: str, target: str, count: int) -> None:
    """Write, and print the figures."""
    runs = sample(source)
    records = 0
    with psycopg.connect(target, autocommit=True) as db:
        db.execute("SELECT 1")
        print("ready", flush=True)
        sys.stdin.readline()
        begun = time.time()
        for rows in itertools.islice(itertools.cycle(runs), count):
            found = db.execute(INSERT_RUN, (uuid.uuid4().hex,)).fetchone()
            assert found is not None
            before = 0
            for seq, body, packed, digest, *rest in rows:
                done = db.execute(APPEND, (seq, digest, found[0], before, seq, body, packed, digest, *rest))
                assert done.rowcount == 1
                before = seq
            records += before
        print(begun, time.time(), records, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
