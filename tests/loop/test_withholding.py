"""Secrets are found in every common form, replaced where they stand, and given back exactly."""

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfsm.errors import MissingExtraError
from agentfsm.loop import withholding
from agentfsm.loop.keys import Keyring
from agentfsm.loop.state import RunState
from agentfsm.loop.state_json import TEXT_FIELDS, dump_state
from agentfsm.loop.withholding import (
    SecretOpener,
    Withholder,
    contains_placeholder,
    environment_secrets,
    header_secrets,
    secret_values,
)

RING = Keyring(b"the host's secret")
SECRET = 'hunter22/"ü\n+x'
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\nEFAASCBKcwggSjAgEAAoIBAQ\n-----END PRIVATE KEY-----\n"


def cleaned(value, *secrets):
    return Withholder(RING.current, secrets).clean(value)


@pytest.mark.parametrize(
    "name", ["DB_PASS", "GITHUB_PAT", "API_KEY_PROD", "aws_secret_access_key", "DB_PASSWORD", "PGPASSWORD", "MY_PWD"]
)
def test_the_usual_names_of_secrets_are_known(name):
    assert environment_secrets({name: "s3cr3t-9f2c71ab"}) == ["s3cr3t-9f2c71ab"]


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("DATABASE_URL", "postgres://app:p4ss%2Fword9@db.example:5432/x", ["p4ss%2Fword9", "p4ss/word9"]),
        ("DEPLOY", PEM, [PEM]),
        ("SERVICE_CREDENTIALS", json.dumps({"private_key": PEM, "type": "service"}), [PEM]),
        ("SSH_AUTH_SOCK", "/tmp/ssh-XXXX9/agent.1", []),
        ("HOME", "/home/ann-1234", []),
        ("DATABASE_URL", "postgres://app:postgres@db.example/x", []),
    ],
)
def test_secrets_are_found_inside_values(name, value, found):
    secrets = environment_secrets({name: value})
    assert [secret for secret in secrets if secret != value or value == PEM] == found


@pytest.mark.parametrize("word", ["postgres", "assistant", "transition", "tool_result", "UserInputRequested", "1234"])
def test_a_word_in_the_environment_is_no_secret(word):
    assert environment_secrets({"DB_PASSWORD": word}) == []


def test_the_folder_of_the_shell_is_no_password() -> None:
    assert environment_secrets({"PWD": "/home/ann/shop-2", "OLDPWD": "/home/ann/shop-1"}) == []
    assert environment_secrets({"DB_PWD": "/home/ann/shop-2"}) == ["/home/ann/shop-2"]


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"https://x/?token={quote(SECRET, safe='')}&y",
        json.dumps({"a": SECRET}),
        json.dumps(json.dumps({"a": SECRET}, ensure_ascii=False)),
        repr({"a": SECRET}),
        SECRET.encode().hex(),
        "Basic " + base64.b64encode(f"user:{SECRET}".encode()).decode(),
        "Basic " + base64.b64encode(f"u:{SECRET}".encode()).decode(),
        base64.urlsafe_b64encode(SECRET.encode()).decode(),
    ],
)
def test_a_secret_is_found_in_every_common_form(text):
    found = cleaned(text, SECRET)
    assert contains_placeholder(found)
    for form in ("hunter22", "hunter2", b"hunter".hex(), base64.b64encode(b"hunt")[:4].decode()):
        assert form not in found
    assert SecretOpener(RING).open(found) == text


def test_each_line_of_a_private_key_is_secret():
    found = cleaned({"error": f"bad key: {PEM.splitlines()[1]}", "json": json.dumps({"key": PEM})}, PEM)
    assert "MIIE" not in json.dumps(found)
    assert "EFAA" not in json.dumps(found)


def test_a_short_secret_is_no_part_of_a_word():
    assert cleaned("pin pinned", "pin").endswith("] pinned")


def test_keys_names_and_ids_stay():
    state = dump_state(
        RunState("assistant", state="assistant", state_results={"assistant": {"assistant": "assistant"}})
    )
    found = Withholder(RING.current, ["assistant"]).clean_fields(state, TEXT_FIELDS)
    assert found.pop("notes") == {"assistant": {"assistant": cleaned("assistant", "assistant")}}
    del state["notes"]
    assert found == state


