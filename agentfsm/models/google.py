"""``GoogleAccount``: calls of Vertex AI with Google credentials (extra ``vertex``).

    resolve("vertex:google/gemini-2.5-flash", api_key=GoogleAccount(project="acme", location="europe-west1"))

Without ``api_key``, ``vertex:...`` uses ``GoogleAccount()``: the project and location of ``GOOGLE_CLOUD_PROJECT`` and
``GOOGLE_CLOUD_LOCATION``, and the application default credentials of this machine, which google-auth finds and
refreshes. It is imported when the first call is made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, MissingExtraError
from agentfsm.models.transport import ApiKeyAuth
from agentfsm.models.wire_json import as_object, as_text

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)

_PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "ANTHROPIC_VERTEX_PROJECT_ID")
_LOCATION_VARIABLES = ("GOOGLE_CLOUD_LOCATION", "CLOUD_ML_REGION")
"""The variables of Google's clients, and those of Anthropic's client for Vertex."""

_MULTI_REGIONS = ("us", "eu")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleAccount:
    """A Google Cloud project, in which models of Vertex AI are called.

    Attributes:
        project: Its id; by default ``GOOGLE_CLOUD_PROJECT``, or the project of the file in
            ``GOOGLE_APPLICATION_CREDENTIALS``.
        location: The region, such as ``europe-west1``, or ``global``, ``us`` or ``eu``; by default
            ``GOOGLE_CLOUD_LOCATION``.
        credentials: Credentials of google-auth; by default the application default credentials.
        endpoint: An address in place of the location's own, such as that of a private endpoint, with its version
            (``https://example.com/v1``).

    Raises:
        MissingExtraError: google-auth is not installed.
    """

    project: str = ""
    location: str = ""
    credentials: Any = field(default=None, repr=False)
    endpoint: str = ""

    def __post_init__(self) -> None:
        if find_spec("requests") is None or find_spec("google") is None or find_spec("google.auth") is None:
            raise MissingExtraError("calling Vertex AI with Google credentials", "vertex")

    @property
    def source(self) -> str:
        """Where the credentials come from."""
        return "the Google credentials"

    def base_url(self, service: str) -> str:
        """The address of a service of Vertex AI.

        Args:
            service: What it ends with.

        Raises:
            ConfigurationError: The project or the location is not known, or invalid.
        """
        project = self.project or _first_of(_PROJECT_VARIABLES) or self._project_of_credentials()
        location = self.location or _first_of(_LOCATION_VARIABLES)
        if not project:
            raise ConfigurationError(
                "vertex needs a project: set GOOGLE_CLOUD_PROJECT, or pass api_key=GoogleAccount(project=...)"
            )
        if not location:
            raise ConfigurationError(
                "vertex needs a location: set GOOGLE_CLOUD_LOCATION, or pass api_key=GoogleAccount(location=...)"
            )
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]*", project):
            raise ConfigurationError(f"{project!r} is not the id of a Google Cloud project")
        if not re.fullmatch(r"[a-z0-9-]+", location):
            raise ConfigurationError(f"{location!r} is not a location of Google Cloud such as europe-west1")
        root = self.endpoint.rstrip("/") or f"https://{_host(location)}/v1"
        return f"{root}/projects/{project}/locations/{location}{service}"

    def authentication(self, on_secret: Callable[[SecretStr], None]) -> ApiKeyAuth:
        """What adds an access token to each request, renewed once if it is rejected.

        Args:
            on_secret: Receives each token.
        """
        return ApiKeyAuth("authorization", "Bearer ", None, _AccessTokens(self.credentials), on_secret)

    def _project_of_credentials(self) -> str:
        """The project of the credentials, as far as that is known without a call."""
        if self.credentials is not None:
            return str(getattr(self.credentials, "project_id", None) or "")
        try:
            text = Path(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")).read_text(encoding="utf-8")
            return as_text(as_object(json.loads(text)).get("project_id"))
        except (OSError, ValueError):
            return ""


def _host(location: str) -> str:
    if location == "global":
        return "aiplatform.googleapis.com"
    return (
        f"aiplatform.{location}.rep.googleapis.com"
        if location in _MULTI_REGIONS
        else f"{location}-aiplatform.googleapis.com"
    )


def _first_of(variables: tuple[str, ...]) -> str:
    return next(filter(None, (os.environ.get(name, "").strip() for name in variables)), "")


def _default_credentials() -> Any:
    """The application default credentials."""
    auth, exceptions = import_module("google.auth"), import_module("google.auth.exceptions")
    try:
        return auth.default(scopes=_SCOPES)[0]
    except exceptions.GoogleAuthError as error:
        raise ConfigurationError(
            f"no Google credentials were found ({type(error).__name__}): log in (gcloud auth application-default "
            "login), or set GOOGLE_APPLICATION_CREDENTIALS"
        ) from None


class _AccessTokens:
    """Returns an access token; each call but the first, which may use one that is still valid, gets a new one."""

    def __init__(self, credentials: Any) -> None:
        self._credentials: Any = credentials
        self._used = False

    def __call__(self) -> str:
        """A token."""
        credentials, exceptions = import_module("google.auth.credentials"), import_module("google.auth.exceptions")
        transport, requests = import_module("google.auth.transport.requests"), import_module("requests")
        if self._credentials is None:
            self._credentials = _default_credentials()
        if not self._used:
            self._credentials = credentials.with_scopes_if_required(self._credentials, _SCOPES)
        try:
            if self._used or not self._credentials.valid:
                with requests.Session() as session:
                    self._credentials.refresh(transport.Request(session))
        except exceptions.GoogleAuthError as error:
            raise ConfigurationError(
                f"the Google credentials get no access token ({type(error).__name__}): do they still exist, and have "
                "you logged in since (gcloud auth application-default login)?"
            ) from None
        self._used = True
        return str(self._credentials.token)
