"""Notices of what runs wait for: what they say, when they are sent, and that none is lost."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import sqlite3
import sys
from pathlib import Path
from typing import cast

import pytest

from agentfsm import (
    Actor,
    Agent,
    Allow,
    Approval,
    ConfigurationError,
    Host,
    MemoryStore,
    Runs,
    ask_user,
    open_store,
    tool,
)
from agentfsm.agent.config import with_host
from agentfsm.cli.app import run_app
from agentfsm.testing import FakeClock, ScriptedModel, call
from agentfsm.workers import Notice, NoticeError, Waker, Webhook, Worker, WorkerSettings, open_waker
from agentfsm.workers.notices import LOOK_AGAIN_S, NOTICES, Notices
from agentfsm.workers.waker import Activation
from tests.helpers.webhook_receiver import Receiver, receiving

sqlite_queue = pytest.mark.skipif(
    sys.version_info >= (3, 12) and sqlite3.sqlite_version_info < (3, 42), reason="DBOS needs SQLite 3.42 or newer"
)

SECRET = b"the secret of this process, long enough"
KEY = b"the key of the webhook, long enough"
PASSWORD = "hunter2-in-the-arguments"  # it is what must not be sent


class QueueWaker:
    """Queues activations as an engine does; the test says when they are delivered."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.queued: dict[str, tuple[float, Activation]] = {}

    async def due(self, *, prefix: str) -> dict[str, float]:
        return {key: due for key, (due, _) in self.queued.items() if key.startswith(prefix)}

    async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
        known = self.queued.get(activation.key)
        due = self.clock.time() + delay_s
        self.queued[activation.key] = (due if known is None else min(due, known[0]), activation)
        return known is None


class Scene:
    """A store with a run that waits for an approval, and what is sent about it."""

    def __init__(self, rule: Approval | bool = True, *, remind_after_s: float | None = None) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.waker = QueueWaker(self.clock)
        self.sent: list[Notice] = []
        self.failures: list[Exception] = []
        self.notices = Notices(
            self.store,
            cast("Waker", self.waker),
            self.send,
            remind_after_s=remind_after_s,
            viewer_url="https://agents.example.org/",
            now=self.clock.time,
        )

        @tool(requires_approval=rule)
        def pay(password: str) -> str:
            """Pay."""
            return "paid"

        host = Host(store=self.store, secret=SECRET, clock=self.clock)
        self.agent = Agent(ScriptedModel([call("pay", password=PASSWORD), "Done."]), tools=[pay], host=host)

    async def send(self, notice: Notice) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.sent.append(notice)

    async def ask(self) -> str:
        """A run that waits, of which a worker knows."""
        waiting = await self.agent.run("Pay it.", tags=["tenant:acme"])
        await self.begin(waiting.run_id)
        return waiting.run_id

    async def begin(self, run_id: str) -> None:
        head = await self.store.head(run_id)
        assert head is not None
        await self.notices.begin(head)

    async def deliver_due(self, *, dies: bool = False) -> list[str]:
        """What came of the activations that are due; a worker that dies finishes none of them."""
        words: list[str] = []
        for key, (due, activation) in sorted(self.waker.queued.items()):
            if due <= self.clock.time():
                words.append(await self.notices.deliver(activation))
                if not dies:
                    del self.waker.queued[key]
        return words

    def next_due_s(self) -> float:
        """Seconds until the next activation is due."""
        return min(due for due, _ in self.waker.queued.values()) - self.clock.time()


def test_a_notice_says_what_waits_for_whom_and_until_when_and_nothing_more() -> None:
    rule = Approval(n=2, roles=("manager",), validity_s=3600, escalate_to=("director",), escalate_after_s=600)

    async def scenario() -> None:
        scene = Scene(rule)
        asked_at = scene.clock.time()
        run_id = await scene.ask()
        request = (await Runs(scene.store).get(run_id)).request
        assert request is not None
        assert await scene.deliver_due() == ["sent"]
        (notice,) = scene.sent
        said = notice.to_json()
        assert PASSWORD not in json.dumps(said)
        del said["id"]
        assert said == {
            "type": "request.waiting",
            "run_id": run_id,
            "digest": request.digest,
            "kind": "approval",
            "tool": "pay",
            "roles": ("manager",),
            "missing": 2,
            "escalated": False,
            "asked_at": asked_at,
            "escalates_at": asked_at + 600,
            "expires_at": asked_at + 3600,
            "reminder": 0,
            "tags": ("tenant:acme",),
            "url": f"https://agents.example.org/inbox?run={run_id}",
        }

    asyncio.run(scenario())


