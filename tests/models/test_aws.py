"""``AwsAccount``: calls of Bedrock, which a server with AWS's rules accepts, and where its credentials come from."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import boto3
import openai
import openai.providers
import pytest

from agentfsm import Agent
from agentfsm.errors import ConfigurationError, MissingExtraError, ProviderError
from agentfsm.models import AwsAccount, HttpOptions, ModelSettings, resolve
from tests.helpers.cloud_server import ANSWER, REQUEST, Call, CloudServer, ask, cloud_server, signature_problem, weather

ID, SECRET, TOKEN = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "session-token-0123456789"
REGION = "eu-central-1"
CLAUDE, GPT = "eu.anthropic.claude-sonnet-4-5-20250929-v1:0", "openai.gpt-oss-20b-1:0"
ARN = "arn:aws:bedrock:eu-central-1:123456789012:application-inference-profile/anthropic.claude"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials in the environment, and none anywhere else."""
    for name in ("AWS_BEARER_TOKEN_BEDROCK", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    values = {"AWS_ACCESS_KEY_ID": ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}
    files = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials")}
    for name, value in {**values, **files, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bedrock(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudServer]:
    """A server in place of Bedrock, whose address is in the environment."""
    with cloud_server() as server:
        server.refuse = lambda call: signature_problem(call, {ID: SECRET}, REGION)
        monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_RUNTIME", server.url)
        yield server


def claude_of_anthropic(server: CloudServer, **more: str) -> anthropic.AnthropicBedrock:
    return anthropic.AnthropicBedrock(
        aws_region=REGION, aws_access_key=ID, aws_secret_key=SECRET, base_url=server.url, max_retries=0, **more
    )  # fmt: skip


# -- the same requests as the vendors' clients -----------------------------------------------------------------


def test_the_server_accepts_the_signatures_of_three_vendors_clients_and_no_wrong_one(bedrock: CloudServer) -> None:
    """What checks the other tests is itself checked."""
    boto3.client("bedrock-runtime", region_name=REGION).invoke_model(modelId=CLAUDE, body=b"{}")
    call: Any = claude_of_anthropic(bedrock).messages.create
    call(model=CLAUDE, max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
    provider = openai.providers.bedrock(
        region=REGION, access_key_id=ID, secret_access_key=SECRET, endpoint="runtime",
        base_url=f"{bedrock.url}/openai/v1",
    )  # fmt: skip
    chat: Any = openai.OpenAI(provider=provider, max_retries=0).chat.completions.create
    chat(model=GPT, messages=[{"role": "user", "content": "Hi"}])
    seen = bedrock.calls
    assert [signature_problem(each, {ID: SECRET}, REGION) for each in seen] == ["", "", ""]
    assert [signature_problem(each, {ID: "another"}, REGION) for each in seen] == ["the signature does not match"] * 3
    changed = Call(seen[0].path, seen[0].headers, b'{"more": 1}')
    assert signature_problem(changed, {ID: SECRET}, REGION) == "the signature does not match"


@pytest.mark.parametrize("model", [CLAUDE, ARN])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_requests_for_claude_equal_those_of_its_vendors_client(model: str, stream: bool, bedrock: CloudServer) -> None:
    ask(resolve(f"bedrock:{model}"), stream=stream)
    mine = bedrock.calls[-1]
    body = {name: value for name, value in mine.data.items() if name != "anthropic_version"}
    call: Any = claude_of_anthropic(bedrock).messages.create
    reply = call(model=model, stream=stream, **body)
    if stream:
        assert [event.type for event in reply][-1] == "message_stop"  # what the server streams is what Amazon streams
    theirs = bedrock.calls[-1]
    assert mine.path == theirs.path
    assert {**mine.data, "anthropic_version": ""} == {**theirs.data, "anthropic_version": ""}
    assert mine.data["anthropic_version"] == "bedrock-2023-05-31"  # the only one that Amazon documents
    assert _scope(mine) == _scope(theirs)


def test_features_of_a_header_are_sent_where_bedrock_reads_them(bedrock: CloudServer) -> None:
    """Where the vendor's client sends them, too."""
    headers = {"Anthropic-Beta": "token-efficient-tools-2025-02-19,context-1m-2025-08-07"}
    ask(resolve(f"bedrock:{CLAUDE}", http=HttpOptions(headers=headers)))
    mine = bedrock.calls[-1].data
    call: Any = claude_of_anthropic(bedrock).messages.create
    call(model=CLAUDE, max_tokens=9, messages=[{"role": "user", "content": "Hi"}], extra_headers=headers)
    theirs = bedrock.calls[-1].data
    expected = ["token-efficient-tools-2025-02-19", "context-1m-2025-08-07"]
    assert mine["anthropic_beta"] == theirs["anthropic_beta"] == expected


def test_another_version_of_the_api_can_be_asked_for(bedrock: CloudServer) -> None:
    """Such as the one that Anthropic's own client sends, which Amazon does not document."""
    ask(resolve(f"bedrock:{CLAUDE}", settings=ModelSettings(extra_body={"anthropic_version": "2026-10-21"})))
    assert bedrock.calls[-1].data["anthropic_version"] == "2026-10-21"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_requests_for_other_models_equal_those_of_openais_client(stream: bool, bedrock: CloudServer) -> None:
    ask(resolve(f"bedrock:{GPT}"), stream=stream)
    mine = bedrock.calls[-1]
    provider = openai.providers.bedrock(
        region=REGION, access_key_id=ID, secret_access_key=SECRET, endpoint="runtime",
        base_url=f"{bedrock.url}/openai/v1",
    )  # fmt: skip
    chat: Any = openai.OpenAI(provider=provider, max_retries=0).chat.completions.create
    chat(**mine.data)
    theirs = bedrock.calls[-1]
    assert (mine.path, mine.data, _scope(mine)) == (theirs.path, theirs.data, _scope(theirs))


def test_the_address_is_that_of_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    for region in ("us-east-1", "eu-central-1", "us-gov-west-1", "cn-north-1"):
        theirs = boto3.client("bedrock-runtime", region_name=region).meta.endpoint_url
        assert AwsAccount(region=region).base_url("") == theirs


def _scope(call: Call) -> list[str]:
    """The key and the scope of a signature, without the day."""
    parts = call.headers["authorization"].partition("Credential=")[2].partition(",")[0].split("/")
    return [parts[0], *parts[2:]]


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"bedrock:{CLAUDE}", f"bedrock:{GPT}"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_run_calls_a_tool_and_answers(name: str, stream: bool, bedrock: CloudServer) -> None:
    async def main() -> Any:
        run = Agent(name, tools=[weather]).run("What is the weather in Paris?")
        if stream:
            async for _ in run:
                pass
        return (await run).output

    assert asyncio.run(main()) == ANSWER
    assert len(bedrock.calls) == 2
    assert b"Paris: sunny" in bedrock.calls[1].body


@pytest.mark.parametrize(
    ("exception", "status"), [("throttlingException", 429), ("validationException", 400), ("newException", 500)]
)
def test_an_exception_in_a_stream_has_its_status(exception: str, status: int, bedrock: CloudServer) -> None:
    bedrock.exception = exception
    with pytest.raises(Exception, match="not now") as caught:
        ask(resolve(f"bedrock:{CLAUDE}"), stream=True)
    assert caught.value.status == status  # type: ignore[attr-defined]


def test_a_query_parameter_is_signed(bedrock: CloudServer) -> None:
    ask(resolve(f"bedrock:{GPT}", http=HttpOptions(query={"b": "x y", "a": "1/2"})))
    assert bedrock.calls[0].path.endswith("?b=x%20y&a=1%2F2")


# -- credentials -----------------------------------------------------------------------------------------------------


def test_a_session_token_is_sent_and_signed(bedrock: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    model: Any = resolve(f"bedrock:{GPT}")
    ask(model)
    assert bedrock.calls[0].headers["x-amz-security-token"] == TOKEN
    assert {each.get_secret_value() for each in model.secrets} == {SECRET, TOKEN}
    assert SECRET not in repr(model)


def test_a_profile_has_its_region_and_credentials(
    bedrock: CloudServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_REGION")
    (tmp_path / "config").write_text("[profile work]\nregion = us-west-2\n")
    (tmp_path / "credentials").write_text("[work]\naws_access_key_id = WORK\naws_secret_access_key = s3cret\n")
    bedrock.refuse = lambda call: signature_problem(call, {"WORK": "s3cret"}, "us-west-2")
    ask(resolve(f"bedrock:{GPT}", api_key=AwsAccount(profile="work")))


def test_an_address_in_code_gets_no_credentials_of_the_environment(bedrock: CloudServer) -> None:
    with pytest.raises(ProviderError, match="not signed"):
        ask(resolve(f"bedrock:{GPT}", base_url=bedrock.url))
    ask(resolve(f"bedrock:{GPT}", base_url=f"{bedrock.url}/openai/v1", api_key=AwsAccount()))


def test_a_bearer_token_comes_before_credentials(bedrock: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", "bearer-0123456789")
    assert f"https://bedrock-runtime.{REGION}.amazonaws.com'" in repr(resolve(f"bedrock:{CLAUDE}"))
    bedrock.refuse = lambda call: "" if call.headers.get("authorization") == "Bearer bearer-0123456789" else "no"
    ask(resolve(f"bedrock:{CLAUDE}", base_url=bedrock.url, api_key="bearer-0123456789"))


PROCESS = """
import json, pathlib
count = pathlib.Path(__file__).with_name("count")
n = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(n))
print(json.dumps({"Version": 1, "AccessKeyId": "ID%d" % n, "SecretAccessKey": "secret-%d" % n}))
"""


def _process_profile(folder: Path) -> AwsAccount:
    """A profile whose credentials come from a program, which has others each time that it is asked."""
    (folder / "process.py").write_text(PROCESS)
    command = shlex.join([sys.executable, str(folder / "process.py")])
    (folder / "config").write_text(f"[profile short]\ncredential_process = {command}\n")
    return AwsAccount(profile="short")


def test_expired_credentials_are_renewed_once_in_the_middle_of_a_run(bedrock: CloudServer, tmp_path: Path) -> None:
    def refuse(call: Call) -> str:
        valid = {"ID1": "secret-1"} if len(bedrock.calls) == 1 else {"ID2": "secret-2"}
        return signature_problem(call, valid, REGION) and "The security token included in the request is expired"

    bedrock.refuse = refuse
    result = Agent(resolve(f"bedrock:{CLAUDE}", api_key=_process_profile(tmp_path)), tools=[weather]).run_sync("Paris?")
    assert result.output == ANSWER
    assert [_scope(each)[0] for each in bedrock.calls] == ["ID1", "ID1", "ID2"]


def test_rejected_credentials_are_renewed_no_more_than_once(bedrock: CloudServer, tmp_path: Path) -> None:
    bedrock.refuse = lambda call: "User is not authorized to perform: bedrock:InvokeModel"
    with pytest.raises(ProviderError, match="the AWS credentials of profile 'short' have no permission") as caught:
        ask(resolve(f"bedrock:{GPT}", api_key=_process_profile(tmp_path)))
    assert caught.value.status == 403
    assert [_scope(each)[0] for each in bedrock.calls] == ["ID1", "ID2"]


def test_credentials_that_stay_the_same_are_not_tried_again(bedrock: CloudServer) -> None:
    bedrock.refuse = lambda call: "no"
    with pytest.raises(ProviderError, match="403"):
        ask(resolve(f"bedrock:{GPT}"))
    assert len(bedrock.calls) == 1


def test_credentials_of_a_boto3_session_are_used(bedrock: CloudServer) -> None:
    session = boto3.Session(aws_access_key_id="OWN", aws_secret_access_key="own-secret")
    bedrock.refuse = lambda call: signature_problem(call, {"OWN": "own-secret"}, REGION)
    ask(resolve(f"bedrock:{GPT}", api_key=AwsAccount(load=session.get_credentials)))


def test_many_calls_at_once_load_the_credentials_once(bedrock: CloudServer, tmp_path: Path) -> None:
    bedrock.refuse = lambda call: signature_problem(call, {"ID1": "secret-1"}, REGION)
    model: Any = resolve(f"bedrock:{GPT}", api_key=_process_profile(tmp_path))

    async def main() -> None:
        await asyncio.gather(*(model.reply(REQUEST) for _ in range(8)))

    asyncio.run(main())
    assert (tmp_path / "count").read_text() == "1"


# -- errors ----------------------------------------------------------------------------------------------------------


def test_a_missing_region_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(ConfigurationError, match=r"set AWS_REGION, or pass api_key=AwsAccount\(region="):
        resolve(f"bedrock:{CLAUDE}")


@pytest.mark.parametrize("region", ["Frankfurt", "eu-central-1.evil.example", "eu-central-1/"])
def test_what_is_no_region_is_no_part_of_an_address(region: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an AWS region"):
        resolve(f"bedrock:{CLAUDE}", api_key=AwsAccount(region=region))


def test_missing_credentials_are_a_provider_error_that_says_what_to_do(
    bedrock: CloudServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ProviderError, match=r"no AWS credentials were found: set .*AWS_PROFILE.*aws sso login"):
        ask(resolve(f"bedrock:{GPT}"))
    assert bedrock.calls == []


def test_a_profile_that_does_not_exist_is_named(bedrock: CloudServer) -> None:
    with pytest.raises(ProviderError, match="prod"):
        ask(resolve(f"bedrock:{GPT}", api_key=AwsAccount(profile="prod")))


def test_a_program_for_credentials_that_fails_is_an_error_without_its_words(
    bedrock: CloudServer, tmp_path: Path
) -> None:
    command = shlex.join([sys.executable, "-c", "raise SystemExit('secret words')"])
    (tmp_path / "config").write_text(f"[profile broken]\ncredential_process = {command}\n")
    with pytest.raises(ProviderError, match="cannot be loaded") as caught:
        ask(resolve(f"bedrock:{GPT}", api_key=AwsAccount(profile="broken")))
    assert "secret words" not in str(caught.value)


def test_without_its_packages_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfsm.models.aws.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"AWS_BEARER_TOKEN_BEDROCK.*agentfsm\[bedrock\]"):
        resolve(f"bedrock:{CLAUDE}")


def test_the_packages_are_imported_by_the_first_call() -> None:
    code = (
        "import os, sys; os.environ.update(AWS_REGION='eu-central-1'); from agentfsm.models import resolve; "
        f"resolve('bedrock:{CLAUDE}'); print([m for m in sys.modules if m.startswith(('boto', 'google.auth'))])"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
