"""Suspension records: signed, and refused if changed or expired."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.errors import (
    BlankHumanReplyError,
    HumanReplyError,
    SuspensionExpiredError,
    SuspensionFormatError,
    SuspensionGraphError,
    SuspensionRecordError,
    SuspensionTamperedError,
)
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.loop.messages import Message
from agentfsm.loop.state import RunState
from agentfsm.loop.suspension import RECORD_VERSION, SuspensionRecord, check_human_reply, open_record, sign_record
from tests.helpers.scenarios import make_run

SECRET, GRAPH, NOW = b"secret", "f" * 64, 1000.0
KEYRING = Keyring(SECRET)
WAITING = PendingRequest(
    "approval", "May it?", "a context", ("yes", "no"), call_id="1", tool="pay", arguments={"amount": 3},
    failure_kind=FailureKind.ambiguous_input,
)  # fmt: skip


def a_record(**fields: Any) -> SuspensionRecord:
    run = make_run("suspended", **{"pending_request": WAITING, "messages": [Message.user("hi")], **fields})
    return sign_record(run, graph=GRAPH, keyring=KEYRING, record_id="rid", created_at=NOW)


def opened(record: SuspensionRecord, **more: Any) -> RunState:
    return open_record(record, **{"graph": GRAPH, "keyring": KEYRING, "secrets": (SECRET,), "now": NOW, **more})


# -- good records -------------------------------------------------------------------------------------


def test_a_record_contains_the_request():
    record = a_record()
    assert (record.version, record.record_id, record.run_id, record.kind) == (RECORD_VERSION, "rid", "run", "approval")
    assert (record.question, record.context, record.choices) == ("May it?", "a context", ("yes", "no"))
    assert (record.tool, record.arguments) == ("pay", {"amount": 3})
    assert record.originating_failure_kind is FailureKind.ambiguous_input
    assert (record.created_at, record.expires_at) == (NOW, NOW + 24 * 60 * 60)
    assert record.graph == GRAPH


def test_a_run_comes_back_as_it_was_from_json_too():
    run = make_run("suspended", pending_request=WAITING, messages=[Message.user("hi")], counters={"steps": 3})
    record = sign_record(run, graph=GRAPH, keyring=KEYRING, record_id="rid", created_at=NOW)
    assert opened(record) == run
    text = record.to_json()
    assert SuspensionRecord.from_json(text) == record
    assert opened(SuspensionRecord.from_json(text)) == run
    assert opened(SuspensionRecord.from_json(text.encode())) == run
    assert opened(SuspensionRecord.from_json(json.dumps(json.loads(text), indent=2))) == run


def test_the_signature_is_the_hmac_of_the_canonical_json_of_the_rest():
    """By hand, so that another program can check a record."""
    fields = json.loads(a_record().to_json())
    signature = fields.pop("signature")
    signed = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    extracted = hmac.digest(b"agentfsm", SECRET, "sha256")  # HKDF, RFC 5869
    key = hmac.digest(extracted, b"suspension record\1", "sha256")
    assert hmac.new(key, signed.encode(), hashlib.sha256).hexdigest() == signature
    assert fields["key_id"] == hmac.digest(extracted, b"key id\1", "sha256")[:4].hex()


def test_the_record_does_not_contain_the_secret():
    assert "secret" not in a_record().to_json()


def test_opening_a_record_changes_nothing():
    record = a_record()
    text = record.to_json()
    opened(record).messages.append(Message.user("x"))
    assert record.to_json() == text
    assert opened(record).messages == [Message.user("hi")]


def test_a_run_that_waits_for_nothing_has_no_record():
    with pytest.raises(ValueError, match="waits for nothing"):
        a_record(pending_request=None)


TEXTS = st.text() | st.sampled_from(["\ud800", "a\udfff"])


@given(TEXTS, TEXTS, st.dictionaries(TEXTS, st.floats() | TEXTS, max_size=2))
def test_whatever_a_model_asks_the_record_makes_the_trip(question, context, arguments):
    record = a_record(pending_request=PendingRequest("question", question, context, (question,), arguments=arguments))
    text = record.to_json().encode()
    assert opened(SuspensionRecord.from_json(text)).pending_request.kind == "question"


# -- records that are not good ------------------------------------------------------------------------


OTHER: dict[str, Any] = {
    "record_id": "another",
    "run_id": "another",
    "kind": "question",
    "question": "May it not?",
    "context": "",
    "choices": ["yes"],
    "tool": "steal",
    "arguments": {"amount": 4},
    "originating_failure_kind": None,
    "created_at": NOW + 1,
    "expires_at": NOW + 10**9,
    "graph": "e" * 64,
    "state": {},
    "key_id": "00000000",
    "registry": "another",
    "signature": "0" * 64,
}


def test_every_field_is_tried():
    assert set(OTHER) | {"version"} == set(SuspensionRecord.model_fields)


@pytest.mark.parametrize("name", OTHER)
def test_a_record_in_which_any_one_field_was_changed_is_refused(name):
    data = json.loads(a_record().to_json())
    assert data[name] != OTHER[name]
    changed = SuspensionRecord.from_json(json.dumps({**data, name: OTHER[name]}))
    with pytest.raises(SuspensionTamperedError):
        opened(changed)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the leaves of some JSON are."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [p for key, inner in items for p in paths(inner, (*at, key))]
    return below or [at]


def test_anything_changed_deep_in_the_state_is_refused():
    data = json.loads(a_record().to_json())["state"]
    for path in paths(data):
        copy = json.loads(json.dumps(data))
        place = copy
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = "changed" if place[path[-1]] != "changed" else "again"
        with pytest.raises(SuspensionTamperedError):
            opened(a_record().model_copy(update={"state": copy}))


def test_another_secret_does_not_open_it():
    with pytest.raises(SuspensionTamperedError, match="secret"):
        opened(a_record(), keyring=Keyring(b"another"))


def test_a_record_outlives_its_secret_while_the_host_has_it_as_an_old_one():
    record = a_record()
    rotated = Keyring(b"new", [b"between", SECRET])
    assert opened(record, keyring=rotated).pending_request == WAITING
    with pytest.raises(SuspensionTamperedError, match=rf"{record.key_id}.*old_secrets"):
        opened(record, keyring=Keyring(b"new", [b"between"]))
    forged = record.model_copy(update={"key_id": rotated.current.key_id})
    with pytest.raises(SuspensionTamperedError):
        opened(forged, keyring=rotated)


def test_a_record_of_version_1_may_be_signed_with_an_old_secret_and_no_new_one_with_a_secret_itself():
    fields = json.loads(a_record().to_json())
    del fields["signature"]

    def signed(**change: Any) -> SuspensionRecord:
        data = {**fields, **change}
        data = {name: value for name, value in data.items() if value is not None or name not in ("registry", "key_id")}
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        signature = hmac.new(SECRET, text.encode(), "sha256").hexdigest()
        return SuspensionRecord.model_validate({**data, "signature": signature})

    old = signed(version=1, registry=None, key_id=None)
    assert opened(old, secrets=(b"new", SECRET)).pending_request == WAITING
    for record, secrets in (old, (b"new",)), (signed(), (SECRET,)):
        with pytest.raises(SuspensionTamperedError):
            opened(record, secrets=secrets)


def test_a_record_of_another_version_is_refused_with_both_named():
    with pytest.raises(SuspensionFormatError, match=r"version 3.*versions 1 to 2"):
        opened(a_record().model_copy(update={"version": 3}))


def test_a_record_of_version_1_is_read_and_cannot_be_given_the_fields_of_version_2():
    fields = json.loads(a_record().to_json()) | {"version": 1}
    del fields["registry"], fields["key_id"], fields["signature"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    fields["signature"] = hmac.new(SECRET, text.encode(), hashlib.sha256).hexdigest()
    old = SuspensionRecord.from_json(json.dumps(fields))
    assert opened(old).pending_request == WAITING
    assert json.loads(old.to_json()) == fields
    with pytest.raises(SuspensionTamperedError):
        opened(SuspensionRecord.from_json(json.dumps({**fields, "registry": "here"})))


def test_a_record_of_another_graph_is_refused_with_both_named():
    with pytest.raises(SuspensionGraphError, match=r"ffffffffffff.*eeeeeeeeeeee"):
        opened(a_record(), graph="e" * 64)


def test_a_record_is_good_until_the_moment_it_expires():
    record = a_record()
    assert opened(record, now=record.expires_at).run_id == "run"
    with pytest.raises(SuspensionExpiredError, match="5 s ago"):
        opened(record, now=record.expires_at + 5)
    assert opened(record, now=record.expires_at + 5, allow_expired=True).run_id == "run"


def test_how_long_a_record_is_good_is_a_guardrail():
    assert a_record(limits={"validity_s": 60}).expires_at == NOW + 60


def test_a_good_signature_over_what_is_no_state_is_refused_in_order():
    """Such a record can only come from another release with the same secret."""
    record = a_record().model_copy(update={"state": {"run_id": 3}})
    fields = {k: v for k, v in record.model_dump(mode="json").items() if k != "signature"}
    signed = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    key = KEYRING.current.key(KeyPurpose.suspension)
    signature = hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()
    with pytest.raises(SuspensionFormatError, match="run_id"):
        opened(record.model_copy(update={"signature": signature}))


GOOD = json.loads(a_record().to_json())


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "the text"),
        ("hello", "the text"),
        ("[]", "the text"),
        ("{}", "version"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "state"}), "state"),
        (json.dumps({**GOOD, "more": 1}), "more"),
        (json.dumps({**GOOD, "created_at": "soon"}), "created_at"),
        (json.dumps({**GOOD, "originating_failure_kind": "bad_luck"}), "originating_failure_kind"),
        (b"\xff\xfe", "the text"),
    ],
)
def test_what_is_no_record_is_refused_and_says_where(text, where):
    with pytest.raises(SuspensionFormatError, match=where) as caught:
        SuspensionRecord.from_json(text)
    assert isinstance(caught.value, SuspensionRecordError)


# -- replies ------------------------------------------------------------------------------------------

KINDS = {
    "question": {"text"},
    "limit": {"text"},
    "approval": {"allow", "deny", "edit"},
    "in_doubt": {"ran", "did_not_run", "give_up"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reply", sorted(set().union(*KINDS.values())))
def test_a_reply_fits_what_the_run_waits_for(kind, reply):
    if reply in KINDS[kind]:
        check_human_reply(kind, HumanReply(reply, "x"))
    else:
        with pytest.raises(HumanReplyError, match=kind):
            check_human_reply(kind, HumanReply(reply, "x"))


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_blank_reply_is_refused(kind, text):
    with pytest.raises(BlankHumanReplyError):
        check_human_reply(kind, HumanReply("text", text))


def test_a_denial_needs_no_reason():
    check_human_reply("approval", HumanReply("deny", ""))