def test_people_are_reminded_again_and_again_until_somebody_answers() -> None:
    async def scenario() -> None:
        scene = Scene(Approval(remind_after_s=60), remind_after_s=5)
        run_id = await scene.ask()
        words = await scene.deliver_due()
        for _ in range(2):
            assert scene.next_due_s() == 60  # its own time, not that of the worker
            scene.clock.advance(60)
            words += await scene.deliver_due()
        assert (words, [each.reminder for each in scene.sent]) == (["sent"] * 3, [0, 1, 2])
        assert len({each.id for each in scene.sent}) == 3
        assert scene.sent[1].to_json()["type"] == "request.reminder"
        scene.clock.advance(1000)  # no worker was up: one reminder, not one for each minute
        assert await scene.deliver_due() == ["sent"]
        assert scene.sent[-1].reminder == 3
        assert scene.next_due_s() == 1140 - 1120
        await scene.agent.resume(run_id, Allow())
        scene.clock.advance(60)
        assert await scene.deliver_due() == ["outdated"]
        assert scene.waker.queued == {}

    asyncio.run(scenario())


def test_a_request_without_reminders_is_sent_once_however_often_a_worker_sees_it() -> None:
    async def scenario() -> None:
        scene = Scene()
        run_id = await scene.ask()
        assert await scene.deliver_due() == ["sent"]
        for _ in range(3):
            await scene.begin(run_id)  # as by a worker that starts anew
            assert await scene.deliver_due() == []
        assert scene.next_due_s() == LOOK_AGAIN_S
        scene.clock.advance(LOOK_AGAIN_S)
        assert await scene.deliver_due() == ["not due"]
        assert len(scene.waker.queued) == len(scene.sent) == 1

    asyncio.run(scenario())


def test_a_worker_that_dies_at_any_point_loses_no_notice_and_repeats_it_under_the_same_id() -> None:
    async def scenario() -> None:
        scene = Scene(remind_after_s=60)
        await scene.ask()
        assert await scene.deliver_due(dies=True) == ["sent"]
        assert await scene.deliver_due() == ["sent"]
        assert len({each.id for each in scene.sent}) == 1
        assert scene.next_due_s() == 60
        assert len(scene.waker.queued) == 1

    asyncio.run(scenario())


def test_what_could_not_be_sent_is_sent_later_and_later_and_not_before_the_receiver_wishes() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.failures = [OSError("away"), OSError("away"), NoticeError("busy", 120), *[OSError()] * 9]
        await scene.ask()
        waits: list[float] = []
        while not scene.sent:
            assert len(await scene.deliver_due()) == 1
            waits.append(scene.next_due_s())
            scene.clock.advance(waits[-1])
        assert waits == [5, 10, 120, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600, LOOK_AGAIN_S]
        assert [each.reminder for each in scene.sent] == [0]

    asyncio.run(scenario())


@pytest.mark.parametrize("seconds", [0, -1, float("inf")])
def test_a_reminder_is_after_a_time(seconds: float) -> None:
    with pytest.raises(ConfigurationError):
        Approval(remind_after_s=seconds)
    with pytest.raises(ConfigurationError):
        Scene(remind_after_s=seconds)


def test_a_rule_without_reminders_is_written_as_it_was_before_there_were_any() -> None:
    async def scenario(rule: Approval) -> bool:
        scene = Scene(rule)
        waiting = await scene.agent.run("Pay it.")
        records = await scene.store.records(waiting.run_id)
        return any("remind_after_s" in record.body + record.hidden for record in records)

    assert not asyncio.run(scenario(Approval()))
    assert asyncio.run(scenario(Approval(remind_after_s=60)))


# -- the webhook ------------------------------------------------------------------------------------------


NOTICE = Notice("n1", "r1", "d1", "approval", "pay", ("manager",), 1, False, 1.0, None, 2.0, 0, (), "")


