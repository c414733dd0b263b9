"""The table of providers, and how the base URL and the API key of one are resolved.

To add a provider that speaks an existing wire, add a row to ``PROVIDERS``: its wire, its base URL, and the environment
variables that hold the URL and the key. ``resolve("provider:model")`` then knows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn
from urllib.parse import SplitResult, urlsplit

from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, MissingKeyError

__all__ = ["PROVIDERS", "Endpoint", "Provider", "resolve_endpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One row of the table.

    Attributes:
        name: What stands before the colon of ``provider:model``.
        wire: Which interface it speaks: ``openai`` (chat completions), ``responses``, ``anthropic``
            (messages) or ``ollama`` (its own).
        base_url: Its own address.
        example: A model of it, for error texts.
        url_env: The variable that names another address, or an empty string.
        key_env: The variable that holds the key, or an empty string.
        needs_key: Whether its own address takes no call without a key.
        bare_patterns: Patterns of model names that need no ``provider:`` before them.
        hint: What to do when nothing answers at the address.
        parse_url: How the value of ``url_env`` becomes an address.
    """

    name: str
    wire: Literal["openai", "responses", "anthropic", "ollama"]
    base_url: str
    example: str
    url_env: str = ""
    key_env: str = ""
    needs_key: bool = False
    bare_patterns: tuple[str, ...] = ()
    hint: str = "is the server running, and is base_url right?"
    parse_url: Callable[[str], str] = str


def _ollama_url(host: str) -> str:
    """The address that ``OLLAMA_HOST`` names: ``host``, ``:port``, ``host:port`` or a URL.

    The port is 11434 unless a scheme says otherwise, and a server told to listen on every interface is asked
    on this machine's own.
    """
    url = urlsplit(host if "://" in host else f"//{host}", scheme="http")
    default = 11434 if "://" not in host else 443 if url.scheme == "https" else 80
    name = url.hostname or "127.0.0.1"
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)  # noqa: S104  # read, never bound
    place = f"[{name}]" if ":" in name else name
    return f"{url.scheme}://{place}:{url.port or default}{url.path.rstrip('/')}/v1"


PROVIDERS: dict[str, Provider] = {
    row.name: row
    for row in (
        Provider(
            name="openai",
            wire="openai",
            base_url="https://api.openai.com/v1",
            example="gpt-5-mini",
            url_env="OPENAI_BASE_URL",
            key_env="OPENAI_API_KEY",
            needs_key=True,
            bare_patterns=("gpt-*", "chatgpt-*", "o[1-9]", "o[1-9]-*", "ft:gpt-*", "ft:o[1-9]*"),
        ),
        Provider(
            name="openai-responses",
            wire="responses",
            base_url="https://api.openai.com/v1",
            example="gpt-5-mini",
            url_env="OPENAI_BASE_URL",
            key_env="OPENAI_API_KEY",
            needs_key=True,
        ),
        Provider(
            name="anthropic",
            wire="anthropic",
            base_url="https://api.anthropic.com",
            example="claude-sonnet-4-6",
            url_env="ANTHROPIC_BASE_URL",
            key_env="ANTHROPIC_API_KEY",
            needs_key=True,
            bare_patterns=("claude-*",),
        ),
        Provider(
            name="ollama",
            wire="ollama",
            base_url="http://127.0.0.1:11434/v1",
            example="llama3.2",
            url_env="OLLAMA_HOST",
            key_env="OLLAMA_API_KEY",
            hint="is it running (ollama serve), and is OLLAMA_HOST or base_url right?",
            parse_url=_ollama_url,
        ),
        Provider(
            name="llamacpp",
            wire="openai",
            base_url="http://127.0.0.1:8080/v1",
            example="default",
            hint="is it running (llama-server), and is base_url right?",
        ),
        Provider(
            name="vllm",
            wire="openai",
            base_url="http://127.0.0.1:8000/v1",
            example="Qwen/Qwen3-8B",
            hint="is it running (vllm serve), and is base_url right?",
        ),
        Provider(
            name="openrouter",
            wire="openai",
            base_url="https://openrouter.ai/api/v1",
            example="openai/gpt-5-mini",
            key_env="OPENROUTER_API_KEY",
            needs_key=True,
        ),
    )
}
"""Every provider, by the name before the colon."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address and the key for it.

    Attributes:
        provider: The row of the table that it was found by.
        base_url: Where calls go; no slash at its end.
        key: The key, or None; it shows in no ``repr``, and the whole cannot be pickled.
        key_source: Where the key came from: a variable's name or ``api_key``; empty without a key.
        is_official: Whether the address is the provider's own.
    """

    provider: Provider
    base_url: str
    key: SecretStr | None
    key_source: str
    is_official: bool

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model holds a key and is never pickled: keep its name, and resolve() it again")

    def __deepcopy__(self, memo: dict[int, object]) -> Endpoint:
        return self


