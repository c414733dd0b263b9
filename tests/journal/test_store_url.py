"""A URL names a store; whatever names none is refused with what to write instead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentfsm import Agent, ConfigurationError, Host, MemoryStore, SqliteStore, open_store
from agentfsm.cli.app import app
from agentfsm.journal.store_url import locate_store, server_database, store_url
from agentfsm.journal.tenant_store import TenantStore
from agentfsm.testing import ScriptedModel


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///runs.db", "runs.db"),
        ("sqlite:///in/runs.db?synchronous=normal", "in/runs.db"),
        ("sqlite:////var/lib/runs.db", "/var/lib/runs.db"),
        ("SQLITE:///My%20runs%3F.db", "My runs?.db"),
        ("runs.db", "runs.db"),
        ("./memory:x.db", "memory:x.db"),
        ("C:\\runs.db", "C:\\runs.db"),
        ("./postgres//runs.db", "postgres/runs.db"),
        ("./dbname=shop", "dbname=shop"),
        (Path("user=ann"), "user=ann"),
        ("ghost=1.db", "ghost=1.db"),
        ("50% of ?.db", "50% of ?.db"),
        (Path("sqlite:/odd.db"), "sqlite:/odd.db"),
    ],
)
def test_a_url_or_a_path_names_a_file(url: str | Path, path: str) -> None:
    assert locate_store(url).file == Path(path)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "the store has no name"),
        ("sqlite://runs.db", "three slashes"),
        ("sqlite:runs.db", "three slashes"),
        ("sqlite:///", "names no file"),
        ("sqlite:///runs.db#now", "names no file"),
        ("sqlite:///runs.db?synchronous=off", "full or normal"),
        ("sqlite:///runs.db?mode=ro", "the only option is synchronous"),
        ("mysql://localhost/runs", "no store for mysql: URLs"),
        ("memory://runs", "which is 'memory:'"),
        ("postgresql//ann:pw@localhost/runs", r"^the URL of the store lacks a colon after postgresql; [^@]*$"),
        ("sqlite//runs.db", "lacks a colon"),
        ("postgresql://localhost/runs?liveness=clock", "liveness must be 'session' or 'lease'"),
        ("postgres://localhost/runs?lease_s=soon", "lease_s and wait_s are seconds"),
        ("postgres://a:pw@localhost/x?sslmod=require", '/database: neither libpq nor agentfsm has an option "sslmod"$'),
        ("postgres:/runs", "is like postgresql://user:password@host/database"),
        ("postgres://a:p[w@localhost/x", "^the URL of the store cannot be read: in a password, write %5B and %5D for "),
        ("postgres://a:p/w?rest=x@localhost/x", "host/database$"),  # the password would have to be quoted
        ("postgres://a:p@w@localhost/x", "^the URL of the store cannot be read: .* write %40 for @ and %2F for /$"),
        ("postgres://a:p/w@localhost/x", "^the URL of the store cannot be read: .* write %40 for @ and %2F for /$"),
        ("postgresql+psycopg://a:pw@localhost/x", r"^there is no store for postgresql\+psycopg: URLs; [^@]*$"),
        ("host=localhost password=pw", "^parameters in the form of libpq are not a URL: write [^=]*$"),
        ("dbname = shop", "libpq"),
    ],
)
def test_what_names_no_store_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        open_store(url)


def test_stores_of_each_kind_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with open_store("memory:") as memory:
            assert isinstance(memory, MemoryStore)
        async with open_store("sqlite:///runs.db") as store:
            assert isinstance(store, SqliteStore)
            assert store.path == tmp_path / "runs.db"
            await Agent(ScriptedModel(["done"]), host=Host(store=store)).run("Go.", run_id="r")
        async with open_store(f"sqlite:///{tmp_path}/runs.db?synchronous=normal") as again:
            assert [head.run_id for head in await again.heads()] == ["r"]

    asyncio.run(main())


def test_every_command_takes_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SqliteStore(tmp_path / "runs.db") as store:
        Agent(ScriptedModel(["done"]), host=Host(store=store)).run_sync("Go.", run_id="r1")
    url = f"sqlite:///{tmp_path}/runs.db"
    assert "r1  finished" in CliRunner().invoke(app, ["runs", "--store", url]).output
    monkeypatch.setenv("AGENTFSM_STORE", url)
    assert "r1  finished" in CliRunner().invoke(app, ["runs"]).output
    refused = CliRunner().invoke(app, ["runs", "--store", "memory:"])
    assert refused.exit_code == 2
    assert "a store in memory is that of one process" in refused.output
    monkeypatch.setenv("AGENTFSM_STORE", "mysql://localhost/runs")
    assert "no store for mysql: URLs" in CliRunner().invoke(app, ["runs"]).output


def test_a_postgresql_url_keeps_the_parameters_of_libpq_and_gives_the_store_its_own():
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    store = open_store("postgresql://ann:secret@db.example.org/shop?sslmode=require&liveness=lease&lease_s=3")
    assert store_url(store) == "postgresql://ann:secret@db.example.org/shop?sslmode=require"
    assert repr(store) == "PostgresStore(PostgreSQL at db.example.org, database 'shop')"
    settings = store._settings
    assert (settings.liveness, settings.lease_s) == ("lease", 3.0)
    assert settings.url == "postgresql://ann:secret@db.example.org/shop?sslmode=require"


@pytest.mark.parametrize(
    ("url", "passed_on"),
    [
        ("postgresql:///shop?host=/run/postgresql&wait_s=3", "postgresql:///shop?host=/run/postgresql"),
        ("postgres:///shop", "postgres:///shop"),
        ("postgresql://db/shop?options=-c%20x%3D1&lease_s=3", "postgresql://db/shop?options=-c%20x%3D1"),
        ("postgresql://db/shop?wait_s=3&password=a+b%2Bc", "postgresql://db/shop?password=a+b%2Bc"),
        ("postgresql://db/shop?listen_url=postgresql://db/x%3Fpassword=a+b", "postgresql://db/shop"),
    ],
)
def test_libpq_gets_its_part_of_a_url_to_the_letter(url: str, passed_on: str) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    assert server_database(url) == passed_on
    settings = open_store(url)._settings
    assert settings.url == passed_on
    assert settings.listen_url in ("", "postgresql://db/x?password=a+b")


def test_a_server_is_called_by_its_host_and_database_however_they_are_given() -> None:
    assert locate_store("postgresql:///?host=/run/a+b&dbname=my%20shop").name == "postgresql:///run/a+b/my shop"


def test_a_store_says_where_it_is_if_other_processes_can_reach_it(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "runs.db") as store:
        assert store_url(store) == tmp_path / "runs.db"
        assert store_url(TenantStore(store, ["acme"])) == f"{tmp_path}/runs.db"
    assert store_url(MemoryStore()) is None


def test_a_store_of_a_user_with_a_url_of_its_own_is_not_taken_for_one_of_ours() -> None:
    class OwnStore(MemoryStore):
        url = "https://runs.example.org"

    store = OwnStore()
    assert store_url(store) is None
    assert store_url(TenantStore(store, ["acme"])) is None


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (
            "host=db dbname=shop user=ann password='p w@1' port=5433",
            "postgresql://ann:p%20w%401@/shop?host=db&port=5433",
        ),
        ("password=pw", "postgresql://:pw@/"),
        ("user=ann", "postgresql://ann@/"),
        ("", "postgresql:///"),
        ("postgres://ann:pw@db/shop?sslmode=require", "postgres://ann:pw@db/shop?sslmode=require"),
    ],
)
def test_a_store_that_is_made_from_parameters_of_libpq_has_a_url_and_shows_no_password(given: str, url: str) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    from agentfsm.journal.postgres import PostgresStore

    store = PostgresStore(given)
    assert store_url(store) == url
    assert store_url(TenantStore(store, ["acme"])) == url
    shown = f"{store!r} {vars(store)} {store._settings!r} {locate_store(url)!r}"
    assert "pw" not in shown
    assert "w@1" not in shown
