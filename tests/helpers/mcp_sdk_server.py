"""An MCP server made with the official SDK, over stdio or streamable HTTP.

    python mcp_sdk_server.py stdio|PORT FOLDER [legacy]

What its tools do is appended to ``FOLDER/done.txt``. With ``legacy`` it speaks the protocol with sessions (2025-11-25)
only, in which a server sends requests of its own while a call runs; else also the one without (2026-07-28).
"""

import os
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve, Sample
from mcp.server.request_state import RequestStateSecurity
from mcp.shared.exceptions import MCPError
from mcp.types import (
    METHOD_NOT_FOUND,
    AudioContent,
    CreateMessageResult,
    SamplingMessage,
    TextContent,
    ToolAnnotations,
)
from pydantic import BaseModel, Field

WHERE, FOLDER, *REST = sys.argv[1:]
KEY = os.environ.get("REQUEST_STATE_KEY")


async def without_discovery(ctx: Any, call_next: Any) -> Any:
    if ctx.method == "server/discover":
        raise MCPError(METHOD_NOT_FOUND, "Method not found")
    return await call_next(ctx)


server = MCPServer(
    "clerk",
    instructions="Ask for <dates> before you book.",
    log_level="ERROR",
    request_state_security=RequestStateSecurity(keys=[KEY]) if KEY else None,
    middleware=[without_discovery] if "legacy" in REST else None,
)


def done(text: str) -> None:
    with (Path(FOLDER) / "done.txt").open("a") as file:
        file.write(text + "\n")


class Trip(BaseModel):
    """What the person is asked about a trip."""

    day: date = Field(description="The day of the departure")
    seat: Literal["aisle", "window"] = "window"
    bags: int = Field(default=1, ge=0, le=3)


class Sure(BaseModel):
    """What the person is asked before something is deleted."""

    sure: bool


@server.tool()
async def book(city: str, ctx: Context[Any, Any]) -> str:
    """Book a trip; asks the person while the call runs."""
    done(f"book {city}: begun")
    answer = await ctx.elicit(f"When do you go to {city}?", Trip)
    if answer.action != "accept":
        return f"not booked: {answer.action}"
    done(f"book {city}: booked")
    return f"{city} on {answer.data.day}, {answer.data.seat}, {answer.data.bags} bags"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def quote(city: str, ctx: Context[Any, Any]) -> str:
    """What a trip costs; asks the person twice while the call runs."""
    done(f"quote {city}: begun")
    trip = await ctx.elicit(f"When do you go to {city}?", Trip)
    sure = await ctx.elicit("Is that sure?", Sure)
    if trip.action != "accept" or sure.action != "accept":
        return f"no quote: {trip.action}, {sure.action}"
    return f"{trip.data.bags} bags, sure: {sure.data.sure}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def recite(words: int) -> str:
    """A long text, which the SDK sends as a text and as structured content."""
    return " ".join(f"word{n}" for n in range(words))


async def ask_trip(city: str) -> Elicit[Trip]:
    return Elicit(f"When do you go to {city}?", Trip)


@server.tool()
async def reserve(city: str, trip: Annotated[Trip, Resolve(ask_trip)]) -> str:
    """Reserve a trip; the person is asked before the call has an effect."""
    done(f"reserve {city}")
    return f"{city} on {trip.day}, {trip.seat}, {trip.bags} bags"


def question(text: str) -> list[SamplingMessage]:
    return [SamplingMessage(role="user", content=TextContent(text=f"Summarize: {text}"))]


@server.tool()
async def summarize(text: str, ctx: Context[Any, Any]) -> str:
    """Summarize a text with the model of the client, while the call runs."""
    ask = ctx.session.create_message  # pyright: ignore[reportDeprecated]  # servers use it
    reply = await ask(question(text), max_tokens=50, system_prompt="Be short.")
    assert isinstance(reply.content, TextContent)
    return f"{reply.model}: {reply.content.text} ({reply.stop_reason})"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def compare(text: str, ctx: Context[Any, Any], requests: int = 2, max_tokens: int = 50) -> str:
    """Ask the model of the client the same thing several times, one after the other."""
    said: list[str] = []
    for _ in range(requests):
        ask = ctx.session.create_message  # pyright: ignore[reportDeprecated]
        reply = await ask(question(text), max_tokens=max_tokens, temperature=0.5, stop_sequences=["END"])
        assert isinstance(reply.content, TextContent)
        said.append(f"{reply.content.text} ({reply.stop_reason})")
    done(f"compare {text}")
    return " / ".join(said)


@server.tool()
async def confirm_summary(text: str, ctx: Context[Any, Any]) -> str:
    """Ask the model, and then the person."""
    ask = ctx.session.create_message  # pyright: ignore[reportDeprecated]
    reply = await ask(question(text), max_tokens=50)
    assert isinstance(reply.content, TextContent)
    sure = await ctx.elicit("Is that sure?", Sure)
    again = await ask(question(reply.content.text), max_tokens=50)
    assert isinstance(again.content, TextContent)
    return f"{reply.content.text}, {sure.action}, {again.content.text}"


@server.tool()
async def play(ctx: Context[Any, Any]) -> str:
    """Send the model a sound."""
    sound = AudioContent(data="AAAA", mime_type="audio/wav")
    ask = ctx.session.create_message  # pyright: ignore[reportDeprecated]
    await ask([SamplingMessage(role="user", content=sound)], max_tokens=50)
    return "played"


async def sample(text: str) -> Sample:
    return Sample(question(text), max_tokens=50, system_prompt="Be short.")


@server.tool()
async def abstract(text: str, reply: Annotated[CreateMessageResult, Resolve(sample)]) -> str:
    """Summarize a text with the model of the client, before the call has an effect."""
    assert isinstance(reply.content, TextContent)
    return f"{reply.model}: {reply.content.text} ({reply.stop_reason})"


@server.tool()
async def sweep(rooms: int, ctx: Context[Any, Any]) -> str:
    """Sweep rooms, and say how far it is."""
    for room in range(1, rooms + 1):
        await ctx.report_progress(room, rooms, f"room {room}")
    return f"{rooms} rooms"


@server.tool()
def seen(ctx: Context[Any, Any]) -> str:
    """The header ``x-word`` of the request."""
    return str((ctx.headers or {}).get("x-word"))


@server.resource("note://today", title="Today", mime_type="text/plain")
def today() -> str:
    """The note of today."""
    return "buy <milk>"


@server.resource("note://picture", mime_type="image/png")
def picture() -> bytes:
    return b"\x89PNG\r\n\x1a\n"


@server.resource("note://{name}")
def note(name: str) -> str:
    """A note by its name."""
    return f"the note {name}"


@server.prompt(title="Review")
def review(code: str, style: str = "short") -> str:
    """A review of some code."""
    return f"Review this in a {style} way: {code}"


if __name__ == "__main__":
    if WHERE == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(WHERE))
