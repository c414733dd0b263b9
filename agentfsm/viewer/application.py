"""``app``: the viewer as an ASGI app, for a server of its own or mounted in another app."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route

from agentfsm.agent import Agent
from agentfsm.errors import AgentfsmError, ConfigurationError, UnknownRunError
from agentfsm.journal.checkpoint import SignedHeads
from agentfsm.journal.store import Store
from agentfsm.journal.store_url import store_url
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import Actor
from agentfsm.machine.graph import Graph
from agentfsm.runs import Runs, runs_for
from agentfsm.runtime.host import ReplayGuard
from agentfsm.viewer.access import (
    LOOPBACK_NAMES,
    Access,
    AccessMiddleware,
    Authenticate,
    PathScopes,
    visitor_of,
)
from agentfsm.viewer.agent_runner import AgentRunner
from agentfsm.viewer.followed_run import FollowedRuns
from agentfsm.viewer.pages import PAGES
from agentfsm.viewer.viewer_context import SetAsideRuns, ViewerContext, context_of
from agentfsm.viewer.viewer_page import Page, PageError, json_response, page_html, serve_asset, shown

logger = logging.getLogger("agentfsm.viewer")


def app(
    store: Store,
    *,
    agents: Sequence[Agent[Any, Any]] = (),
    authenticate: Authenticate | None = None,
    hosts: Iterable[str] = (),
    secret: bytes | None = None,
    old_secrets: Sequence[bytes] = (),
    replay_guard: ReplayGuard | None = None,
    checkpoint: SignedHeads | None = None,
    graphs: Iterable[Graph] = (),
) -> Starlette:
    """An ASGI app that shows the runs of a store.

    ::

        app = agentfsm.viewer.app(store)                                   # for this machine, read-only
        app = agentfsm.viewer.app(store, authenticate=who, hosts=["agents.example.org"])
        main = Starlette(routes=[Mount("/agents", app)])                   # inside another app

    Args:
        store: The store. It is not closed with the app.
        agents: The agents of its runs, if this process should continue runs that were answered. Without them, an
            answer waits in the store for a process that has the agent.
        authenticate: Says who sends a request (a ``starlette.requests.Request``): an ``Actor``, or None for somebody
            who may not see the runs. It may be async. With ``ByTenant`` people see the runs of their tenants only.
            Without any, the app answers requests of this machine only, and nobody can change anything.
        hosts: The names under which a browser may reach it, without a port; ``localhost``, ``127.0.0.1`` and
            ``[::1]`` always work.
        secret: The secret of the host that writes the store; by default that of the first agent. Without it nobody
            can answer anything.
        old_secrets: Secrets that the host had before.
        replay_guard: Remembers which one-time links were opened, such as a ``FileReplayGuard`` that all processes of
            the viewer share. Without it, links are refused.
        checkpoint: What a signed checkpoint says that the store had, to verify it against.
        graphs: Your own graphs, under which stored runs can be replayed, besides those of the presets.

    Raises:
        ConfigurationError: A host is not a name, or an agent has another store.
    """
    names = frozenset(str(name).lower() for name in hosts)
    wrong = sorted(name for name in names if not name or "/" in name or "*" in name)
    if wrong:
        raise ConfigurationError(
            f"hosts must be names without scheme and path, such as agents.example.org, not {wrong[0]!r}"
        )
    if any(agent.config.host.store is not store for agent in agents):
        raise ConfigurationError("the agents of a viewer have its store: Agent(..., host=Host(store=store))")
    if secret is None and agents:
        host = agents[0].config.host
        secret, old_secrets = host.secret, host.old_secrets
    keyring = Keyring(secrets.token_bytes(32)) if secret is None else Keyring(secret, old_secrets)
    known = [each for agent in agents for each in agent.config.host.secrets]
    runner = AgentRunner(store, agents)
    runs = Runs(store, secret=secret, old_secrets=old_secrets, authenticate=_vouched_for, secrets=known)
    context = ViewerContext(
        store=store,
        runs=runs_for(runs, host_authenticates=runner.authenticates),
        claiming=Runs(store, secret=secret, old_secrets=old_secrets, secrets=known),
        replay_guard=replay_guard,
        access=Access(authenticate, names | LOOPBACK_NAMES, keyring),
        followed=FollowedRuns(store),
        set_aside=SetAsideRuns(store_url(store), store),
        runner=runner,
        may_change=secret is not None,
        host_keyring=None if secret is None else keyring,
        checkpoint=checkpoint,
        graphs={graph.name: graph for graph in graphs},
    )
    return _starlette(context)


def _starlette(context: ViewerContext) -> Starlette:
    runner = context.runner
    questions = [Route("/session", show_session), *(route for page in PAGES for route in page.routes)]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        runner.start()
        yield
        context.stopping.set()
        context.followed.stop_reading()
        await runner.stop()

    made = Starlette(
        routes=[
            *(Route(page.path, _document(page)) for page in PAGES),
            Mount("/api", routes=questions),
            Route("/static/{name}", serve_asset),
        ],
        middleware=[Middleware(AccessMiddleware, access=context.access, scopes=_scopes(), on_request=runner.start)],
        lifespan=lifespan,
        exception_handlers={
            PageError: _refuse,
            AgentfsmError: _report_error,
            HTTPException: _report_status,
            Exception: _report_bug,
        },
    )
    made.state.viewer = context
    return made


def _scopes() -> PathScopes:
    shared = [page for page in PAGES if page.shared]
    paths = [page.path for page in shared] + [f"/api{route.path}" for page in shared for route in page.routes]
    return PathScopes(public=("/link", "/api/link", "/static"), one_run=("/api/session", *paths))


def _vouched_for(actor: Actor | None) -> Actor | None:
    """Whoever answers was authenticated with the request."""
    return actor


def _document(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def document(request: Request) -> Response:
        only_run = visitor_of(request).only_run
        menu = [each for each in PAGES if each.shared or not only_run]
        return HTMLResponse(page_html(page, menu, request.scope.get("root_path", "")))

    return document


async def show_session(request: Request) -> Response:
    """Who the visitor is, and the token with which a page may change something."""
    visitor, access = visitor_of(request), context_of(request).access
    actor = visitor.actor
    return json_response(
        {
            "actor": None if actor is None else {"id": shown(actor.id), "roles": shown(list(actor.roles))},
            "only_run": shown(visitor.only_run),
            "token": access.token(visitor),
        }
    )


def _refuse(request: Request, error: Exception) -> Response:
    return json_response({"error": shown(str(error))}, error.status if isinstance(error, PageError) else 500)


def _report_error(request: Request, error: Exception) -> Response:
    return json_response({"error": shown(str(error))}, 404 if isinstance(error, UnknownRunError) else 500)


def _report_status(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return json_response({"error": "there is no such page" if status == 404 else str(error)}, status)


def _report_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return json_response({"error": f"the viewer failed: {type(error).__name__}; its log says where"}, 500)
