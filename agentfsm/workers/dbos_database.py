"""The database of the queues, as DBOS connects to it: what it reads there is JSON, and nothing in it is run as code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentfsm.errors import MissingExtraError, StoreError
from agentfsm.journal.store_url import server_database

try:
    from dbos import DBOSPortableJSONSerializer, WorkflowSerializationFormat
    from sqlalchemy import URL, CreateEnginePlugin, Engine, String, create_engine, make_url
    from sqlalchemy.dialects import plugins
except ImportError as reason:
    raise MissingExtraError("a worker on DBOS", "dbos") from reason

SCHEMA, PLUGIN = "agentfsm_dbos", "agentfsm"
RIGHTS = f"; let the owner of the database run: dbos migrate -s URL --schema {SCHEMA} -r ROLE"
PORTABLE, SERIALIZER = WorkflowSerializationFormat.PORTABLE, DBOSPortableJSONSerializer()
PICKLE, JSON = "py_pickle", SERIALIZER.name()
"""What a row of DBOS says about the format of its values. Nothing of ours is a pickle."""


class JsonOnly(CreateEnginePlugin):
    """Has DBOS read values as JSON also where a row says that they are pickles, because to read one is to run it."""

    def update_url(self, url: URL) -> URL:
        """The URL without the parameters of this plugin: it has none."""
        return url

    def engine_created(self, engine: Engine) -> None:
        """Have an engine read so."""
        known: dict[Any, Any] = dict(engine.dialect.colspecs)
        kind = type("Text", (known.get(String, String),), {"result_processor": _reads_json})
        known[String] = kind
        engine.dialect.colspecs = known


def _reads_json(*_: object) -> Callable[[object], object]:
    """What makes of each text in the database one that DBOS gets."""
    return lambda text: JSON if text == PICKLE else text


plugins.register(PLUGIN, __name__, JsonOnly.__name__)


def queue_database(url: str | Path, queue: Path | None) -> str:
    """The URL of the database with the queues, as DBOS takes it: it leaves none of its parts to libpq.

    Args:
        url: The URL of the store.
        queue: The file with the queues, beside a SQLite store.
    """
    if queue is not None:
        return f"sqlite:///{queue}?plugin={PLUGIN}"
    from agentfsm.journal.postgres.postgres_session import parameters_url, read_conninfo  # an extra

    given = read_conninfo(server_database(url))
    given |= {"dbname": given.get("dbname") or _usual_database(given), "client_encoding": "UTF8"}
    hosts = given.get("host", "").count(",") + 1
    if hosts > 1 and "," not in given.get("port", ","):  # to libpq it is the port of each host, to SQLAlchemy of one
        given["port"] = ",".join([given["port"]] * hosts)
    return f"{parameters_url(given)}&plugin={PLUGIN}"


def _usual_database(parameters: Mapping[str, str]) -> str:
    """The database that libpq connects to if it is given no name."""
    from psycopg.pq import Conninfo  # an extra

    usual = {each.keyword: each.val.decode() for each in Conninfo.get_defaults() if each.val}
    return usual.get(b"dbname") or parameters.get("user") or usual.get(b"user", "")


def unprepared_engine(database: str) -> Engine:
    """Connects without prepared statements: through a pooler, the next one may get another session of the server."""
    address = make_url(database).set(drivername="postgresql+psycopg")
    return create_engine(address, pool_size=6, max_overflow=0, connect_args={"prepare_threshold": None})


def queue_error(failure: Exception) -> StoreError:
    """What is said of an error of DBOS or its database, with what to do about it."""
    from agentfsm.journal.postgres.postgres_schema import connection_advice  # an extra

    reason = getattr(failure, "orig", None) or failure
    said = " ".join(str(reason).split()) or type(reason).__name__
    advice = RIGHTS if type(reason).__name__ == "InsufficientPrivilege" else connection_advice(said)
    return StoreError(f"the queues of DBOS cannot be used: {said}{advice}")
