"""A web app: start runs, follow their events, and answer approvals in a browser, also after a restart.

Shows: server-sent events, a page that answers for a person, replies bound to what the person saw, answers that are
given elsewhere (``agentfsm answer RUN allow --store desk.db``), runs that go on after the process was killed.

    pip install 'starlette' 'uvicorn'
    uvicorn web_app:app          # then open http://127.0.0.1:8000

The model is a stand-in that wants to refund every order, so no API key is needed.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.routing import Route

from agentfsm import (
    Agent,
    Allow,
    Deny,
    Event,
    Host,
    Message,
    ModelRequest,
    Reply,
    Run,
    RunEndedError,
    RunError,
    RunQuery,
    Runs,
    StaleLease,
    SuspensionRecordError,
    ToolCall,
    UnknownRunError,
    hand_over,
    open_store,
    tool,
)

PAGE = """<!doctype html><meta charset="utf-8"><title>Help desk</title>
<h1>Help desk</h1>
<form id="ask"><label>Order <input name="order" required></label> <button>Ask for a refund</button></form>
<h2>Waiting for you</h2><ul id="waiting"></ul><h2>Events</h2><pre id="events"></pre>
<script type="module">
const post = (url, body) => fetch(url, {method: "POST", body: JSON.stringify(body)});
const list = document.querySelector("#waiting"), log = document.querySelector("#events");
async function refresh() {
  const waiting = await (await fetch("/waiting")).json();
  list.replaceChildren(...waiting.map(each => {
    const item = document.createElement("li");
    item.textContent = `${each.tool} ${JSON.stringify(each.arguments)} `;
    for (const decision of ["allow", "deny"]) {
      const button = document.createElement("button");
      button.textContent = decision;
      button.onclick = async () => {
        const answer = await post(`/runs/${each.run_id}/reply`, {decision, digest: each.digest});
        if (!answer.ok) alert((await answer.json()).error);
        refresh();
      };
      item.append(button);
    }
    return item;
  }));
}
document.querySelector("#ask").onsubmit = event => {
  event.preventDefault();
  post("/runs", {prompt: `Refund order ${event.target.order.value}.`});
};
new EventSource("/events").onmessage = message => {
  log.textContent += message.data + "\\n";
  refresh();
};
refresh();
</script>"""


@tool(requires_approval=True, idempotent=True)
def refund(order: str) -> str:
    """Refund an order."""
    return f"refunded {order}"


class StandIn:
    """Plays the model: it calls ``refund``, then says so."""

    name = "stand-in"

    async def reply(self, request: ModelRequest) -> Reply:
        """One reply."""
        last = request.messages[-1]
        if last.role == "tool":
            return Reply(Message.assistant("Done: " + last.content))
        order = last.content.removeprefix("Refund order ").rstrip(".")
        return Reply(Message.assistant("", tool_calls=(ToolCall("1", "refund", {"order": order}),)))


class Desk:
    """The agent, its store, and what the pages follow."""

    def __init__(self, url: str, secret: bytes) -> None:
        self.store = open_store(url)
        self.runs = Runs(self.store, secret=secret)
        self.agent = Agent(StandIn(), tools=[refund], host=Host(store=self.store, secret=secret))
        self.followers: set[asyncio.Queue[Event]] = set()
        self.running: dict[asyncio.Task[None], Run] = {}
        self.listening: asyncio.Task[None]

    async def start(self, run: Run) -> None:
        """Start or resume a run; returns at its first event, and the run goes on beside it.

        Raises what keeps the run from starting, such as a reply that comes too late.
        """
        events = aiter(run)
        self.publish(await anext(events))
        task = asyncio.create_task(self._follow(events))
        self.running[task] = run
        task.add_done_callback(self.running.pop)

    async def _follow(self, events: AsyncIterator[Event]) -> None:
        async for event in events:
            self.publish(event)

    async def listen(self) -> None:
        """Continue runs that are answered or cancelled elsewhere, as with ``agentfsm answer``."""
        async for run_id in self.store.signals.listen():
            with suppress(StaleLease):  # it was answered on the page at the same moment
                if run := await self.agent.next_run(run_id):
                    await self.start(run)

    def publish(self, event: Event) -> None:
        """Hand an event to every page that is open."""
        for queue in self.followers:
            queue.put_nowait(event)

    async def open(self) -> None:
        """Continue what the last process was in the middle of, and listen for answers from elsewhere."""
        for run in await self.agent.unfinished_runs():
            await self.start(run)
        self.listening = asyncio.create_task(self.listen())

    async def close(self) -> None:
        """Hand all runs over where they are; the next start continues them."""
        self.listening.cancel()
        await asyncio.wait({self.listening})
        tasks = list(self.running)
        for run in list(self.running.values()):
            await hand_over(run)  # a task that is cancelled while it follows a run would end the run as cancelled
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.store.aclose()


def make_app(url: str, secret: bytes) -> Starlette:
    """The app on a store.

    Args:
        url: The store, as ``open_store`` takes it.
        secret: What seals its journals.
    """
    desk = Desk(url, secret)

    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(PAGE)

    async def create(request: Request) -> JSONResponse:
        run = desk.agent.run(str((await request.json())["prompt"]))
        await desk.start(run)
        return JSONResponse({"run_id": run.run_id}, status_code=202)

    async def waiting(request: Request) -> JSONResponse:
        found = desk.runs.iterate(RunQuery(status="suspended", parent=""))  # not what sub-agents ask their callers for
        requests = [await desk.runs.request(info.run_id) async for info in found]
        shown: list[dict[str, Any]] = [
            {"run_id": each.run_id, "tool": each.tool, "arguments": dict(each.arguments), "digest": each.digest}
            for each in requests
            if each is not None
        ]
        return JSONResponse(shown)

    async def reply(request: Request) -> JSONResponse:
        body = await request.json()
        decision = Allow() if body["decision"] == "allow" else Deny("denied at the desk")
        run_id = request.path_params["run_id"]
        try:
            await desk.start(desk.agent.resume(run_id, decision, to=body["digest"], by="the desk"))
        except UnknownRunError as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        except RunEndedError as error:
            return JSONResponse({"error": str(error)}, status_code=410)
        except (SuspensionRecordError, RunError, StaleLease) as error:  # somebody else was faster
            return JSONResponse({"error": str(error)}, status_code=409)
        return JSONResponse({"run_id": run_id})

    async def events(request: Request) -> StreamingResponse:
        queue: asyncio.Queue[Event] = asyncio.Queue()

        async def lines() -> AsyncIterator[str]:
            desk.followers.add(queue)
            try:
                while True:
                    event = await queue.get()
                    yield f"id: {event.run_id}-{event.seq}\ndata: {json.dumps(event.to_dict())}\n\n"
            finally:
                desk.followers.discard(queue)

        return StreamingResponse(lines(), media_type="text/event-stream")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        await desk.open()
        yield
        await desk.close()

    routes = [
        Route("/", page),
        Route("/events", events),
        Route("/runs", create, methods=["POST"]),
        Route("/runs/{run_id}/reply", reply, methods=["POST"]),
        Route("/waiting", waiting),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


app = make_app(os.environ.get("DESK_STORE", "sqlite:///desk.db"), os.environ.get("DESK_SECRET", "change me").encode())
