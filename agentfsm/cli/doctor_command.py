"""``agentfsm doctor``: what of the installation, the store and the providers works, and what to do about the rest."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import click
import httpx

from agentfsm.cli.console import open_console, single_line
from agentfsm.cli.local_store import await_result, key_file, open_existing_store, store_option, store_secrets
from agentfsm.errors import AgentfsmError, ConfigurationError
from agentfsm.journal.sqlite import SqliteStore
from agentfsm.journal.sqlite.sqlite_schema import has_wal_bug
from agentfsm.journal.sqlite.store_file import StoreFile
from agentfsm.journal.store import Head
from agentfsm.journal.store_url import StoreLocation
from agentfsm.loop.keys import SECRET_VARIABLE
from agentfsm.models.providers import PROVIDERS, Provider, resolve_endpoint

Level = Literal["ok", "note", "warning", "problem"]

NEWEST_TESTED_PYTHON = (3, 14)

REACH_TIMEOUT_S = 5.0

ONLINE_ADVICE = "is this machine online, and does it need a proxy (HTTPS_PROXY) or a CA bundle (SSL_CERT_FILE)?"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        area: What was checked.
        level: ``ok``; ``note``, which needs nothing done; ``warning``; or ``problem``, for which the exit code is 1.
        text: What was found.
        advice: What to do about it, or an empty string.
    """

    area: str
    level: Level
    text: str
    advice: str = ""


_EXAMPLES = """\b
Examples:
  agentfsm doctor
  agentfsm doctor --offline
  agentfsm doctor --store runs.db --json
"""


