"""``AwsAccount``: calls of Amazon Bedrock signed with AWS credentials (Signature Version 4; extra ``bedrock``).

    resolve("bedrock:openai.gpt-oss-20b-1:0", api_key=AwsAccount(region="eu-central-1", profile="dev"))

Without ``api_key`` and ``AWS_BEARER_TOKEN_BEDROCK``, ``bedrock:...`` uses ``AwsAccount()``: the credentials that the
AWS command line would use. They are found and refreshed by botocore, which is imported when the first call is made.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, cast

import httpx
from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, MissingExtraError
from agentfsm.models.transport import ApiKeyError

_SERVICE = "bedrock"
"""The name of the service in signatures."""

_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")

_ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL_BEDROCK_RUNTIME"
"""The variable of AWS's own tools for an address in place of the region's.

(https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html)
"""

_REGION = re.compile(r"[a-z]{2,8}(-[a-z0-9]+)+-\d+")

_DOMAINS = {"cn": "amazonaws.com.cn", "eusc": "amazonaws.eu"}
"""The domains of the partitions that have one of their own, by the start of the region's name."""

_ADDED_HEADERS = ("authorization", "x-amz-date", "x-amz-security-token")

_REJECTED = (401, 403)
"""The statuses of a call whose credentials are not accepted; expired ones get 403."""


