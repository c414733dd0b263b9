"""The table of providers, and which base URL and API key a call to one of them uses.

To add a provider that uses an existing wire, add a row to ``PROVIDERS``: its wire, its base URL, and the environment
variables that hold the URL and the key. ``resolve("provider:model")`` then accepts it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, Protocol, cast
from urllib.parse import SplitResult, urlsplit

from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, MissingKeyError
from agentfsm.models.output_schema import DEFAULT_SUPPORT, OPENAI_SUPPORT, SchemaSupport
from agentfsm.models.role_rules import ANY_ORDER, HOSTED_ROLES, TEMPLATE_ROLES, RoleRules

if TYPE_CHECKING:
    import httpx

KeyFunction = Callable[[], str | SecretStr | Awaitable[str | SecretStr]]
"""A function that returns an API key, for keys that expire."""


class CloudAccount(Protocol):
    """An account of a cloud, in place of an API key: it knows the address of its models, and authenticates calls."""

    @property
    def source(self) -> str:
        """Where its credentials come from, for error texts."""
        ...

    def base_url(self, service: str) -> str:
        """The address of a service.

        Raises:
            ConfigurationError: It is not known, because a region or a project is missing.
        """
        ...

    def authentication(self, on_secret: Callable[[SecretStr], None]) -> httpx.Auth:
        """What authenticates each request."""
        ...


ApiKey = str | SecretStr | KeyFunction | CloudAccount
"""An API key, a function that returns one, or an account of a cloud."""

ACCOUNTS = {"aws": "agentfsm.models.aws:AwsAccount", "google": "agentfsm.models.google:GoogleAccount"}
"""Every kind of cloud account by its name in ``Provider.account``: its module and class, imported on first use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One row of the table.

    Attributes:
        name: The part before the colon of ``provider:model``.
        wire: The API that it implements, a key of ``model_registry.WIRES``: ``openai`` (chat completions),
            ``responses``, ``anthropic`` (messages) or ``ollama`` (its native API).
        base_url: Its own address.
        example: One of its models, for error texts.
        url_env: The environment variable that overrides the address, or an empty string.
        key_env: The environment variable that holds the API key, or an empty string.
        needs_key: Whether its own address rejects calls without a key.
        bare_patterns: Patterns of model names that need no ``provider:`` prefix.
        hint: What to check when the address cannot be reached.
        parse_url: Converts the value of ``url_env`` to a base URL.
        needs_url: Whether each customer has an address of their own, so that there is none to fall back to.
        key_header: The header that carries a key, in place of the wire's. The tokens of a function are sent as the
            wire sends keys.
        stream_usage: Whether it accepts ``stream_options``; without them some providers report no usage.
        renamed: Fields of a request body that it names differently.
        account: Whose account is used where there is no key, a key of ``ACCOUNTS``; or an empty string.
        service: What the address of the account ends with.
        variants: Patterns of model names, each with the provider that serves those models.
        schemas: What it accepts of an output schema.
        roles: What it accepts of the order of messages.
        files: For chat completions, whether it accepts PDFs in prompts.
    """

    name: str
    wire: str
    base_url: str
    example: str
    url_env: str = ""
    key_env: str = ""
    needs_key: bool = False
    bare_patterns: tuple[str, ...] = ()
    hint: str = "is the server running, and is base_url right?"
    parse_url: Callable[[str], str] = str
    needs_url: bool = False
    key_header: str = ""
    stream_usage: bool = True
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    account: str = ""
    service: str = ""
    variants: tuple[tuple[str, str], ...] = ()
    schemas: SchemaSupport = DEFAULT_SUPPORT
    roles: RoleRules = HOSTED_ROLES
    files: bool = False

    def variant(self, model: str) -> str:
        """The name of the provider that serves a model: this one, or that of a variant."""
        return next((name for pattern, name in self.variants if fnmatchcase(model, pattern)), self.name)


def _azure_url(endpoint: str) -> str:
    """The base URL for a value of ``AZURE_OPENAI_ENDPOINT``: ``https://NAME.openai.azure.com``."""
    return f"{endpoint.rstrip('/')}/openai/v1"