@click.command(epilog=_EXAMPLES)
@click.option("--offline", is_flag=True, help="Do not connect to the providers.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@store_option
def doctor(offline: bool, as_json: bool, location: StoreLocation) -> None:
    """Check the installation, the store and the providers, and say what to do about each problem.

    It checks Python, the installed packages and extras, SQLite, Graphviz, the store with its lock and its secret, and
    the providers: those whose key or address is in the environment, and local servers at their usual address. No key is
    sent anywhere.

    Exit codes: 0 no problem (warnings included), 1 a problem, 2 wrong usage.
    """
    findings = [
        *_check_python(),
        *_check_packages(),
        *_check_sqlite(),
        *_check_graphviz(),
        *(_check_server(location) if location.file is None else _check_store(location.file)),
        *_check_secret(location),
        *_check_providers(offline=offline),
    ]
    if as_json:
        for finding in findings:
            click.echo(json.dumps(asdict(finding)))
    else:
        _print(findings)
    if any(finding.level == "problem" for finding in findings):
        raise click.exceptions.Exit(1)


_STYLES = {"ok": "green", "note": "", "warning": "yellow", "problem": "bold red"}


def _print(findings: list[Finding]) -> None:
    out = open_console(stdout_only=True).out
    width = max(len(finding.area) for finding in findings)
    for finding in findings:
        out.print(f"{finding.level:<8}", style=_STYLES[finding.level], end="")
        out.print(f" {finding.area:<{width}}  {single_line(finding.text)}", soft_wrap=True)
        if finding.advice:
            out.print(f"{'':<8} {'':<{width}}  -> {single_line(finding.advice)}", soft_wrap=True)


def _check_python() -> Iterator[Finding]:
    version = sys.version_info[:2]
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if version > NEWEST_TESTED_PYTHON:
        newest = ".".join(map(str, NEWEST_TESTED_PYTHON))
        yield Finding("python", "warning", text, f"agentfsm is tested with Python 3.11 to {newest}")
    else:
        yield Finding("python", "ok", text)


def _check_packages() -> Iterator[Finding]:
    """The required packages, then each extra."""
    try:
        metadata = importlib.metadata.metadata("agentfsm")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("agentfsm", "problem", "its metadata is not installed", "install it with pip, not by copying it")
        return
    yield Finding("agentfsm", "ok", metadata["Version"])
    required: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("agentfsm") or []:
        found = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        required.setdefault(found[1] if found else "", []).append(requirement.partition(";")[0].strip())
    for extra, requirements in required.items():
        if extra in ("dev", "docs"):
            continue
        wrong = [problem for each in requirements if (problem := _requirement_problem(each))]
        area = f"extra {extra}" if extra else "packages"
        if not wrong:
            yield Finding(area, "ok", ", ".join(_installed(each) for each in requirements))
        elif extra and all(problem.endswith("is not installed") for problem in wrong):
            yield Finding(area, "note", "; ".join(wrong), f"if you want it: pip install 'agentfsm[{extra}]'")
        else:
            package = f"agentfsm[{extra}]" if extra else "agentfsm"
            yield Finding(area, "problem", "; ".join(wrong), f"pip install --upgrade '{package}'")


def _requirement_problem(requirement: str) -> str:
    """What is wrong with an installed package, or an empty string."""
    name = _package(requirement)
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"
    if (lowest := re.search(r">=([\d.]+)", requirement)) and _numbers(installed) < _numbers(lowest[1]):
        return f"{name} {installed} is older than {lowest[1]}"
    if (bound := re.search(r"<([\d.]+)", requirement)) and _numbers(installed) >= _numbers(bound[1]):
        return f"{name} {installed} is not older than {bound[1]}"
    return ""


def _installed(requirement: str) -> str:
    return f"{_package(requirement)} {importlib.metadata.version(_package(requirement))}"


def _package(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0] if found else requirement


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _check_sqlite() -> Iterator[Finding]:
    if has_wal_bug():
        yield Finding(
            "sqlite",
            "warning",
            f"{sqlite3.sqlite_version} can damage a file that two connections write at once",
            "agentfsm writes with one, so let no other program write to a store, or use SQLite 3.51.3 or later",
        )
    else:
        yield Finding("sqlite", "ok", sqlite3.sqlite_version)


def _check_graphviz() -> Iterator[Finding]:
    program = shutil.which("dot")
    if program is None:
        advice = "install Graphviz (Debian: apt install graphviz) for --format png and pdf; SVG and text need nothing"
        yield Finding("graphviz", "note", "the program dot is not on the PATH", advice)
        return
    done = subprocess.run([program, "-V"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
    said = (done.stderr or done.stdout).strip()
    if done.returncode:
        yield Finding("graphviz", "problem", f"{program} fails: {said}", "install Graphviz again")
    else:
        yield Finding("graphviz", "ok", said)


def _check_store(path: Path) -> Iterator[Finding]:
    if not path.exists():
        folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
        if os.access(folder, os.W_OK):
            yield Finding("store", "note", f"{path} does not exist yet; the first stored run creates it")
        else:
            advice = f"give yourself access to {folder}, or name another file with --store or AGENTFSM_STORE"
            yield Finding("store", "problem", f"{path} cannot be created", advice)
        return
    try:
        with SqliteStore(path) as store:
            runs = await_result(store.heads())
    except (AgentfsmError, OSError) as error:
        yield Finding("store", "problem", str(error), "restore a backup, or name another file with --store")
        return
    yield from _describe_runs(str(path), runs)
    if StoreFile(path).lock.held_by_other():
        yield Finding("store lock", "note", "another process writes to the store", "other processes can only read it")
    elif not os.access(path, os.W_OK):
        yield Finding("store lock", "problem", f"{path} cannot be written", "give yourself access to it")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        advice = f"chmod 600 {path}"
        yield Finding("store mode", "warning", f"other users may read or change {path}", advice)


def _describe_runs(store: str, runs: Sequence[Head]) -> Iterator[Finding]:
    waiting = sum(run.status == "suspended" for run in runs)
    interrupted = sum(run.status == "running" and run.owner is None for run in runs)
    yield Finding("store", "ok", f"{store}: {len(runs)} runs, {waiting} waiting for a person")
    if interrupted:
        advice = "agentfsm resume continues them, if no process that runs them is alive"
        yield Finding("store", "note", f"{interrupted} interrupted runs", advice)


def _check_server(location: StoreLocation) -> Iterator[Finding]:
    try:
        store = open_existing_store(location)
        runs, facts = await_result(store.heads()), await_result(store.maintenance.describe())
    except AgentfsmError as error:
        advice = "see that the server runs and the URL is right, or name another store with --store"
        yield Finding("store", "problem", str(error), advice)
        return
    yield from _describe_runs(location.name, runs)
    for fact in facts:
        if fact.is_problem:  # without a schema, the first stored run may create it
            yield Finding(f"store {fact.name}", "note" if fact.name == "schema" else "problem", fact.value)


def _check_secret(location: StoreLocation) -> Iterator[Finding]:
    file = key_file(location)
    try:
        found = store_secrets(location)
    except ConfigurationError as error:
        yield Finding("secret", "problem", str(error), f"restore {file} from where you keep it")
        return
    if not found:
        if location.file is None or location.file.exists():
            advice = f"set {SECRET_VARIABLE} to that of the process that writes it; without it nothing can be resumed"
            yield Finding("secret", "warning", f"there is none for {location.name}", advice)
        else:
            yield Finding("secret", "note", "the first stored run creates a key file beside the store")
        return
    source = SECRET_VARIABLE if os.environ.get(SECRET_VARIABLE, "").strip() else str(file)
    yield Finding("secret", "ok", f"from {source}")
    if os.name == "posix" and file.exists() and file.stat().st_mode & 0o077:
        yield Finding("secret", "problem", f"other users may read {file}", f"chmod 600 {file}, and change the secret")


def _check_providers(*, offline: bool) -> list[Finding]:
    rows = [p for p in PROVIDERS.values() if _is_configured(p)]
    configured = list({(p.key_env, urlsplit(p.base_url).hostname): p for p in reversed(rows)}.values())
    if not configured:
        advice = "set a provider's key, such as OPENAI_API_KEY, or start a local server, such as ollama serve"
        findings = [Finding("providers", "note", "no key and no address is in the environment", advice)]
    else:
        findings = []
    if offline:
        return findings + [Finding(p.name, "note", f"{_source(p)}: not connected to") for p in configured]
    local = [p for p in PROVIDERS.values() if p not in configured and _is_local(p)]

    async def check_all() -> list[Finding]:
        async with httpx.AsyncClient(timeout=REACH_TIMEOUT_S) as client:
            found = await asyncio.gather(
                *(_check_provider(client, p, expected=True) for p in configured),
                *(_check_provider(client, p, expected=False) for p in local),
            )
        return [finding for finding in found if finding is not None]

    return findings + asyncio.run(check_all())


def _is_configured(provider: Provider) -> bool:
    variables = (provider.key_env,) if provider.needs_key else (provider.key_env, provider.url_env)
    return any(os.environ.get(name, "").strip() for name in variables if name)


def _is_local(provider: Provider) -> bool:
    return "//127.0.0.1" in provider.base_url


def _source(provider: Provider) -> str:
    names = [name for name in (provider.key_env, provider.url_env) if name and os.environ.get(name, "").strip()]
    return " and ".join(names)


async def _check_provider(client: httpx.AsyncClient, provider: Provider, *, expected: bool) -> Finding | None:
    """What came of connecting to a provider, or None for a local server that nobody expects to run."""
    try:
        url = resolve_endpoint(provider.name, None, None).base_url
    except ConfigurationError as error:
        return Finding(provider.name, "problem", str(error), "mend the environment variable") if expected else None
    try:
        answer = await client.get(url)
    except httpx.HTTPError as error:
        if not expected:
            return None
        text = f"{_source(provider)}: {url} cannot be reached: {str(error) or type(error).__name__}"
        return Finding(provider.name, "problem", text, provider.hint if _is_local(provider) else ONLINE_ADVICE)
    said = f"{_source(provider)}: " if expected else ""
    if answer.status_code >= 500:
        text = f"{said}{url} answers with status {answer.status_code}"
        return Finding(provider.name, "warning", text, "try again later: the server has a problem")
    return Finding(provider.name, "ok", f"{said}{url} answers")