class AwsCredentials(Protocol):
    """Credentials as botocore has them, including those of a ``boto3.Session`` (``session.get_credentials()``)."""

    def get_frozen_credentials(self) -> Any:
        """The credentials as they are now, refreshed where they expire: ``access_key``, ``secret_key``, ``token``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsAccount:
    """An AWS account, whose credentials sign the calls of Amazon Bedrock.

    Attributes:
        region: The region, such as ``eu-central-1``; by default ``AWS_REGION``, ``AWS_DEFAULT_REGION`` or the region of
            the profile.
        profile: A profile of ``~/.aws/config``; by default ``AWS_PROFILE``.
        load: Returns the credentials, to find them otherwise: it is called before the first call, and again when a call
            is rejected, in a thread.
        endpoint: An address in place of the region's own, such as that of a private endpoint; by default
            ``AWS_ENDPOINT_URL_BEDROCK_RUNTIME``.

    Raises:
        MissingExtraError: botocore is not installed.
    """

    region: str = ""
    profile: str = ""
    load: Callable[[], AwsCredentials | None] | None = field(default=None, repr=False)
    endpoint: str = ""

    def __post_init__(self) -> None:
        if find_spec("botocore") is None:
            raise MissingExtraError(
                "calling Bedrock without AWS_BEARER_TOKEN_BEDROCK, with AWS credentials,", "bedrock"
            )

    @property
    def source(self) -> str:
        """Where the credentials come from."""
        profile = self.profile or os.environ.get("AWS_PROFILE", "")
        return f"the AWS credentials of profile {profile!r}" if profile and self.load is None else "the AWS credentials"

    def base_url(self, service: str) -> str:
        """The address of a service of Bedrock.

        Args:
            service: What it ends with.

        Raises:
            ConfigurationError: No region is known, or it is invalid.
        """
        region = self.current_region()
        domain = _DOMAINS.get(region.partition("-")[0], "amazonaws.com")
        own = self.endpoint or os.environ.get(_ENDPOINT_VARIABLE, "").strip()
        return f"{own.rstrip('/') or f'https://bedrock-runtime.{region}.{domain}'}{service}"

    def current_region(self) -> str:
        """The region.

        Raises:
            ConfigurationError: It is not known, or invalid.
        """
        found = self.region or next(filter(None, (os.environ.get(name, "").strip() for name in _REGION_VARIABLES)), "")
        region = found or str(self._session().get_config_variable("region") or "")
        if not region:
            raise ConfigurationError("bedrock needs a region: set AWS_REGION, or pass api_key=AwsAccount(region=...)")
        if not _REGION.fullmatch(region):
            raise ConfigurationError(f"{region!r} is not an AWS region such as eu-central-1")
        return region

    def authentication(self, on_secret: Callable[[SecretStr], None]) -> AwsSignature:
        """What signs each request.

        Args:
            on_secret: Receives each secret of the credentials.
        """
        return AwsSignature(self.load or self._credentials, self.current_region(), on_secret)

    def _credentials(self) -> AwsCredentials | None:
        return cast("AwsCredentials | None", self._session().get_credentials())

    def _session(self) -> Any:
        """A new session, which reads the environment and the configuration again."""
        session = import_module("botocore.session").Session(profile=self.profile or None)
        try:
            session.get_scoped_config()
        except import_module("botocore.exceptions").ProfileNotFound as error:
            raise ConfigurationError(f"{error}: is AWS_PROFILE or AwsAccount(profile=...) right?") from None
        return session


class _Frozen(NamedTuple):
    """Credentials at one moment."""

    access_key: str
    secret_key: str
    token: str | None


class AwsSignature(httpx.Auth):
    """Signs each request. One that is rejected is signed and sent once more, if there are other credentials by then."""

    requires_request_body = True

    def __init__(
        self, load: Callable[[], AwsCredentials | None], region: str, on_secret: Callable[[SecretStr], None]
    ) -> None:
        self._load, self._region, self._on_secret = load, region, on_secret
        self._credentials: AwsCredentials | None = None
        self._known: _Frozen | None = None
        self._lock = threading.Lock()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Sign the request, and repeat it once with renewed credentials.

        Raises:
            ApiKeyError: There are no credentials, or they cannot be loaded.
        """
        used = await asyncio.to_thread(self._current, None)
        self._sign(request, used)
        response = yield request
        if response.status_code in _REJECTED:
            renewed = await asyncio.to_thread(self._current, used)
            if renewed != used:
                self._sign(request, renewed)
                yield request

    def _current(self, rejected: _Frozen | None) -> _Frozen:
        """The credentials; loaded again if these have been rejected, and no other call has done so since."""
        with self._lock:  # the credentials of botocore refresh themselves, and calls run in several threads
            if self._credentials is None or (rejected is not None and rejected == self._known):
                self._credentials = self._guarded(self._load)
                if self._credentials is None:
                    raise ApiKeyError(
                        "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
                        "AWS_PROFILE, log in (aws sso login), or set AWS_BEARER_TOKEN_BEDROCK"
                    )
            frozen = self._guarded(self._credentials.get_frozen_credentials)
            found = _Frozen(frozen.access_key, frozen.secret_key, frozen.token)
            if found != self._known:
                self._known = found
                for secret in filter(None, (found.secret_key, found.token)):
                    self._on_secret(SecretStr(secret))
            return found

    def _guarded(self, function: Callable[[], Any]) -> Any:
        """What a function returns that looks for credentials; an error of which nothing is quoted, if it fails."""
        try:
            return function()
        except ConfigurationError as error:
            raise ApiKeyError(str(error)) from None
        except Exception as error:
            raise ApiKeyError(
                f"the AWS credentials cannot be loaded ({type(error).__name__}): are you logged in (aws sso login), "
                "and is the profile right?"
            ) from None

    def _sign(self, request: httpx.Request, used: _Frozen) -> None:
        credentials = import_module("botocore.credentials").Credentials(used.access_key, used.secret_key, used.token)
        for name in _ADDED_HEADERS:
            request.headers.pop(name, None)
        # Only what no proxy changes is signed.
        signed = import_module("botocore.awsrequest").AWSRequest(
            method=request.method,
            url=str(request.url),
            data=request.content,
            headers={"content-type": request.headers["content-type"]},
        )
        import_module("botocore.auth").SigV4Auth(credentials, _SERVICE, self._region).add_auth(signed)
        request.headers.update(
            {name: value for name, value in signed.headers.items() if name.lower() in _ADDED_HEADERS}
        )