SCHEMA = {
    "$defs": {"Key": {"properties": {"k": {"writeOnly": True, "type": "string"}, "next": {"$ref": "#/$defs/Key"}}}},
    "properties": {
        "keys": {"items": {"anyOf": [{"$ref": "#/$defs/Key"}, {"type": "null"}]}},
        "by_name": {"additionalProperties": {"format": "password"}},
        "pair": {"prefixItems": [{}, {"format": "password"}]},
        "plain": {"type": "string"},
    },
}


def test_marked_values_are_found_inside_arguments():
    arguments = {
        "keys": [{"k": "a", "next": {"k": "b", "other": 1}}, None],
        "by_name": {"x": "c"},
        "pair": ["no", "d"],
        "plain": "no",
    }
    assert secret_values(arguments, frozenset(), SCHEMA) == ["a", "b", "c", "d"]


@settings(max_examples=150, deadline=None)
@given(
    secret=st.text(min_size=1, max_size=12),
    parts=st.lists(st.text(max_size=8) | st.none(), max_size=5),
    literal=st.booleans(),
)
def test_opening_gives_back_exactly_what_was_cleaned(secret, parts, literal):
    secret = secret.encode("utf-8", "replace").decode()
    withholder = Withholder(RING.current, [secret])
    text = "".join(secret if part is None else part for part in parts)
    if literal:
        text += withholder.placeholder_for("another") + f"[secret {'0' * 32}]"
    value = {"a": [text, 1, None, {secret: text}], "b": text}
    assert SecretOpener(RING).open(withholder.clean(value)) == value


def test_numbers_keep_their_type():
    withholder = Withholder(RING.current)
    withholder.add(471108150)
    found = withholder.clean({"pin": 471108150, "text": "it is 471108150", "list": [471108150.0, True]})
    assert "471108150" not in str(found["pin"]) + found["text"]
    assert SecretOpener(RING).open(found) == {"pin": 471108150, "text": "it is 471108150", "list": [471108150.0, True]}


def test_what_another_host_sealed_stays_sealed_and_an_old_secret_opens_it():
    found = cleaned("it is hunter22", "hunter22")
    assert SecretOpener(Keyring(b"another")).open(found) == found
    assert SecretOpener(Keyring(b"another", [b"the host's secret"])).open(found) == "it is hunter22"
    forged = found[:-4] + ("AAA]" if not found.endswith("AAA]") else "BBB]")
    assert SecretOpener(RING).open(forged) == forged


def test_equal_secrets_look_equal_and_do_not_tell_their_length():
    sealed = Withholder(RING.current).placeholder_for
    assert sealed("abc") == sealed("abc") != sealed("abd")
    assert len(sealed("a")) == len(sealed("a longer password"))


def test_without_the_package_nothing_is_kept_and_sealed_values_say_what_is_missing(monkeypatch):
    sealed = cleaned("it is hunter22", "hunter22")
    monkeypatch.setattr(withholding, "_cipher_class", lambda: None)
    found = cleaned("it is hunter22", "hunter22")
    assert found.startswith("it is [secret ")
    assert SecretOpener(RING).open(found) == found
    with pytest.raises(MissingExtraError, match=r"agentfsm\[sealing\]"):
        SecretOpener(RING).open(sealed)


@pytest.mark.parametrize(
    ("name", "value", "secrets"),
    [
        ("Authorization", "Bearer t0ken-4711-of-ann", ["Bearer t0ken-4711-of-ann", "t0ken-4711-of-ann"]),
        ("proxy-authorization", "Basic YW5uOnBhc3M=", ["Basic YW5uOnBhc3M=", "YW5uOnBhc3M="]),
        ("X-Api-Key", "k3y-4711-of-ann", ["k3y-4711-of-ann"]),
        ("Cookie", "session=4711abcdef", ["session=4711abcdef"]),
        ("X-Auth", "4711-of-ann", ["4711-of-ann"]),
        ("X-Key-Id", "4711-of-ann", []),  # names a key
        ("Accept", "application/json;q=0.9", []),
        ("Authorization", "none", []),  # a word
    ],
)
def test_credentials_in_headers_are_secret(name: str, value: str, secrets: list[str]) -> None:
    assert header_secrets({name: value}) == secrets