def _bedrock_url(region: str) -> str:
    """The base URL of Bedrock in a region such as ``eu-central-1``."""
    return f"https://bedrock-runtime.{region}.amazonaws.com"


def _bedrock_chat_url(region: str) -> str:
    """The base URL of Bedrock's chat completions in a region.

    (https://docs.aws.amazon.com/bedrock/latest/userguide/inference-chat-completions.html)
    """
    return f"{_bedrock_url(region)}/openai/v1"


def _ollama_url(host: str) -> str:
    """The base URL for a value of ``OLLAMA_HOST``: ``host``, ``:port``, ``host:port`` or a URL.

    The port is 11434 unless the value has a scheme. A server that listens on every interface is called on the
    loopback address.
    """
    url = urlsplit(host if "://" in host else f"//{host}", scheme="http")
    default = 11434 if "://" not in host else 443 if url.scheme == "https" else 80
    name = url.hostname or "127.0.0.1"
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)  # noqa: S104  # compared, never bound
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
            schemas=OPENAI_SUPPORT,
            roles=ANY_ORDER,
            files=True,
        ),
        Provider(
            name="openai-responses",
            wire="responses",
            base_url="https://api.openai.com/v1",
            example="gpt-5-mini",
            url_env="OPENAI_BASE_URL",
            key_env="OPENAI_API_KEY",
            needs_key=True,
            schemas=OPENAI_SUPPORT,
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
            roles=TEMPLATE_ROLES,
        ),
        Provider(
            name="vllm",
            wire="openai",
            base_url="http://127.0.0.1:8000/v1",
            example="Qwen/Qwen3-8B",
            hint="is it running (vllm serve), and is base_url right?",
            roles=TEMPLATE_ROLES,
        ),
        Provider(
            name="openrouter",
            wire="openai",
            base_url="https://openrouter.ai/api/v1",
            example="openai/gpt-5-mini",
            key_env="OPENROUTER_API_KEY",
            needs_key=True,
            files=True,
        ),
        Provider(
            name="groq",
            wire="openai",
            base_url="https://api.groq.com/openai/v1",
            example="llama-3.3-70b-versatile",
            key_env="GROQ_API_KEY",
            needs_key=True,
        ),
        Provider(
            name="mistral",
            wire="openai",
            base_url="https://api.mistral.ai/v1",
            example="mistral-large-latest",
            key_env="MISTRAL_API_KEY",
            needs_key=True,
            stream_usage=False,
            renamed={"seed": "random_seed"},
            roles=RoleRules(short_call_ids=True),
        ),
        Provider(
            name="deepseek",
            wire="openai",
            base_url="https://api.deepseek.com",
            example="deepseek-chat",
            key_env="DEEPSEEK_API_KEY",
            needs_key=True,
            schemas=SchemaSupport(mode="json_object"),
        ),
        Provider(
            name="xai",
            wire="openai",
            base_url="https://api.x.ai/v1",
            example="grok-4",
            key_env="XAI_API_KEY",
            needs_key=True,
        ),
        Provider(
            name="together",
            wire="openai",
            base_url="https://api.together.ai/v1",
            example="meta-llama/Llama-3.3-70B-Instruct-Turbo",
            key_env="TOGETHER_API_KEY",
            needs_key=True,
        ),
        Provider(
            name="gemini",
            wire="openai",
            base_url="https://generativelanguage.googleapis.com/v1beta/openai",
            example="gemini-2.5-flash",
            key_env="GEMINI_API_KEY",
            needs_key=True,
        ),
        Provider(
            name="azure",
            wire="openai",
            base_url="https://openai.azure.com/openai/v1",
            example="my-deployment",
            url_env="AZURE_OPENAI_ENDPOINT",
            key_env="AZURE_OPENAI_API_KEY",
            needs_key=True,
            needs_url=True,
            key_header="api-key",
            parse_url=_azure_url,
            schemas=OPENAI_SUPPORT,
            roles=ANY_ORDER,
        ),
        Provider(
            name="bedrock",
            wire="openai",
            base_url="https://bedrock-runtime.us-east-1.amazonaws.com/openai/v1",
            example="openai.gpt-oss-20b-1:0",
            url_env="AWS_REGION",
            key_env="AWS_BEARER_TOKEN_BEDROCK",
            needs_key=True,
            parse_url=_bedrock_chat_url,
            account="aws",
            service="/openai/v1",
            variants=(("*anthropic.claude*", "bedrock-anthropic"),),
        ),
        Provider(
            name="bedrock-anthropic",
            wire="bedrock-anthropic",
            base_url="https://bedrock-runtime.us-east-1.amazonaws.com",
            example="global.anthropic.claude-sonnet-4-6",
            url_env="AWS_REGION",
            key_env="AWS_BEARER_TOKEN_BEDROCK",
            needs_key=True,
            parse_url=_bedrock_url,
            account="aws",
        ),
        Provider(
            name="vertex",
            wire="openai",
            base_url="https://aiplatform.googleapis.com/v1",
            example="google/gemini-2.5-flash",
            needs_key=True,
            account="google",
            service="/endpoints/openapi",
            variants=(("claude-*", "vertex-anthropic"),),
        ),
        Provider(
            name="vertex-anthropic",
            wire="vertex-anthropic",
            base_url="https://aiplatform.googleapis.com/v1",
            example="claude-sonnet-4-6",
            needs_key=True,
            account="google",
            service="/publishers/anthropic/models",
        ),
        Provider(
            name="lmstudio",
            wire="openai",
            base_url="http://127.0.0.1:1234/v1",
            example="qwen3-8b",
            hint="is its server running (lms server start), and is base_url right?",
            roles=TEMPLATE_ROLES,
        ),
        Provider(
            name="litellm",
            wire="openai",
            base_url="http://127.0.0.1:4000/v1",
            example="gpt-5-mini",
            url_env="LITELLM_BASE_URL",
            key_env="LITELLM_API_KEY",
            hint="is the proxy running (litellm), and is LITELLM_BASE_URL or base_url right?",
        ),
    )
}
"""Every provider, by its name."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL and the API key for it.

    Attributes:
        provider: The provider's row of the table.
        base_url: Where calls go, without a trailing slash.
        key: The API key, or None; it is shown in no ``repr``, and an endpoint cannot be pickled.
        key_function: Returns the API key, for a key that is not known yet, or None.
        account: Authenticates the calls in place of a key, or None.
        key_source: Where the key came from: the name of a variable or ``api_key``; empty without a key.
        is_official: Whether the address is the provider's own.
    """

    provider: Provider
    base_url: str
    key: SecretStr | None
    key_source: str
    is_official: bool
    key_function: KeyFunction | None = None
    account: CloudAccount | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model holds an API key and is never pickled: store its name, and resolve() it again")

    def __deepcopy__(self, memo: dict[int, object]) -> Endpoint:
        return self


