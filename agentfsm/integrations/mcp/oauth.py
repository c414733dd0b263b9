"""OAuth for MCP servers over HTTP, through the SDK's client; tokens stay in a storage of the app's."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, urlsplit

from pydantic import AnyUrl, BaseModel, ValidationError

from agentfsm.errors import ConfigurationError

if TYPE_CHECKING:
    import httpx2
    from mcp.client.auth import OAuthClientProvider
    from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthToken


class TokenStorage(Protocol):
    """Where an app keeps what authorizes it at one server: a keyring, a file, a row of its database."""

    async def load(self) -> str | None:
        """What was saved last, or None."""
        ...

    async def save(self, secret: str) -> None:
        """Save a text instead of the one before. It holds tokens, so nobody else may read it."""
        ...


@dataclass(frozen=True)
class OAuth:
    """How an app gets authorized at an MCP server by its user: the authorization code flow with PKCE.

    The app is registered at the authorization server by itself, unless that takes ``client_metadata_url`` as its id, or
    ``client_id`` is given. Tokens are refreshed when they expire.

    Attributes:
        storage: Keeps the tokens and the registration.
        authorize: Shows an authorization URL to the user, and returns the URL to which their browser was redirected,
            with its query. It is awaited without a time limit while the server is opened.
        redirect_uri: The address of the app to which the browser is redirected.
        client_name: The app's name, as the user sees it.
        scope: Which rights the app asks for, separated by spaces; None for what the server says.
        client_metadata_url: An https URL with the app's metadata that is its id, or None.
        client_id: The id under which the app was registered beforehand, or None.
        client_secret: The secret that belongs to it, or None.

    Raises:
        ConfigurationError: ``client_metadata_url`` is not an https URL with a path.
    """

    storage: TokenStorage
    authorize: Callable[[str], Awaitable[str]]
    redirect_uri: str
    client_name: str = "agentfsm"
    scope: str | None = None
    client_metadata_url: str | None = None
    client_id: str | None = None
    client_secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.client_metadata_url or "https://example.com/id")
        if parts.scheme != "https" or parts.path in ("", "/"):
            raise ConfigurationError("client_metadata_url must be an https URL with a path")


class _Saved(BaseModel):
    """What is saved, as JSON data of the SDK's classes."""

    tokens: dict[str, Any] | None = None
    expires_at: float | None = None
    client: dict[str, Any] | None = None


_SECRETS = frozenset({"access_token", "refresh_token", "client_secret"})


class _SdkStorage:
    """A storage as the SDK uses it; what it holds is withheld from journals."""

    def __init__(self, oauth: OAuth, withhold: Callable[[list[str]], None]) -> None:
        self._oauth, self._withhold = oauth, withhold

    async def _load(self) -> _Saved:
        text = await self._oauth.storage.load()
        try:
            return self._known(_Saved() if not text else _Saved.model_validate_json(text))
        except ValidationError:
            raise ConfigurationError("the token storage returns something other than what was saved") from None

    async def _save(self, saved: _Saved) -> None:
        await self._oauth.storage.save(self._known(saved).model_dump_json())

    def _known(self, saved: _Saved) -> _Saved:
        values = [*(saved.tokens or {}).items(), *(saved.client or {}).items()]
        self._withhold([value for name, value in values if name in _SECRETS and value])
        return saved

    async def get_tokens(self) -> OAuthToken | None:
        from mcp.shared.auth import OAuthToken

        saved = await self._load()
        if saved.tokens is None:
            return None
        tokens = OAuthToken.model_validate(saved.tokens)
        if saved.expires_at is not None and saved.expires_at <= time.time() and tokens.refresh_token:
            # The SDK does not know when a token that it loads expires, and would ask the user instead of refreshing.
            return tokens.model_copy(update={"access_token": ""})
        return tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        saved = await self._load()
        saved.tokens = tokens.model_dump(mode="json", exclude_none=True)
        saved.expires_at = None if tokens.expires_in is None else time.time() + tokens.expires_in
        await self._save(saved)

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        from mcp.shared.auth import OAuthClientInformationFull

        client = (await self._load()).client
        if client is not None:
            return OAuthClientInformationFull.model_validate(client)
        if self._oauth.client_id is None:
            return None
        return OAuthClientInformationFull(
            client_id=self._oauth.client_id,
            client_secret=self._oauth.client_secret,
            redirect_uris=[AnyUrl(self._oauth.redirect_uri)],
            token_endpoint_auth_method="none" if self._oauth.client_secret is None else "client_secret_basic",
        )

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        saved = await self._load()
        saved.client = client_info.model_dump(mode="json", exclude_none=True)
        await self._save(saved)


class Authorizer:
    """Authorizes the requests of one connection.

    Attributes:
        asks_user: Whether the user is being asked now.
    """

    def __init__(self, url: str, auth: OAuth | httpx2.Auth | None) -> None:
        self._url, self._auth = url, auth
        self._shown = ""
        self.asks_user = False

    def auth(self, withhold: Callable[[list[str]], None]) -> httpx2.Auth | None:
        """What authorizes the requests of a new connection."""
        return self._provider(self._auth, withhold) if isinstance(self._auth, OAuth) else self._auth

    def _provider(self, oauth: OAuth, withhold: Callable[[list[str]], None]) -> OAuthClientProvider:
        from mcp.client.auth import OAuthClientProvider
        from mcp.shared.auth import OAuthClientMetadata

        async def remember(url: str) -> None:
            self._shown = url

        async def ask() -> AuthorizationCodeResult:
            async with self._asking():
                return _read_redirect(await oauth.authorize(self._shown))

        metadata = OAuthClientMetadata(
            client_name=oauth.client_name, redirect_uris=[AnyUrl(oauth.redirect_uri)], scope=oauth.scope
        )
        storage, own_id = _SdkStorage(oauth, withhold), oauth.client_metadata_url
        return OAuthClientProvider(self._url, metadata, storage, remember, ask, client_metadata_url=own_id)

    @asynccontextmanager
    async def _asking(self) -> AsyncGenerator[None]:
        self.asks_user = True
        try:
            yield
        finally:
            self.asks_user = False


def _read_redirect(url: str) -> AuthorizationCodeResult:
    """What an authorization server says in the URL to which it redirects."""
    from mcp.shared.auth import AuthorizationCodeResult

    query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    if "error" in query:
        why = f": {query['error_description']}" if "error_description" in query else ""
        raise ConfigurationError(f"the authorization was refused ({query['error']}){why}")
    if "code" not in query:
        raise ConfigurationError("authorize(url) must return the URL of the redirect, which has a code in its query")
    return AuthorizationCodeResult(code=query["code"], state=query.get("state"), iss=query.get("iss"))
