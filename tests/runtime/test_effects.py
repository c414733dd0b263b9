"""The effect of each state, and how a reply is parsed."""

from __future__ import annotations

import datetime
import enum
import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field, field_validator

from agentfsm import (
    FailureKind,
    Handoff,
    RunWarning,
    observer,
    tool,
)
from agentfsm.loop.transition_table import LOOP
from agentfsm.runtime.effects import EFFECTS
from agentfsm.testing import call
from tests.helpers.scenarios import recovered_kinds, run_script_with_requests, transcript_of

K = FailureKind


def test_every_state_that_does_something_has_its_effect():
    assert set(EFFECTS) == {spec.effect for spec in LOOP.states if not (spec.waits or spec.final)}


# -- the reply: a structured answer -------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"


class Report(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    day: datetime.date
    color: Color = Color.RED
    tags: tuple[str, ...] = ()

    @computed_field
    @property
    def year(self) -> int:
        return self.day.year


GOOD_REPORT = '{"day": "2024-02-29", "tags": ["a"]}'
REPORT = Report(day=datetime.date(2024, 2, 29), tags=("a",))


@pytest.mark.parametrize("text", [GOOD_REPORT, f"```json\n{GOOD_REPORT}\n```", f"\n {GOOD_REPORT}"])
def test_a_structured_answer_is_a_value_of_the_agents_type(text):
    result, (request,) = run_script_with_requests(text, output_type=Report)
    assert result.output == REPORT
    assert request.output_schema == Report.model_json_schema()
    assert "JSON schema" in request.messages[0].content


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("The report follows.", "not valid JSON"),
        ('{"day": "yesterday"}', "day: "),
        ('{"day": "2024-02-29", "mood": 1}', "mood: "),
        ("{}", "day: field required"),
        ('{"day": "\ud800"}', "not valid JSON"),
    ],
)
def test_an_answer_that_does_not_fit_is_fed_back_and_corrected(text, wrong):
    result, requests = run_script_with_requests(text, GOOD_REPORT, output_type=Report)
    assert result.output == REPORT
    assert recovered_kinds(result) == ["output_malformed"]
    assert wrong in requests[1].messages[-1].content
    assert [text for _, text in transcript_of(result)][-2:] == [text, GOOD_REPORT]


def test_a_structured_answer_may_come_in_an_envelope():
    def envelope(content: str) -> str:
        return json.dumps({"kind": "final", "content": content})

    result, _ = run_script_with_requests(
        envelope("no report"), envelope(GOOD_REPORT), output_type=Report, preset="feedback"
    )
    assert result.output == REPORT
    assert recovered_kinds(result) == ["output_malformed"]


def test_an_answer_that_never_fits_is_handed_off():
    result, requests = run_script_with_requests(*["{}"] * 9, output_type=Report)
    assert isinstance(result.outcome, Handoff)
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("wanted", "text", "value"),
    [
        (int, "42", 42),
        (list[int], "[1, 2]", [1, 2]),
        (bool, "false", False),
        (int | None, "0", 0),
        (dict[str, int], "{}", {}),
    ],
)
def test_any_type_that_json_can_describe_will_do(wanted, text, value):
    result, _ = run_script_with_requests(text, output_type=wanted)
    assert result.output == value
    assert result.ok


def test_a_value_whose_json_hides_fields_is_still_complete():
    class Login(BaseModel):
        password: SecretStr
        alias: int = Field(alias="otherName", default=0)

    result, _ = run_script_with_requests('{"password": "hush", "otherName": 3}', output_type=Login)
    assert result.output.password.get_secret_value() == "hush"
    assert result.output.alias == 3


@pytest.mark.parametrize("preset", ["funnel", "breaker"])
def test_return_done_returns_a_structured_answer(preset):
    bad, good = {"day": "yesterday"}, {"day": "2024-02-29", "tags": ["a"]}
    result, _ = run_script_with_requests(
        call("return_done", output=bad), call("return_done", output=good), output_type=Report, preset=preset
    )
    assert result.output == REPORT
    assert recovered_kinds(result) == ["invalid_arguments"]


def test_a_tool_that_ends_the_run_must_return_the_output_type():
    values: list[Any] = ["no report", REPORT]

    @tool(ends_run=True)
    def report() -> Any:
        """Report."""
        return values.pop(0)

    result, _ = run_script_with_requests(call("report"), call("report"), output_type=dict[str, Any], tools=[report])
    assert result.output["day"] == "2024-02-29"
    assert recovered_kinds(result) == ["tool_error"]


class Faulty(BaseModel):
    """A type whose check has a fault: it raises what pydantic does not take for a finding."""

    size: str

    @field_validator("size")
    @classmethod
    def _known(cls, value: str) -> str:
        return {"small": "S"}[value]


def test_a_check_of_the_answer_that_raises_says_that_the_answer_does_not_fit():
    result, requests = run_script_with_requests('{"size": "huge"}', '{"size": "small"}', output_type=Faulty)
    assert result.output == Faulty(size="small")
    assert recovered_kinds(result) == ["output_malformed"]
    assert "KeyError: 'huge'" in requests[1].messages[-1].content


@pytest.mark.parametrize("together", [False, True])
def test_a_check_of_what_ends_the_run_that_raises_says_that_it_does_not_fit(together):
    @tool(ends_run=True, parallel=True)
    async def report(size: str) -> Any:
        """Report."""
        return {"size": size}

    wrong = [call("report", size="huge")] * (2 if together else 1)
    result, _ = run_script_with_requests(wrong, call("report", size="small"), output_type=Faulty, tools=[report])
    assert result.output == Faulty(size="small")
    assert recovered_kinds(result) == ["tool_error"]


def test_a_check_that_raises_only_at_the_end_leaves_the_answer_as_json():
    raised: list[str] = []

    class Moody(BaseModel):
        size: str

        @field_validator("size")
        @classmethod
        def _twice(cls, value: str) -> str:
            raised.append(value)
            if len(raised) > 1:
                raise KeyError(value)
            return value

    warned: list[str] = []
    watch = observer(lambda e: warned.append(e.text) if isinstance(e, RunWarning) else None)
    result, _ = run_script_with_requests('{"size": "S"}', output_type=Moody, hooks=[watch])
    assert result.output == {"size": "S"}
    assert result.ok
    (text,) = warned
    assert "the output is left as JSON" in text
    assert "KeyError: 'S'" in text
