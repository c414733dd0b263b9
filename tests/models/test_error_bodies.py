"""The reason in an error response reaches the user, in whichever form a server, a gateway or a proxy writes it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agentfsm import Agent, Handoff
from agentfsm.errors import ContextOverflowError, ProviderError, TransientProviderError
from tests.helpers.fake_model_server import ModelOutput, encode_events, stream_events, stream_type
from tests.helpers.model_clients import (
    GOOD_BODIES,
    WIRES,
    build_model,
    request_error,
    request_reply,
    respond_with,
    stream_error,
    streaming_model,
)

PAGE = "<!DOCTYPE html>\n<html><head><TITLE>Blocked by ACME &amp; Co:\n no AI</TITLE></head><body>...</body></html>"
BY_OPENROUTER = {
    "error": {
        "message": "Provider returned error",
        "code": 400,
        "metadata": {"raw": '{"error": {"message": "x takes no tools"}}', "provider_name": "X"},
    }
}
REASONS: list[tuple[Any, str]] = [
    # Google's servers send a list of one error (https://github.com/googleapis/python-genai/issues/1349)
    ([{"error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT"}}], "API key not valid."),
    # https://developers.cloudflare.com/fundamentals/api/how-to/make-api-calls/
    ({"success": False, "errors": [{"code": 7003, "message": "Could not route to /x"}]}, "Could not route to /x"),
    ({"errors": ["no such model", "no such user"]}, "no such model"),
    # https://openrouter.ai/docs/api-reference/errors
    (BY_OPENROUTER, "Provider returned error: x takes no tools"),
    ({"error": {"message": "", "metadata": {"raw": "no tools"}}}, "no tools"),
    # RFC 9457
    ({"type": "about:blank", "title": "Not deployed", "status": 400}, "Not deployed"),
    ({"title": "Bad Request", "detail": "no such deployment"}, "no such deployment"),
    ({"code": 1004, "msg": "login fail"}, "login fail"),
    # https://platform.minimax.io/docs/api-reference/errorcode
    ({"base_resp": {"status_code": 1004, "status_msg": "carry the key"}}, "carry the key"),
    ({"error": ["unknown field: top_p"]}, "unknown field: top_p"),
    (PAGE, "Blocked by ACME & Co: no AI"),
    ("<?xml version='1.0'?><Error><Code>Denied</Code><Message>Not for you</Message></Error>", "Not for you"),
]
SAYS = "the server says: "


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("body", "reason"), REASONS)
def test_the_reason_for_a_rejection_is_quoted(wire: str, body: object, reason: str) -> None:
    error = request_error(build_model(wire, respond_with(400, body)))
    assert str(error).endswith(f"(400 Bad Request); {SAYS}{reason}")


@pytest.mark.parametrize("wire", WIRES)
def test_a_reason_is_quoted_again_after_the_request_has_told_the_model_of_it(wire: str) -> None:
    prompt = "Compare the diaries of Ada and Charles."
    told = f'context_length_exceeded: the maximum context length is "8192" tokens, but you sent 9000: {prompt}'
    requests: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request.content.decode())
        return httpx.Response(400, json={"error": {"message": told}})

    outcome = Agent(build_model(wire, handle)).run_sync(prompt).outcome
    assert isinstance(outcome, Handoff)
    assert "lessons_learned" in requests[-1]
    assert outcome.failure.explanation.endswith(f"; {SAYS}{told.removesuffix(prompt)}[...]")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("body", "reason"), REASONS)
def test_so_is_that_in_a_response_with_status_200(wire: str, body: object, reason: str) -> None:
    error = request_error(build_model(wire, respond_with(200, body)))
    assert type(error) is ProviderError
    assert str(error).endswith(f"{SAYS}{reason}")


@pytest.mark.parametrize("wire", WIRES)
def test_a_text_in_place_of_a_reply_is_quoted(wire: str) -> None:
    error = request_error(build_model(wire, respond_with(200, "upstream connect error", content_type="text/plain")))
    assert "the response is text/plain, not JSON" in str(error)
    assert str(error).endswith(f"{SAYS}upstream connect error")


def test_the_reason_of_the_provider_behind_a_gateway_decides_what_to_do() -> None:
    raw = {"error": {"message": "This model's maximum context length is 8192 tokens."}}
    body = {"error": {"message": "Provider returned error", "code": 400, "metadata": {"raw": raw}}}
    assert type(request_error(build_model("openai", respond_with(400, body)))) is ContextOverflowError


@pytest.mark.parametrize("wire", WIRES)
def test_an_error_in_a_list_within_a_stream_is_an_error(wire: str) -> None:
    events: list[Any] = [*stream_events(wire, ModelOutput("Hello"))[:3], [{"error": {"code": 503, "message": "full"}}]]
    error = stream_error(streaming_model(wire, encode_events(wire, events), kind=stream_type(wire)))
    assert type(error) is TransientProviderError
    assert str(error).endswith(f"(503 Service Unavailable); {SAYS}full")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("empty", [{}, {"message": "", "code": None}, [], False])
def test_an_error_without_any_content_beside_a_reply_is_none(wire: str, empty: object) -> None:
    reply = request_reply(build_model(wire, respond_with(200, GOOD_BODIES[wire] | {"error": empty})))
    assert reply.message.content == "hello"


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("status", [401, 503])
def test_the_status_of_an_error_counts_even_if_its_body_cannot_be_read(wire: str, status: int) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=httpx.ByteStream(b"not gzip"), headers={"content-encoding": "gzip"})

    error = request_error(build_model(wire, respond))
    assert (error.status, isinstance(error, TransientProviderError)) == (status, status == 503)


def test_a_proxy_that_rejects_a_call_without_tls_is_named() -> None:
    error = request_error(build_model("openai", respond_with(407, PAGE)))
    assert "a proxy on the way to http://127.0.0.1:9/v1 wants a password (407" in str(error)
    assert "is the one in proxy= or HTTP_PROXY right?" in str(error)


def test_a_reply_of_another_api_is_not_quoted_as_a_reason() -> None:
    assert SAYS not in str(request_error(build_model("openai", respond_with(200, GOOD_BODIES["ollama"]))))


def test_a_page_that_repeats_the_prompt_is_quoted_without_it() -> None:
    model = build_model("openai", respond_with(200, "you said: canary: the launch code is tangerine, 'twice' over!"))
    assert "tangerine" not in str(request_error(model))


@pytest.mark.parametrize("piece", ["<title", "<title ", "<message x", "<title>", "<"])
def test_a_page_is_read_for_its_reason_in_time_that_grows_with_its_length(piece: str) -> None:
    page = piece * (900_000 // len(piece))  # with quadratic time this would take minutes
    error = request_error(build_model("openai", respond_with(200, page)))
    assert type(error) is ProviderError
    assert SAYS not in str(error)
