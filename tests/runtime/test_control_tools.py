"""The tools by which a model asks, finishes or gives up: what they take, and that any preset may have them."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from agentfsm import (
    Agent,
    Behavior,
    ConfigurationError,
    Handoff,
    Host,
    MemoryStore,
    Preset,
    RunCompleted,
    UserInputRequested,
    ask_user,
    return_done,
    return_unable,
)
from agentfsm.journal.verification import verify_stored_run
from agentfsm.loop.presets import PRESETS
from agentfsm.runtime.control_tools import control_tools
from agentfsm.runtime.tools import problems
from agentfsm.testing import RecordingModel, ScriptedModel, call


class Place(BaseModel):
    city: str
    zip: int | None = None


def test_the_control_tools_are_three():
    found = control_tools()
    assert {name: t.control for name, t in found.items()} == {
        "ask_user": "ask", "return_done": "done", "return_unable": "unable",
    }  # fmt: skip
    assert all(t.spec.description and not inspect.iscoroutinefunction(t.function) for t in found.values())
    assert found["ask_user"].spec.parameters["required"] == ["question"]
    assert found["return_done"].spec.parameters["properties"]["output"]["type"] == "string"
    assert found["return_unable"].spec.parameters["required"] == ["rationale"]


def test_return_done_takes_the_agents_output_type():
    done = control_tools(Place)["return_done"]
    assert "Place" in str(done.spec.parameters)
    assert done.arguments({"output": {"city": "Rome"}}) == {"output": Place(city="Rome")}
    with pytest.raises(ValidationError):
        done.arguments({"output": "Rome"})


@pytest.mark.parametrize("blank", ["", " \n\t"])
@pytest.mark.parametrize(
    ("name", "argument"), [("ask_user", "question"), ("return_done", "output"), ("return_unable", "rationale")]
)
def test_a_control_tool_that_says_nothing_is_refused(name, argument, blank):
    found = control_tools()[name]
    assert found.arguments({argument: "words"})
    with pytest.raises(ValidationError) as refused:
        found.arguments({argument: blank})
    assert problems(refused.value) == [f"{argument}: value error, must not be blank"]


@pytest.mark.parametrize(
    ("output_type", "value", "made"),
    [(None, "all", "all"), (str, "all", "all"), (Place, {"city": "Rome"}, Place(city="Rome"))],
)
def test_the_argument_of_return_done_may_also_be_called_summary(output_type, value, made):
    done = control_tools(output_type)["return_done"]
    assert done.arguments({"summary": value}) == done.arguments({"output": value}) == {"output": made}
    assert list(done.spec.parameters["properties"]) == ["output"]  # the model is told one name
    with pytest.raises(ValidationError):
        done.arguments({"output": value, "summary": value})


# -- in tools= ----------------------------------------------------------------------------------------

NATIVE = [name for name in PRESETS if name != "feedback"]


def envelope(tool: str, **arguments: Any) -> str:
    return json.dumps({"kind": "tool_call", "tool_name": tool, "arguments": arguments})


@pytest.mark.parametrize("preset", NATIVE)
def test_every_preset_may_ask_with_ask_user_in_tools_and_gets_the_answer_as_its_result(preset):
    last: Any = "Blue it is." if PRESETS[preset].behavior.text_is_answer else call("return_done", output="Blue it is.")
    model = RecordingModel(ScriptedModel([call("ask_user", question="Which colour?", choices=["red", "blue"]), last]))
    host = Host(store=MemoryStore(), secret=b"secret")
    agent = Agent(model, tools=[ask_user], preset=preset, host=host)
    waiting = agent.run_sync("Paint it.")
    asked = waiting.outcome
    assert isinstance(asked, UserInputRequested)
    assert (asked.kind, asked.question, asked.choices) == ("question", "Which colour?", ("red", "blue"))
    result = agent.resume_sync(asked.run_id, "blue")
    assert result.output == "Blue it is."
    assert [(m.role, m.content) for m in model.requests[1].messages][-1] == ("tool", "blue")


def test_ask_user_works_in_envelopes_too():
    script = [
        envelope("ask_user", question="Which colour?"),
        json.dumps({"kind": "final", "content": "Blue it is."}),
    ]
    agent = Agent(ScriptedModel(script), tools=[ask_user], preset="feedback", host=Host(secret=b"secret"))
    waiting = agent.run_sync("Paint it.")
    assert isinstance(waiting.outcome, UserInputRequested)
    assert "ask_user" in agent.instructions
    assert agent.resume_sync(waiting.outcome.suspension_record, "blue").output == "Blue it is."


@pytest.mark.parametrize("preset", ["standard", "strict"])
def test_text_stays_an_answer_where_the_preset_says_so(preset):
    tools = [ask_user, return_done, return_unable]
    assert Agent(ScriptedModel(["Hello."]), tools=tools, preset=preset).run_sync("Hi.").output == "Hello."
    done = Agent(ScriptedModel([call("return_done", output="Hello.")]), tools=tools, preset=preset).run_sync("Hi.")
    assert isinstance(done.outcome, RunCompleted)
    assert done.output == "Hello."
    script = [call("return_unable", rationale="no key", blockers=["locked"])]
    given_up = Agent(ScriptedModel(script), tools=tools, preset=preset).run_sync("Open it.").outcome
    assert isinstance(given_up, Handoff)
    assert (given_up.rationale, given_up.blockers) == ("no key", ("locked",))


@pytest.mark.parametrize("preset", ["funnel", "breaker"])
def test_a_preset_that_has_them_takes_them_again_and_is_the_same_agent(preset):
    plain = Agent(ScriptedModel(), preset=preset)
    same = Agent(ScriptedModel(), tools=[return_done, ask_user], preset=preset)
    assert same.config.tools == plain.config.tools


def test_return_done_in_tools_has_the_output_type_of_the_agent():
    script = [call("return_done", output={"city": 7}), call("return_done", output={"city": "Rome"})]
    result = Agent(ScriptedModel(script), tools=[return_done], output_type=Place).run_sync("Where?")
    assert result.output == Place(city="Rome")
    text = Agent(ScriptedModel(['{"city": "Rome"}']), tools=[return_done], output_type=Place).run_sync("Where?")
    assert text.output == Place(city="Rome")


@pytest.mark.parametrize(
    ("tools", "ends"),
    [([], False), ([ask_user], False), ([return_done], True), ([return_unable], True), ([ask_user, return_done], True)],
)
def test_an_agent_that_could_not_end_is_refused_when_it_is_built(tools, ends):
    silent = Preset("silent", Behavior(text_is_answer=False))
    if ends:
        assert Agent(ScriptedModel(), tools=tools, preset=silent)
        return
    with pytest.raises(ConfigurationError, match=r"no reply could end a run.*no tool ends one\. Add return_done"):
        Agent(ScriptedModel(), tools=tools, preset=silent)


def test_a_run_that_asked_can_be_verified_and_proofs_know_that_it_asks():
    store = MemoryStore()
    agent = Agent(
        ScriptedModel([call("ask_user", question="Which?"), "Done."]),
        tools=[ask_user],
        host=Host(store=store, secret=b"secret", monitor="raise"),
    )
    waiting = agent.run_sync("Do it.")
    assert agent.resume_sync(waiting.outcome.run_id, "that one").output == "Done."
    report = asyncio.run(verify_stored_run(store, waiting.outcome.run_id, keyring=agent.config.host.keyring))
    assert (report.code, report.reason) == (0, "")