def resolve_endpoint(
    provider: str,
    base_url: str | None,
    api_key: str | SecretStr | None,
    environ: Mapping[str, str] | None = None,
) -> Endpoint:
    """Where calls to a provider go, and the key for them.

    The address is ``base_url``, else what the provider's variable names, else its own. The key is
    ``api_key``, else the one in the provider's variable; that one goes only to the provider's own address
    or the one that its variable names. An address written in a program gets only a key given beside it, so
    that pointing a model at a server in the next room does not send it the key of an account.

    Args:
        provider: A name of ``GENAI_PROVIDER_NAMES``.
        base_url: The address, or None.
        api_key: The key, or None.
        environ: The environment; the process's own unless given.

    Raises:
        MissingKeyError: The provider's own address needs a key, and there is none.
        ConfigurationError: The provider is not in the table, or the address or the key cannot be one.
    """
    environ = os.environ if environ is None else environ
    if provider not in PROVIDERS:
        raise ConfigurationError(f"no provider is called {provider!r}; known: {', '.join(sorted(PROVIDERS))}")
    row = PROVIDERS[provider]
    named = environ.get(row.url_env, "").strip() if row.url_env else ""
    home = urlsplit(row.base_url)
    if base_url is None and named:
        url = _parse_base_url(named, row.url_env, row.parse_url)
        trusted = True
    else:
        url = _parse_base_url(row.base_url if base_url is None else base_url, "base_url")
        trusted = _same_origin(url, home)
    at_home = _same_origin(url, home)
    key, source = _parse_key(api_key), "api_key"
    if key is None and row.key_env and trusted:
        key, source = _parse_key(environ.get(row.key_env), row.key_env), row.key_env
    if key is None and row.needs_key and at_home:
        raise MissingKeyError(f"{provider} needs a key: set the variable {row.key_env}, or pass api_key")
    return Endpoint(row, url.geturl(), key, source if key else "", at_home)


def _same_origin(url: SplitResult, official: SplitResult) -> bool:
    """Whether an address is the home itself, or a regional host below it, over the same scheme and port."""
    host, home_host = url.hostname or "", official.hostname or ""
    return (url.scheme, url.port) == (official.scheme, official.port) and f".{host}".endswith(f".{home_host}")


def _parse_base_url(text: str, source: str, parse: Callable[[str], str] = str) -> SplitResult:
    """An address in parts; an error never repeats it, since it may hold a password."""
    try:
        url = urlsplit(parse(text.strip()).rstrip("/"))
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        url, valid = urlsplit(""), False
    if not valid or any(c.isspace() or not c.isprintable() or not c.isascii() for c in url.geturl()):
        raise ConfigurationError(f"{source} is no address such as http://127.0.0.1:8000/v1")
    if url.username is not None or url.query or url.fragment:
        raise ConfigurationError(f"{source} may hold no user, password, query or fragment; a key goes in api_key")
    return url


def _parse_key(value: str | SecretStr | None, source: str = "api_key") -> SecretStr | None:
    """A key without the blanks around it; blank is none.

    Raises:
        ConfigurationError: It holds what no HTTP header may; the HTTP library's own error would quote it.
    """
    text = (value.get_secret_value() if isinstance(value, SecretStr) else value or "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isprintable()):
        raise ConfigurationError(f"the key from {source} holds a character that no HTTP header may (a line break?)")
    return SecretStr(text)
