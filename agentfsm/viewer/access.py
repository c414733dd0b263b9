"""Who may see and change what: the checks before every request, and the headers of every answer.

A browser sends requests for whatever site it has open, with the cookies of this one. So a request must name a host that
the viewer answers for (DNS rebinding), nothing but a visible navigation may come from another site, and what changes
something must come from the viewer's own page, with its token.
"""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentfsm.errors import AgentfsmError
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.loop.quorum import Actor
from agentfsm.viewer.passes import open_pass
from agentfsm.viewer.viewer_page import PageError, error_html, json_response, shown

Authenticate = Callable[[Request], Actor | Awaitable[Actor | None] | None]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})

TOKEN_HEADER = "x-agentfsm-token"  # noqa: S105  # the header's name
TOKEN_PERIOD_S = 12 * 3600
"""A token is valid in the period in which it was made, and in the next."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types agentfsm"
)

HEADERS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

FORWARDED = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"})
"""The headers by which a proxy on this machine shows that a request may come from another one."""

FRAMES = frozenset({"iframe", "frame", "object", "embed", "fencedframe"})


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whoever sends a request.

    Attributes:
        actor: Who it is; None where the viewer asks nobody.
        only_run: The run that a link let somebody see and answer; an empty string for all runs.
        tenants: The tenants whose runs they may see; None for all runs.
    """

    actor: Actor | None = None
    only_run: str = ""
    tenants: frozenset[str] | None = None

    def check_sees(self, run_id: str) -> None:
        """Check that a run may be shown."""
        if self.only_run and run_id != self.only_run:
            raise PageError(403, "your link is for another run")


EVERY_TENANT = "*"
"""What ``tenants`` returns among its names for somebody who may see the runs of everybody."""

TenantsOf = Callable[[Actor], "Collection[str] | Awaitable[Collection[str] | None] | None"]
"""Says which tenants' runs somebody may see: their names, ``EVERY_TENANT`` among them for all; none for nobody's."""


@dataclass(frozen=True)
class ByTenant:
    """Authentication by which people see the runs of their tenants only, for ``app(authenticate=...)``.

    Attributes:
        authenticate: Says who sends a request, as without tenants.
        tenants_of: Says which tenants' runs somebody may see: their names (a run of ``acme`` has the tag
            ``tenant:acme``), with ``EVERY_TENANT`` among them for all runs. It may be async. All other runs are unknown
            to them on every page.
    """

    authenticate: Authenticate
    tenants_of: TenantsOf

    def __call__(self, request: Request) -> Actor | Awaitable[Actor | None] | None:
        """Who sends a request."""
        return self.authenticate(request)


