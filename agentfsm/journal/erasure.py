"""Erases a person's data from a store: their runs are purged, and their id and a text are deleted from all others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

from agentfsm.errors import ConfigurationError
from agentfsm.journal.listing import find_listing, iterate_runs
from agentfsm.journal.purge import KeptRun, purge_runs
from agentfsm.journal.redact import TextRedaction, redact_actor, redact_text
from agentfsm.journal.run_info import RunInfo, RunQuery, check_selects_one
from agentfsm.journal.store import Store
from agentfsm.journal.text_search import Occurrence, find_actor, find_text
from agentfsm.loop.keys import Keyring


@dataclass(frozen=True, kw_only=True)
class ErasureQuery:
    """By what a person's data is found. A run that fits one of the first three is purged as a whole.

    Attributes:
        actor: The id of the person who requested runs. Where others' runs name the person, as somebody who answered
            for instance, is deleted or reported.
        session_id: A conversation.
        tag: A tag.
        text: What occurs in other runs, such as an e-mail address: each value that has it is deleted.

    Raises:
        ConfigurationError: Nothing is given, or one of the first three is longer than what runs are listed by.
    """

    actor: str = ""
    session_id: str = ""
    tag: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        if not (self.actor or self.session_id or self.tag or self.text):
            raise ConfigurationError("say by what the data is found: an actor, a session, a tag or a text")
        for name in ("actor", "session_id", "tag"):
            check_selects_one(name, getattr(self, name))

    @property
    def queries(self) -> list[RunQuery]:
        """Which runs are purged."""
        by_actor, by_session = RunQuery(actor=self.actor, limit=500), RunQuery(session_id=self.session_id, limit=500)
        given = ((self.actor, by_actor), (self.session_id, by_session), (self.tag, RunQuery(tag=self.tag, limit=500)))
        return [query for value, query in given if value]


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """What was erased, or would be, and what remains.

    Attributes:
        purged: The ids of the runs that were purged.
        kept: The runs of the person that remain, and why.
        deleted: The places in other runs whose values were deleted.
        remaining: The places where the text still occurs, or the id of the person as that of an actor in the runs of
            others, and why.
        elsewhere: Where else something may still be, or an empty string.
    """

    purged: tuple[str, ...] = ()
    kept: tuple[KeptRun, ...] = ()
    deleted: tuple[Occurrence, ...] = ()
    remaining: tuple[Occurrence, ...] = ()
    elsewhere: str = ""


async def erase(
    store: Store, person: ErasureQuery, keyring: Keyring, *, by: str = "", dry_run: bool = False
) -> ErasureReport:
    """Erase a person's data, and compact the store.

    Args:
        store: The store.
        person: By what the data is found.
        keyring: The keys of the host: one of them sealed the runs, and the current one seals what is written.
        by: Who requested it, for tombstones and journals.
        dry_run: Whether to erase nothing, and only say what would be.

    Raises:
        JournalError: The text is too short.
        StoreError: The store cannot be read or written.
    """
    found = await find_text(store, person.text, keyring) if person.text else []  # says first if the text is too short
    runs = [run_id async for run_id in _topmost(store, person)]
    done = await purge_runs(store, runs, keyring, by=by, reason="erasure", dry_run=dry_run)
    if dry_run:
        named = await find_actor(store, person.actor, keyring) if person.actor else []
        left = [each for each in (*found, *_more(named, done.kept, found)) if each.run_id not in done.purged]
        deleted = tuple(each for each in left if each.is_deletable)
        return ErasureReport(done.purged, done.kept, deleted, tuple(each for each in left if not each.is_deletable))
    texts = actors = TextRedaction((), ())
    async with store.maintenance.writable(store) as writable:
        if person.text:
            texts = await redact_text(writable, person.text, keyring, by=by)
        if person.actor:
            actors = await redact_actor(writable, person.actor, keyring, by=by)
    elsewhere = await store.maintenance.compact()
    remaining = (*texts.remaining, *_more(actors.remaining, done.kept, texts.remaining))
    return ErasureReport(done.purged, done.kept, texts.deleted + actors.deleted, remaining, elsewhere)


def _more(named: Iterable[Occurrence], kept: Iterable[KeptRun], found: Iterable[Occurrence]) -> Iterator[Occurrence]:
    """Where an actor is named, besides what was found already, and the runs that remain as a whole."""
    whole, known = {run.run_id for run in kept}, {(each.run_id, each.seq, each.field) for each in found}
    return (each for each in named if each.run_id not in whole and (each.run_id, each.seq, each.field) not in known)


async def _topmost(store: Store, person: ErasureQuery) -> AsyncIterator[str]:
    """The runs of the person; in place of a sub-agent's run, the run that called it."""
    for query in person.queries:
        async for info in iterate_runs(store, query):
            yield await _caller(store, info)


async def _caller(store: Store, info: RunInfo) -> str:
    parent = await find_listing(store, info.parent) if info.parent else None
    return info.run_id if parent is None else await _caller(store, parent)