def resolve_endpoint(provider: str, base_url: str | None, api_key: ApiKey | None) -> Endpoint:
    """The base URL and the API key for calls to a provider.

    The base URL is ``base_url``, else the value of the provider's variable, else the provider's own. The key is
    ``api_key``, else the value of the provider's variable. The key from the environment is sent only to the
    provider's own address or to the one from the environment: an address given in code gets only a key given in
    code, so that pointing a model at another server does not send it the key of an account.

    Raises:
        MissingKeyError: The provider's own address needs a key, and there is none.
        ConfigurationError: The provider is not in the table, the address or the key is invalid, or there is no
            address.
    """
    if provider not in PROVIDERS:
        raise ConfigurationError(f"there is no provider {provider!r}; known providers: {', '.join(sorted(PROVIDERS))}")
    row = PROVIDERS[provider]
    if (account := _account(row, base_url, api_key, os.environ)) is not None:
        url = _parse_base_url(account.base_url(row.service) if base_url is None else base_url, "base_url")
        return Endpoint(row, url.geturl(), None, account.source, base_url is None, account=account)
    from_env = os.environ.get(row.url_env, "").strip() if row.url_env else ""
    if row.needs_url and base_url is None and not from_env:
        raise ConfigurationError(f"{provider} has no address of its own: set {row.url_env}, or pass base_url")
    official = urlsplit(row.base_url)
    if base_url is None and from_env:
        url = _parse_base_url(from_env, row.url_env, row.parse_url)
        trusted = True
    else:
        url = _parse_base_url(row.base_url if base_url is None else base_url, "base_url")
        trusted = _same_origin(url, official)
    is_official = _same_origin(url, official)
    if callable(api_key):
        return Endpoint(row, url.geturl(), None, "api_key", is_official, api_key)
    key, source = parse_key(cast("str | SecretStr | None", api_key)), "api_key"
    if key is None and row.key_env and trusted:
        key, source = parse_key(os.environ.get(row.key_env), row.key_env), row.key_env
    if key is None and row.needs_key and is_official:
        raise MissingKeyError(
            f"{provider} needs an API key: set the environment variable {row.key_env}, or pass api_key"
        )
    return Endpoint(row, url.geturl(), key, source if key else "", is_official)