@dataclass(frozen=True)
class Access:
    """Who is let in.

    Attributes:
        authenticate: Says who sends a request, or None or an error for somebody who is not let in.
        hosts: The names under which the viewer may be reached.
        keyring: The keys of tokens and sessions.
        clock: Seconds since the epoch.
    """

    authenticate: Authenticate | None
    hosts: Collection[str]
    keyring: Keyring
    clock: Callable[[], float] = time.time

    def check_request(self, request: Request) -> None:
        """Check where a request comes from."""
        host = request.headers.get("host", "")
        if _host_name(host) not in self.hosts:
            raise PageError(
                421, f"this viewer does not answer for {host!r}; app(store, hosts=[...]) says which names it has"
            )
        if self.authenticate is None and not _is_loopback(request):
            raise PageError(403, "without authentication the viewer answers this machine only")
        if self.authenticate is None and not FORWARDED.isdisjoint(request.headers.keys()):
            raise PageError(403, "a proxy passes on requests of others: give app(store, authenticate=...)")
        site, mode = request.headers.get("sec-fetch-site", ""), request.headers.get("sec-fetch-mode", "")
        if request.headers.get("sec-fetch-dest", "") in FRAMES:
            raise PageError(403, "the viewer is not shown inside another page")
        from_elsewhere = site in ("cross-site", "same-site")
        if from_elsewhere and (mode != "navigate" or request.method != "GET"):
            raise PageError(403, "the request comes from another site")
        origin = request.headers.get("origin")
        if request.method == "POST" and origin is not None and origin.partition("://")[2] != host:
            raise PageError(403, "the request comes from another site")

    def check_token(self, request: Request, visitor: Visitor) -> None:
        """Check that a request to change something comes from a page of the viewer."""
        given = request.headers.get(TOKEN_HEADER, "").encode()
        now = int(self.clock() // TOKEN_PERIOD_S)
        if not any(hmac.compare_digest(self._token(visitor, period).encode(), given) for period in (now, now - 1)):
            raise PageError(403, "the page is too old: reload it")

    def token(self, visitor: Visitor) -> str:
        """The token that a page of a visitor sends with what changes something."""
        return self._token(visitor, int(self.clock() // TOKEN_PERIOD_S))

    def _token(self, visitor: Visitor, period: int) -> str:
        who = "" if visitor.actor is None else visitor.actor.id
        return self.keyring.current.seal(KeyPurpose.viewer, repr(("token", who, visitor.only_run, period)).encode())

    async def identify(self, request: Request) -> Visitor:
        """Who sends a request.

        Raises:
            PageError: Somebody who is not let in.
        """
        visitor = await self._visitor(request)
        if not isinstance(self.authenticate, ByTenant) or visitor.only_run:  # whoever made the link says what they see
            return visitor
        return replace(visitor, tenants=await self._tenants(self.authenticate.tenants_of, visitor.actor))

    @staticmethod
    async def _tenants(tenants_of: TenantsOf, actor: Actor | None) -> frozenset[str] | None:
        """The tenants whose runs somebody may see; None for all runs."""
        if actor is None:
            raise PageError(403, "it is not known which runs you may see")
        try:
            answer = tenants_of(actor)
            found: Any = await answer if isawaitable(answer) else answer
        except Exception as error:  # of the embedding program; its text may name others
            raise PageError(403, f"it is not known which runs you may see: {type(error).__name__}") from error
        if isinstance(found, str) or not found:  # the letters of a name are not names
            raise PageError(403, "there is no tenant whose runs you may see")
        names = frozenset(found)
        return None if EVERY_TENANT in names else names

    async def _visitor(self, request: Request) -> Visitor:
        """Who sends a request, whatever they may see."""
        actor = await self._authenticated(request)
        if actor is not None:
            return Visitor(replace(actor, verified=True))
        cookie = request.cookies.get(self.cookie_name)
        address = address_of(request)
        session = open_pass("session", cookie, self.keyring, self.clock(), address) if cookie else None
        if session is not None:
            return Visitor(session.actor, session.run_id)
        if self.authenticate is not None:
            raise PageError(401, "sign in to see the runs")
        return Visitor()

    @property
    def cookie_name(self) -> str:
        """The name of the cookie of sessions; viewers of other hosts have another."""
        return f"agentfsm_{self.keyring.current.key_id}"

    async def _authenticated(self, request: Request) -> Actor | None:
        if self.authenticate is None:
            return None
        try:
            answer = self.authenticate(request)
            actor: object = await answer if isawaitable(answer) else answer
        except AgentfsmError as error:
            raise PageError(401, str(error)) from error
        except Exception as error:  # its text may have a token
            raise PageError(401, f"you are not let in: authenticate raised {type(error).__name__}") from error
        return actor if isinstance(actor, Actor) else None


def visitor_of(request: Request) -> Visitor:
    """Whoever sends a request that was let in."""
    visitor: Visitor = request.state.visitor
    return visitor


def address_of(request: Request) -> str:
    """The address of the viewer, without a scheme, under which a request came."""
    return request.headers.get("host", "") + mount_path_of(request)


def mount_path_of(request: Request) -> str:
    """The path under which the viewer is mounted in another app; empty if it is the whole app."""
    path: str = request.state.mount_path
    return path


def _host_name(host: str) -> str:
    """A ``Host`` header without its port, in lower case."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() and (name.endswith("]") or ":" not in name) else host.lower()


def _is_loopback(request: Request) -> bool:
    """Whether a request comes from this machine; one without an address came over a socket of this machine."""
    if request.client is None:
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def _refused(request: Request, error: PageError) -> Response:
    """Why a request is refused, as a page for somebody who opens one."""
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(error_html(str(error), request.scope.get("root_path", "")), error.status)
    return json_response({"error": shown(str(error))}, error.status)


@dataclass(frozen=True, slots=True)
class PathScopes:
    """Who may ask for which paths below the viewer's; all others are for those who may see every run.

    Attributes:
        public: For anybody; a path below one of them, too.
        one_run: Also for somebody who may see one run only.
    """

    public: Collection[str]
    one_run: Collection[str]

    def is_public(self, path: str) -> bool:
        """Whether anybody may ask for a path."""
        return any(path == each or path.startswith(f"{each}/") for each in self.public)


class AccessMiddleware:
    """Lets requests in, or answers why not, and adds the headers that keep a page to itself."""

    def __init__(self, app: ASGIApp, access: Access, scopes: PathScopes, on_request: Callable[[], None]) -> None:
        self._app, self._access, self._scopes, self._on_request = app, access, scopes, on_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            await self._let_in(request)
        except PageError as error:
            await _refused(request, error)(scope, receive, send_with_headers)
            return
        self._on_request()
        await self._app(scope, receive, send_with_headers)

    async def _let_in(self, request: Request) -> None:
        """Check a request, and note who sends it."""
        self._access.check_request(request)
        path: Any = request.scope["path"]
        request.state.mount_path = request.scope.get("root_path", "")  # further inside it is longer
        inside = path.removeprefix(request.state.mount_path)
        if self._scopes.is_public(inside):
            request.state.visitor = Visitor()
            return
        visitor = await self._access.identify(request)
        if visitor.only_run and inside not in self._scopes.one_run:
            raise PageError(403, "your link is for one run only")
        if request.method == "POST":
            self._access.check_token(request, visitor)
        request.state.visitor = visitor
