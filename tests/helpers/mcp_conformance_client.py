"""The client that the official conformance suite tests: an agent that calls each tool of the server once.

MCP_CONFORMANCE_SCENARIO=... MCP_CONFORMANCE_CONTEXT=... python mcp_conformance_client.py URL
"""

import asyncio
import json
import os
import sys
from typing import Any

import httpx
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.auth.extensions.identity_assertion import IdentityAssertionOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from agentfsm import Agent, Fill, Host, UserInputRequested
from agentfsm.integrations.mcp import MCPSettings, MCPTools, OAuth
from agentfsm.testing import ScriptedModel, call

SCENARIO = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
CONTEXT: dict[str, Any] = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
URL = sys.argv[-1]
ARGUMENTS: dict[str, dict[str, Any]] = {"add_numbers": {"a": 5, "b": 3}}


class Storage:
    """What authorizes the client, in memory."""

    def __init__(self) -> None:
        self.secret: str | None = None

    async def load(self) -> str | None:
        return self.secret

    async def save(self, secret: str) -> None:
        self.secret = secret


class SdkStorage:
    """The same for the SDK's own providers."""

    tokens: OAuthToken | None = None
    client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


async def authorize(url: str) -> str:
    """What a browser does whose user agrees."""
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(url)).headers["location"]


async def identity_assertion(audience: str, resource: str) -> str:
    """The assertion of the company's identity provider, for the token that it gave the user (RFC 8693)."""
    form = {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
        "requested_token_type": "urn:ietf:params:oauth:token-type:id-jag",
        "audience": audience,
        "resource": resource,
        "subject_token": CONTEXT["idp_id_token"],
        "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
        "client_id": CONTEXT["idp_client_id"],
    }
    async with httpx.AsyncClient(trust_env=False) as http:
        response = await http.post(CONTEXT["idp_token_endpoint"], data=form)
        return str(response.json()["access_token"])


def authorization_server() -> str:
    """The authorization server of the MCP server; an app would have it in its settings."""
    where = URL.replace("/mcp", "/.well-known/oauth-protected-resource/mcp")
    return str(httpx.get(where, trust_env=False).json()["authorization_servers"][0])


def auth() -> Any:
    if not SCENARIO.startswith("auth/"):
        return None
    if SCENARIO == "auth/client-credentials-basic":
        return ClientCredentialsOAuthProvider(
            URL, SdkStorage(), CONTEXT["client_id"], CONTEXT["client_secret"], "client_secret_basic"
        )
    if SCENARIO == "auth/client-credentials-jwt":
        signed = SignedJWTParameters(
            issuer=CONTEXT["client_id"],
            subject=CONTEXT["client_id"],
            signing_key=CONTEXT["private_key_pem"],
            signing_algorithm=CONTEXT.get("signing_algorithm", "ES256"),
        )
        return PrivateKeyJWTOAuthProvider(URL, SdkStorage(), CONTEXT["client_id"], signed.create_assertion_provider())
    if SCENARIO == "auth/cross-app-access-complete-flow":
        return IdentityAssertionOAuthProvider(
            URL,
            SdkStorage(),
            CONTEXT["client_id"],
            CONTEXT["client_secret"],
            authorization_server(),
            identity_assertion,
            token_endpoint_auth_method="client_secret_basic",
        )
    return OAuth(
        Storage(),
        authorize,
        "http://localhost:3000/callback",
        client_metadata_url="https://conformance-test.local/client-metadata.json",
        client_id=CONTEXT.get("client_id"),
        client_secret=CONTEXT.get("client_secret"),
    )


async def main() -> None:
    settings = MCPSettings(elicitation="elicitation" in SCENARIO, recheck=False)
    async with MCPTools.http(URL, auth=auth(), settings=settings) as tools:
        for tool in tools:
            one = call(tool.name, **ARGUMENTS.get(tool.name, {}))
            agent = Agent(ScriptedModel([one, "ok"]), tools=tools, host=Host(secret=b"of the conformance suite"))
            result = await agent.run("go")
            while isinstance(result.outcome, UserInputRequested):
                result = await agent.resume(result.outcome.suspension_record, Fill({}))
            print([message.content for message in result.messages if message.role == "tool"])


asyncio.run(main())
