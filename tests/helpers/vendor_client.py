"""Calls a chat completions server with a vendor's own client; run by a Python that has it installed.

    python vendor_client.py PROVIDER URL KEY < request.json

It prints the address that the client calls by default.
"""

import json
import sys
from importlib import import_module
from typing import Any

__all__ = ["CLIENTS", "call"]

CLIENTS = {
    "groq": "groq==1.7.0",
    "mistral": "mistralai==3.7.0",
    "openrouter": "openrouter==1.3.84",
    "together": "together==3.1.1",
}
"""The package with the client of each provider, as far as it has one over HTTP that is not OpenAI's."""


def call(provider: str, url: str, key: str, request: dict[str, Any]) -> str:
    """Send a request to a server; returns the address that the client calls by default.

    Args:
        provider: A key of ``CLIENTS``.
        url: The address of the server.
        key: The API key.
        request: The arguments of the client's method.
    """
    if provider in ("groq", "together"):
        module = import_module(provider)
        make = getattr(module, provider.capitalize())
        _send(make(api_key=key, base_url=url, max_retries=0).chat.completions.create, request)
        return str(make(api_key=key).base_url)
    if provider == "mistral":
        chat = import_module("mistralai.client").Mistral(api_key=key, server_url=url).chat
        _send(chat.stream if request.pop("stream", False) else chat.complete, request)
        return str(import_module("mistralai.client.sdkconfiguration").SERVERS["global"])
    _send(import_module("openrouter").OpenRouter(api_key=key, server_url=url).chat.send, request)
    return str(import_module("openrouter.sdkconfiguration").SERVERS["production"])


def _send(method: Any, request: dict[str, Any]) -> None:
    try:
        list(method(**request))
    except Exception as error:  # the server rejects every call
        print(error, file=sys.stderr)


if __name__ == "__main__":
    _, provider, url, key = sys.argv
    print(call(provider, url, key, json.load(sys.stdin)))
