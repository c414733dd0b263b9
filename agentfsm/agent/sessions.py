"""``Session``: a conversation whose runs follow each other, each continuing where the last one ended.

What a session consists of is in the store alone: its runs, which have its id. The id of each run follows from that
of the run before, and a store accepts an id once, so of two runs that want to continue the same run only one can.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic

from agentfsm.agent.resume import ResumeRequest, load_dismissed, load_resumed, require_store
from agentfsm.agent.run_options import RunOptions, run_details, with_options
from agentfsm.errors import RunEndedError, RunError, RunExistsError, SessionBusyError, SessionOpenError, StaleLease
from agentfsm.loop.human_input import HumanInput
from agentfsm.loop.messages import File, Image, Message
from agentfsm.loop.model import Model
from agentfsm.loop.prompts import compacted, prompt_text
from agentfsm.loop.state import NO_DETAILS, RunDetails, RunState
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.preparation import check_prompt, new_run, normalize_history
from agentfsm.runtime.recorder import JournalSink, ResumePoint
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run, run_in_new_loop, stored_run
from agentfsm.runtime.run_context import AgentDeps, Output, check_deps
from agentfsm.runtime.run_request import RunRequest

if TYPE_CHECKING:
    from agentfsm.journal.load import StoredConversation, StoredRequest
    from agentfsm.journal.run_info import RunInfo
    from agentfsm.journal.store import Store

MAX_ID_CHARS = 200
"""How long the id of a session may be: runs are found by as much of it."""

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})

_NewRun = tuple[AgentConfig, RunState, RunRequest]


class Session(Generic[AgentDeps, Output]):
    """A conversation in a store, which any process with the agent continues; made with ``agent.session(id)``.

    ::

        session = agent.session("ann-42")
        await session.run("My name is Ann.")
        result = await session.run("What is my name?")  # in another process, if you like

    Its runs are those of the store with its ``session_id``, including those that were started with
    ``agent.run(..., session_id=...)``, and the newest one is continued. Making a session reads nothing.

    Attributes:
        session_id: Its id.
    """

    def __init__(self, config: AgentConfig, session_id: str) -> None:
        self.session_id = _valid_id(session_id)
        self._config = config
        self._store: Store = require_store(config)

    def __repr__(self) -> str:
        return f"<Session {self.session_id!r}>"

    def run(
        self,
        prompt: str | Sequence[str | Image | File] | None = None,
        *,
        deps: AgentDeps | None = None,
        actor: Any = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, Any] = _NO_METADATA,
        options: RunOptions | None = None,
    ) -> Run[AgentDeps, Output]:
        """Create the next run of the session: await it for its result, or iterate it for its events.

        It is read from the store when it starts, and has its id from then on (``await run.load()`` only reads it).

        Args:
            prompt: The user's message, as ``agent.run`` takes it. None to continue without one: an interrupted run is
                resumed, and after a run that has ended, the model is asked to continue.
            deps: Its dependencies, as ``agent.run`` takes them.
            actor: Who requests it, as ``agent.run`` takes it.
            tags: Short texts by which the run is found. One such as ``tenant:acme`` says whose run it is: it does not
                continue a run of another tenant, and without one it is a run of the tenant of the run before.
            metadata: A JSON object, for your own purposes.
            options: A model, settings or limits of its own, instead of the agent's.

        Raises:
            ConfigurationError: The model is unknown or has no key, or it does not take the settings.
            RunError: An argument is not what it must be. When it starts: there is nothing to continue, the session
                is that of another tenant, or dependencies are missing.
            agentfsm.errors.SessionBusyError: When it starts: the session is being run, here or in another process.
            agentfsm.errors.SessionOpenError: When it starts: its last run waits for a person, or was interrupted and
                there is a prompt; the error says what to do.
            agentfsm.errors.JournalError: When it starts: the journal of its last run cannot be read or trusted.
            agentfsm.errors.StoreError: When it starts: the store cannot be read or written.
        """
        message = None if prompt is None else check_prompt(prompt)
        details, config = run_details(tags, metadata, options), with_options(self._config, options)
        if deps is not None:
            check_deps(config.deps_type, deps, "session.run(prompt, deps=...)")

        async def load() -> _NewRun:
            last = await self.last_run()
            tags = self._tags_of_next(last, details.tags)
            if last is not None and last.status != "finished":
                given = details is not NO_DETAILS or actor is not None
                return await self._load_open(last, message is not None, deps, given)
            if last is None and message is None:
                raise RunError(f"session {self.session_id!r} has no run to continue: give a prompt")
            request = RunRequest("" if message is None else prompt_text(message), by=actor, deps=deps)
            return await self._load_next(config, last, message, request, replace(details, tags=tags))

        return stored_run(config, "", load, deps)

    def run_sync(
        self,
        prompt: str | Sequence[str | Image | File] | None = None,
        *,
        deps: AgentDeps | None = None,
        actor: Any = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, Any] = _NO_METADATA,
        options: RunOptions | None = None,
    ) -> RunResult[Output]:
        """Create the next run and return its result, from code that has no running event loop.

        The arguments and the other errors are those of ``run``.

        Raises:
            RunError: An event loop is running in this thread, as in a notebook; await ``session.run`` there.
        """
        return run_in_new_loop(
            lambda: self.run(prompt, deps=deps, actor=actor, tags=tags, metadata=metadata, options=options),
            "run_sync",
            "session.run",
        )

    def resume(
        self,
        reply: HumanInput | None = None,
        *,
        to: str | None = None,
        by: Any = None,
        deps: AgentDeps | None = None,
        model: Model | None = None,
    ) -> Run[AgentDeps, Output]:
        """Resume the last run: with a person's reply to what it waits for, or without one if it was interrupted.

        The arguments and the other errors are those of ``agent.resume``.

        Raises:
            RunEndedError: When it starts: the last run of the session has ended.
            RunError: When it starts: the session has no run.
        """
        request = ResumeRequest(reply, to, by, deps, model)
        return self._continue(lambda run_id: load_resumed(self._config, run_id, request), deps)

    def resume_sync(
        self,
        reply: HumanInput | None = None,
        *,
        to: str | None = None,
        by: Any = None,
        deps: AgentDeps | None = None,
        model: Model | None = None,
    ) -> RunResult[Output]:
        """Resume the last run to its end and return the result, from code that has no running event loop.

        The arguments and the other errors are those of ``resume``.

        Raises:
            RunError: An event loop is running in this thread, as in a notebook; await ``session.resume`` there.
        """
        return run_in_new_loop(
            lambda: self.resume(reply, to=to, by=by, deps=deps, model=model), "resume_sync", "session.resume"
        )

    def dismiss(self, reason: str = "dismissed", *, by: Any = None) -> Run[AgentDeps, Output]:
        """End the last run, which waits for a person or was interrupted, without a reply; the session is free then.

        The arguments and the other errors are those of ``agent.dismiss``.

        Raises:
            RunEndedError: When it starts: the last run of the session has ended.
            RunError: When it starts: the session has no run.
        """
        return self._continue(lambda run_id: load_dismissed(self._config, run_id, reason, by), None)

    async def last_run(self) -> RunInfo | None:
        """The newest run of the session as it is listed, or None if it has none.

        Raises:
            agentfsm.errors.StoreError: The store cannot be read.
        """
        from agentfsm.journal.run_info import RunQuery  # only for sessions, and after the run loop

        page = await self._store.find_runs(RunQuery(session_id=self.session_id, parent="", limit=1))
        return page.runs[0] if page.runs else None

    async def waiting(self) -> StoredRequest | None:
        """What the last run waits for: tool, exact arguments, who may answer, until when; None if it waits for nobody.

        Raises:
            agentfsm.errors.JournalError: The journal of the last run cannot be read or trusted.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        last = await self.last_run()
        if last is None or last.status != "suspended" or not await self._has_begun(last):
            return None
        await self._conversation(last.run_id)
        return await self._request_of(last.run_id)

    async def messages(self) -> list[Message]:
        """The transcript of the session as its next run begins with it, without a system prompt.

        Raises:
            agentfsm.errors.JournalError: The journal of the last run cannot be read or trusted.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        from agentfsm.journal.listing import iterate_runs  # only for sessions, and after the run loop
        from agentfsm.journal.run_info import RunQuery

        async for run in iterate_runs(self._store, RunQuery(session_id=self.session_id, parent="", limit=1)):
            if await self._has_begun(run):
                return _history(await self._conversation(run.run_id))
        return []

    # -- loading --------------------------------------------------------------------------------------

    def _continue(self, load: Callable[[str], Awaitable[_NewRun]], deps: Any) -> Run[Any, Any]:
        async def load_last() -> _NewRun:
            last = await self.last_run()
            if last is None:
                raise RunError(f"session {self.session_id!r} has no run yet: begin with session.run(prompt)")
            if last.status == "finished":
                text = f"the last run of session {self.session_id!r}, {last.run_id!r}, has ended"
                raise RunEndedError(f"{text}: continue with session.run(prompt)")
            await self._require_idle(last)
            await self._conversation(last.run_id)
            return await load(last.run_id)

        return stored_run(self._config, "", load_last, deps)

    async def _load_open(self, last: RunInfo, has_message: bool, deps: Any, given: bool) -> _NewRun:
        """The last run again, if it was interrupted and there is no new message.

        Raises:
            SessionBusyError: It is being run.
            SessionOpenError: It waits for a person, or there is a new message.
            JournalError: Its journal cannot be trusted, or is that of another session.
        """
        await self._require_idle(last)
        await self._conversation(last.run_id)
        run, session = f"run {last.run_id!r}", f"session {self.session_id!r}"
        if last.status == "suspended":
            request = await self._request_of(last.run_id)
            expired = request is not None and request.has_expired(self._config.host.clock.time())
            advice = "It has expired: " if expired else "Answer with session.resume(reply), or "
            raise SessionOpenError(
                f"{session} waits for a person: {run} asks: {str(request).removesuffix('.')}. {advice}end that run "
                "with session.dismiss()",
                last.run_id,
                request,
            )
        if has_message:
            raise SessionOpenError(
                f"the last run of {session}, {run}, was interrupted: continue it with session.run() first, without a "
                "prompt, or end it with session.dismiss()",
                last.run_id,
            )
        if given:
            raise RunError(f"{run} was interrupted and continues as it was started: actor, tags, metadata and options "
                           "are those of a new run")  # fmt: skip
        return await load_resumed(self._config, last.run_id, ResumeRequest(None, deps=deps))

    async def _load_next(
        self,
        config: AgentConfig,
        last: RunInfo | None,
        message: Message | None,
        request: RunRequest,
        details: RunDetails,
    ) -> _NewRun:
        """A new run, whose transcript begins with what the last one leaves."""
        if request.deps is None and config.deps_factory is None:
            check_deps(config.deps_type, None, "session.run(prompt, deps=...), or Agent(deps_factory=...)")
        last_id = "" if last is None else last.run_id
        found = None if last is None else await self._conversation(last_id)
        history = [] if found is None else _history(found)
        state = new_run(
            config,
            history if message is None else [*history, message],
            self.session_id,
            await self._free_id(last_id),
            details if request.deps is None else replace(details, has_deps=True),
        )
        state.withheld = () if found is None else found.secrets
        return replace(config, open_journal_sink=self._claiming(config)), state, request

    async def _free_id(self, last_id: str) -> str:
        """The id of the run that follows another one: the ids of those that were purged are not used again."""
        run_id = _next_id(self.session_id, last_id)
        while await self._store.maintenance.was_purged(run_id):
            run_id = _next_id(self.session_id, run_id)
        return run_id

    def _claiming(self, config: AgentConfig) -> Callable[[RunState, ResumePoint | None], Awaitable[JournalSink]] | None:
        """Opens the journal of the next run, unless another one was faster."""
        open_sink = config.open_journal_sink
        if open_sink is None:
            return None

        async def claim(run: RunState, resume_point: ResumePoint | None) -> JournalSink:
            try:
                return await open_sink(run, resume_point)
            except (RunExistsError, StaleLease) as error:
                head = await self._store.head(run.run_id)
                owner = None if head is None else head.owner
                held = f", which is held by {owner}" if owner else ""
                raise SessionBusyError(
                    f"session {self.session_id!r} was continued in the meantime, by run {run.run_id!r}{held}: wait "
                    "until that has ended, and run the session again",
                    run.run_id,
                    owner,
                ) from error

        return claim

    def _tags_of_next(self, last: RunInfo | None, tags: tuple[str, ...]) -> tuple[str, ...]:
        """The tags of the next run: the given ones, and the tenants of the last run if these name none."""
        theirs, ours = _tenants(() if last is None else last.tags), _tenants(tags)
        if theirs and ours and theirs.isdisjoint(ours):
            raise RunError(f"session {self.session_id!r} has a run of another tenant: continue another session")
        return tags if ours else (*tags, *sorted(theirs))

    async def _require_idle(self, last: RunInfo) -> None:
        """Refuse to continue while the last run is being run, or waits for a worker."""
        if last.status == "running" and last.owner is not None:
            raise SessionBusyError(
                f"session {self.session_id!r} is being run: run {last.run_id!r} has not ended, and is held by "
                f"{last.owner}; wait until it has, or cancel it",
                last.run_id,
                last.owner,
            )
        if not await self._has_begun(last):
            raise SessionBusyError(
                f"session {self.session_id!r} waits for a worker: run {last.run_id!r} was submitted and has not begun; "
                "wait until it has ended, or cancel it",
                last.run_id,
                None,
            )

    async def _has_begun(self, last: RunInfo) -> bool:
        """Whether a run has records; one that was submitted has none until a worker starts it."""
        head = await self._store.head(last.run_id) if last.status == "suspended" else None
        return head is None or head.seq > 0

    async def _request_of(self, run_id: str) -> StoredRequest | None:
        from agentfsm.journal.load import pending_request

        head = await self._store.head(run_id)
        return None if head is None else await pending_request(self._store, head)

    async def _conversation(self, run_id: str) -> StoredConversation:
        from agentfsm.journal.load import load_conversation

        return await load_conversation(self._store, run_id, self._config.host.keyring, self.session_id)


def _tenants(tags: Iterable[str]) -> set[str]:
    """The tags that say whose run it is."""
    return {tag for tag in tags if tag.startswith("tenant:")}


def _valid_id(session_id: object) -> str:
    """The id of a session, by which its runs can be found."""
    if not isinstance(session_id, str):
        raise RunError(f"session_id must be a string, not {type(session_id).__name__}")
    plain = session_id.isprintable() and session_id == " ".join(session_id.split())
    if not session_id or len(session_id) > MAX_ID_CHARS or not plain:
        raise RunError(
            f"session_id {session_id[:MAX_ID_CHARS]!r} must have 1 to {MAX_ID_CHARS} printable characters, without "
            "spaces at its ends or two in a row"
        )
    return session_id


def _next_id(session_id: str, last_id: str) -> str:
    """The id of the run that follows another one in a session, or of the first."""
    return hashlib.sha256(f"session\0{session_id}\0{last_id}".encode(errors="surrogatepass")).hexdigest()[:16]


def _history(conversation: StoredConversation) -> list[Message]:
    run = conversation.run
    return normalize_history(compacted(run.messages, run.compaction))