def _account(
    row: Provider, base_url: str | None, api_key: ApiKey | None, environ: Mapping[str, str]
) -> CloudAccount | None:
    """The account that authenticates the calls: the one given, else the environment's where there is no key.

    Raises:
        MissingExtraError: The packages for it are not installed.
    """
    if api_key is not None and not isinstance(api_key, str | SecretStr) and not callable(api_key):
        return api_key
    if not row.account or api_key is not None or base_url is not None or environ.get(row.key_env, "").strip():
        return None
    module, _, name = ACCOUNTS[row.account].partition(":")
    return cast("CloudAccount", getattr(import_module(module), name)())


def _same_origin(url: SplitResult, official: SplitResult) -> bool:
    """Whether a URL has the scheme, port and host of the official one, or a (regional) subdomain of that host."""
    host, official_host = url.hostname or "", official.hostname or ""
    return (url.scheme, url.port) == (official.scheme, official.port) and f".{host}".endswith(f".{official_host}")


def _parse_base_url(text: str, source: str, parse: Callable[[str], str] = str) -> SplitResult:
    """A base URL in parts. Error texts do not repeat it, since it may contain a password."""
    try:
        url = urlsplit(parse(text.strip()).rstrip("/"))
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        url, valid = urlsplit(""), False
    if not valid or any(c.isspace() or not c.isprintable() or not c.isascii() for c in url.geturl()):
        raise ConfigurationError(f"{source} is not a URL such as http://127.0.0.1:8000/v1")
    if url.username is not None or url.query or url.fragment:
        raise ConfigurationError(
            f"{source} may not contain a user, password, query or fragment; pass the API key as api_key"
        )
    return url


def parse_key(value: str | SecretStr | None, source: str = "api_key") -> SecretStr | None:
    """An API key without surrounding blanks, or None if it is blank.

    Raises:
        ConfigurationError: It contains a character that is not allowed in an HTTP header. The HTTP library's own
            error would quote the key.
    """
    text = (value.get_secret_value() if isinstance(value, SecretStr) else value or "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isprintable()):
        raise ConfigurationError(
            f"the key from {source} contains a character that is not allowed in an HTTP header (a line break?)"
        )
    return SecretStr(text)