def test_a_webhook_gets_json_that_is_signed_as_standard_webhooks_are() -> None:
    with receiving() as receiver:
        asyncio.run(Webhook(receiver.url, secret=KEY, now=lambda: 1234.9)(NOTICE))
        asyncio.run(Webhook(receiver.url)(NOTICE))
    (headers, body), (unsigned, same_body) = receiver.got
    assert json.loads(body) == json.loads(json.dumps(NOTICE.to_json()))
    assert body == same_body
    assert (headers["webhook-id"], headers["webhook-timestamp"]) == ("n1", "1234")
    expected = base64.b64encode(hmac.new(KEY, b"n1.1234." + body, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert "webhook-signature" not in unsigned


@pytest.mark.parametrize(
    ("status", "headers", "wait"),
    [(500, {}, None), (404, {}, None), (307, {"location": "/"}, None), (429, {"retry-after": "90"}, 90)],
)
def test_anything_but_a_2xx_is_a_failure_with_the_wait_that_it_asks_for(
    status: int, headers: dict[str, str], wait: float | None
) -> None:
    with receiving() as receiver:
        receiver.answers = [(status, headers)]
        with pytest.raises(NoticeError, match=f"127.0.0.1 answered {status}") as raised:
            asyncio.run(Webhook(receiver.url)(NOTICE))
        assert raised.value.retry_after_s == wait
        assert len(receiver.got) == 1


def test_a_receiver_that_is_away_is_a_failure_that_names_no_key() -> None:
    with receiving() as receiver:
        pass
    webhook = Webhook(receiver.url)
    with pytest.raises(NoticeError, match="cannot be reached") as raised:
        asyncio.run(webhook(NOTICE))
    assert "abc" not in f"{raised.value}{webhook!r}"


def test_a_receiver_that_does_not_answer_in_time_is_said_to_be_slow_and_not_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        webhook = Webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_s=0.05)
        with pytest.raises(NoticeError, match=r"^127\.0\.0\.1 did not answer within 0\.05 s$"):
            asyncio.run(webhook(NOTICE))


def test_a_webhook_is_at_a_url_of_http_and_has_a_secret_worth_the_name() -> None:
    for url in ("", "ftp://example.org", "https://", "example.org/hook"):
        with pytest.raises(ConfigurationError):
            Webhook(url)
    with pytest.raises(ConfigurationError, match="24 bytes"):
        Webhook("https://example.org", secret=b"short")


# -- a worker ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@sqlite_queue
def test_a_worker_tells_of_what_its_runs_ask_and_of_what_other_programs_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dbos", reason="dbos is not installed")
    monkeypatch.setattr("agentfsm.workers.notices.FIRST_RETRY_S", 0.01)

    @tool(requires_approval=Approval(roles=("manager",)))
    def refund(order: int) -> str:
        """Refund an order."""
        return "refunded"

    clerk = Agent(ScriptedModel([call("refund", order=7), "Done."]), tools=[refund])
    other = Agent(ScriptedModel([call("ask_user", question="Which order?")]), tools=[ask_user])

    async def scenario(receiver: Receiver) -> None:
        receiver.answers = [(503, {})] * 2
        async with open_store(tmp_path / "runs.db") as store:
            mine = other.with_config(with_host(other.config, Host(store=store, secret=SECRET)))
            elsewhere = (await mine.run("Refund something.")).run_id
        file = tmp_path / "runs.db"
        waker = open_waker(file)
        async with open_store(file) as store:
            runs = Runs(store, secret=SECRET, waker=waker)
            settings = WorkerSettings(notify=Webhook(receiver.url, secret=KEY))
            worker = Worker({"clerk": clerk}, store, waker, secret=SECRET, settings=settings)
            working = asyncio.create_task(worker.run())
            try:
                run_id = await runs.submit("clerk", "Refund order 7.")

                def told() -> set[str]:
                    return {json.loads(body)["run_id"] for _, body in receiver.got[2:]}

                async with asyncio.timeout(60):
                    while told() != {run_id, elsewhere}:
                        await asyncio.sleep(0.02)
                by_id = {headers["webhook-id"]: json.loads(body)["run_id"] for headers, body in receiver.got}
                assert sorted(by_id.values()) == sorted([run_id, elsewhere])  # sent again, it had the same id
                await runs.answer(run_id, Allow(), by=Actor("eve", ("manager",)))
                async with asyncio.timeout(60):
                    while (await runs.get(run_id)).info.status != "finished":
                        await asyncio.sleep(0.02)
                assert NOTICES in worker.queues
            finally:
                worker.stop()
                await working
                await waker.aclose()

    with receiving() as receiver:
        asyncio.run(scenario(receiver))


def test_options_about_notices_need_a_place_for_them() -> None:
    with pytest.raises(ConfigurationError, match="notify="):
        WorkerSettings(remind_after_s=60)
    with pytest.raises(ConfigurationError, match="notify="):
        WorkerSettings(viewer_url="https://agents.example.org/")


@sqlite_queue
def test_the_command_line_refuses_a_webhook_that_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFSM_NOTIFY_SECRET", "short")
    command = ["worker", "tests.helpers.worker_app:support", "--store", str(tmp_path / "runs.db")]
    assert run_app([*command, "--notify-url", "https://example.org/hook"]) == 2
    assert "24 bytes" in capsys.readouterr().err
    assert run_app([*command, "--viewer-url", "https://example.org/"]) == 2
    assert "notify" in capsys.readouterr().err
