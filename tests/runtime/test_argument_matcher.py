"""What a condition on arguments says about a call: it holds, does not hold, or cannot be evaluated.

The verdicts of the table are written by hand from docs/approvals.md. A plain reference, which shares no code with the
library, is checked against the same table and then compared with the library on random conditions and calls.
"""

from __future__ import annotations

import json
import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr, ValidationError

from agentfsm import ArgumentMatcher, ConfigurationError, deny, permissions
from agentfsm.runtime.argument_matcher import (
    UNREADABLE,
    parse_path,
    path_text,
    readable_value,
)
from agentfsm.runtime.permissions import PermissionRule

NAN, INF = math.nan, math.inf
FULL_WIDTH_RM = "\uff52\uff4d -r x"
ZERO_WIDTH_RM = "r\u200bm -r x"
CYRILLIC_EVE = "\u0435ve"
NFC_CAFE, NFD_CAFE = "caf\u00e9", "cafe\u0301"


def read_cases() -> list[tuple[dict[str, Any], dict[str, Any], bool | None]]:
    """The conditions, arguments and verdicts of the table."""
    lines = Path(__file__).with_name("permission_cases.txt").read_text(encoding="utf-8").splitlines()
    parts = [
        re.fullmatch(r"(holds|does not|unknown) +(\{.*\})  <-  (\{.*\})", line) for line in lines if line[:1].isalpha()
    ]
    meaning = {"holds": True, "does not": False, "unknown": None}
    return [(json.loads(p[2]), json.loads(p[3]), meaning[p[1]]) for p in parts if p is not None]


CASES = read_cases()


def rule(action: Any, where: dict[Any, Any]) -> PermissionRule:
    return PermissionRule.model_validate({"action": action, "tool": "t", "where": where})


def test_rules_give_the_verdicts_of_the_table(counted: Callable[[str], None]) -> None:
    """An allow rule applies only if its condition holds; a deny or ask rule also if it cannot be evaluated."""
    wrong: list[Any] = []
    for where, arguments, expected in CASES:
        applies = {action: rule(action, where).applies("t", arguments) for action in ("allow", "deny", "ask")}
        if applies != {"allow": expected is True, "deny": expected is not False, "ask": expected is not False}:
            wrong.append((where, arguments, expected, applies))
    assert wrong == []
    counted(f"rules on arguments: {len(CASES)} cases, {3 * len(CASES)} rules and calls as the reference has them")
    assert len(CASES) >= 300


# -- the reference --------------------------------------------------------------------------------------

LETTERS = {
    "\u0435": "e",
    "\u0441": "c",
    "\u043e": "o",
    "\u0430": "a",
    "\u3002": ".",
    "\u200b": "",
    "\u200d": "",
    "\u00ad": "",
}


def plain(text: str) -> str:
    """A text as it looks, for the characters that the table uses."""
    return unicodedata.normalize("NFKC", "".join(LETTERS.get(c, c) for c in unicodedata.normalize("NFKC", text)))


def stripped(text: str) -> str:
    """A text as it looks, without white space at its ends, which a tool may strip."""
    return plain(text).strip()


def reference(condition: Any, value: Any, absent: bool = False, unreachable: bool = False) -> bool | None:
    if isinstance(condition, str):
        condition = {"glob": condition}
    if not isinstance(condition, dict):
        condition = {"equals": condition}
    verdict: bool | None = True
    for name, limit in condition.items():
        if unreachable:
            one = None
        elif name == "present":
            one = limit is not (absent or value is None)
        elif absent:
            one = None
        else:
            one = ONE[name](value, limit)
        if one is False:
            return False
        if one is None:
            verdict = None
    return verdict


def reference_where(value: Any, where: Any) -> bool | None:
    if not isinstance(value, dict):
        return None
    verdict: bool | None = True
    for path, condition in where.items():
        one = reference(condition, *follow(value, path))
        if one is False:
            return False
        if one is None:
            verdict = None
    return verdict


def follow(value: Any, path: Any) -> tuple[Any, bool, bool]:
    """The value at a path, whether it is absent, and whether the path leads through something else than objects."""
    if not isinstance(path, tuple):
        path = tuple(quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|([^."]+)', path))
    for key in path:
        if value is None:
            return None, True, False
        if not isinstance(value, dict):
            return None, False, True
        if key not in value:
            return None, True, False
        value = value[key]
    return value, False, False


def same_number(one: Any, other: Any) -> bool:
    if math.inf in (one, other) or -math.inf in (one, other):
        return bool(one == other)
    return Decimal(repr(one)) == Decimal(repr(other)) if max(abs(one), abs(other)) < 10**300 else one == other


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def bare(text: str) -> str:
    return stripped(text).casefold()


def ref_equals(value: Any, wanted: Any) -> bool | None:
    if type(value) is float and math.isnan(value):
        return None
    if is_number(value) and is_number(wanted):
        return same_number(value, wanted)
    if type(value) is not type(wanted):
        return False
    if isinstance(value, str):
        return True if value == wanted else None if bare(value) == bare(wanted) else False
    if isinstance(value, list):
        if len(value) != len(wanted):
            return False
        verdicts = [ref_equals(a, b) for a, b in zip(value, wanted, strict=True)]
        return False if False in verdicts else None if None in verdicts else True
    if isinstance(value, dict):
        if sorted(value) != sorted(wanted):
            alike = sorted(map(bare, value)) == sorted(map(bare, wanted))
            return None if alike else False
        verdicts = [ref_equals(value[k], wanted[k]) for k in wanted]
        return False if False in verdicts else None if None in verdicts else True
    return bool(value == wanted)


def ref_text(value: Any, matches: Callable[[str, bool, bool], bool]) -> bool | None:
    if not isinstance(value, str):
        return None
    exact, alike = matches(value, False, False), matches(value, True, False)
    if exact and alike:
        return True
    return None if exact or alike or matches(value, True, True) else False


def steps(path: str) -> Counter[str]:
    """How often a path has each step, as it looks, and after what is encoded in it is decoded."""
    return Counter(step.strip() for step in unquote(plain(path)).replace("\\", "/").split("/"))


def is_led_elsewhere(value: Any, pattern: str) -> bool:
    has, may_have = steps(value) if isinstance(value, str) else Counter[str](), steps(pattern)
    return "/" in pattern and any(has[step] > may_have[step] for step in (".", ".."))


def ref_glob(value: Any, pattern: str) -> bool | None:
    if is_led_elsewhere(value, pattern):
        return None

    def matches(text: str, folded: bool, any_case: bool) -> bool:
        text, wanted = (stripped(text), plain(pattern)) if folded else (text, pattern)
        return glob_walk(text.casefold(), wanted.casefold()) if any_case else glob_walk(text, wanted)

    return ref_text(value, matches)


def glob_walk(text: str, pattern: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(glob_walk(text[i:], pattern[1:]) for i in range(len(text) + 1))
    if not text:
        return False
    if pattern[0] == "[" and "]" in pattern[2:]:
        end = pattern.index("]", 2)
        return text[0] in pattern[1:end] and glob_walk(text[1:], pattern[end + 1 :])
    return pattern[0] in ("?", text[0]) and glob_walk(text[1:], pattern[1:])


def ref_regex(value: Any, pattern: str) -> bool | None:
    if is_led_elsewhere(value, pattern.replace("\\.", ".")):
        return None

    def matches(text: str, folded: bool, any_case: bool) -> bool:
        flags = re.DOTALL | (re.IGNORECASE if any_case else 0)
        return bool(
            re.compile(plain(pattern) if folded else pattern, flags).fullmatch(stripped(text) if folded else text)
        )

    return ref_text(value, matches)


def ref_compare(value: Any, limit: Any, at_least: bool) -> bool | None:
    if not is_number(value) or math.isnan(value if isinstance(value, float) else 0):
        return None
    if same_number(value, limit):
        return True
    return bool(value > limit) is at_least


def ref_items(value: Any, condition: Any, settled_by: bool) -> bool | None:
    if not isinstance(value, list):
        return None
    if not value:
        return False if settled_by else None
    verdicts = [reference(condition, item) for item in value]
    return settled_by if settled_by in verdicts else None if None in verdicts else not settled_by


def ref_one_of(value: Any, allowed: Any) -> bool | None:
    verdicts = [ref_equals(value, one) for one in allowed]
    return True if True in verdicts else None if None in verdicts else False


ONE: dict[str, Callable[[Any, Any], bool | None]] = {
    "equals": ref_equals,
    "one_of": ref_one_of,
    "glob": ref_glob,
    "regex": ref_regex,
    "at_least": lambda value, limit: ref_compare(value, limit, at_least=True),
    "at_most": lambda value, limit: ref_compare(value, limit, at_least=False),
    "every": lambda value, condition: ref_items(value, condition, settled_by=False),
    "any": lambda value, condition: ref_items(value, condition, settled_by=True),
    "where": reference_where,
}


def readable(where: dict[Any, Any]) -> bool:
    """Whether the reference, which knows no escapes and no empty names in paths, can read the paths."""
    return not any("\\" in path or '""' in path for path in where)


def test_the_reference_gives_the_verdicts_of_the_table() -> None:
    wrong = [(w, a, e) for w, a, e in CASES if readable(w) and reference_where(a, w) is not e]
    assert wrong == []


keys = st.sampled_from(["a", "b", "a.b", "c[0]"])
texts = st.sampled_from(
    [
        "",
        " ",
        "x",
        " x",
        "x\n",
        "X",
        "xy",
        "rm x",
        FULL_WIDTH_RM,
        ZERO_WIDTH_RM,
        CYRILLIC_EVE,
        "eve",
        NFC_CAFE,
        NFD_CAFE,
    ]
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.1, 1.0, -0.0, NAN, INF, 10**400]), texts
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
finite = values.filter(lambda value: "NaN" not in json.dumps(value) and "Infinity" not in json.dumps(value))
paths = st.one_of(
    st.sampled_from(["a", "b", "a.b", '"a.b"', 'a."c[0]"']), st.lists(keys, min_size=1, max_size=2).map(tuple)
)
simple = st.one_of(
    st.sampled_from(["*", "x*", "?", "*rm *", "eve", "[xy]*"]),
    st.sampled_from([None, True, False, 0, 1, 1.0, 0.1]),
    finite.map(lambda value: {"equals": value}),
    st.lists(finite, max_size=3).map(lambda items: {"one_of": items}),
    st.sampled_from(
        [
            {"regex": "[xy]+"},
            {"regex": "(x|rm).*"},
            {"at_least": 1},
            {"at_most": 0.1},
            {"present": True},
            {"present": False},
        ]
    ),
    st.sampled_from([{"present": True, "glob": "x*"}, {"present": True, "at_least": 0}]),
)


def one_path_each(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    named = {p if isinstance(p, tuple) else parse_path(p): (p, condition) for p, condition in pairs}
    return dict(named.values())


def wheres(inner: Any) -> Any:
    return st.lists(st.tuples(paths, inner), max_size=3).map(one_path_each)


conditions = st.recursive(
    simple,
    lambda inner: st.one_of(
        inner.map(lambda c: {"every": c}), inner.map(lambda c: {"any": c}), wheres(inner).map(lambda w: {"where": w})
    ),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no reason to fail
@given(wheres(conditions), st.dictionaries(keys, values, max_size=4))
def test_the_verdicts_equal_those_of_the_reference(where: dict[Any, Any], arguments: dict[str, Any]) -> None:
    expected = reference_where(arguments, where)
    assert rule("allow", where).applies("t", arguments) is (expected is True)
    assert rule("deny", where).applies("t", arguments) is (expected is not False)
    assert rule("ask", where).applies("t", arguments) is (expected is not False)


# -- reading rules --------------------------------------------------------------------------------------


@given(st.lists(st.text(), min_size=1, max_size=4).map(tuple))
def test_every_path_can_be_written_as_text(path: tuple[str, ...]) -> None:
    assert parse_path(path_text(path)) == path


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", "a b", "a[0]", 'a"b"', '"a', "a.[b]", (), (1,), 1])
def test_a_path_that_cannot_be_read_is_refused(path: Any) -> None:
    with pytest.raises(ValidationError):
        rule("deny", {path: 1})


def test_a_path_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="twice"):
        rule("deny", {"a.b": 1, ("a", "b"): 2})


@pytest.mark.parametrize(
    "condition",
    [
        {},
        {"golb": "x"},
        {"regex": "("},
        {"at_least": "5"},
        {"at_least": True},
        {"at_most": NAN},
        {"at_most": INF},
        ["x"],
        {"every": []},
        {"any": {}},
        {"where": {"a": {}}},
        {"present": 1},
    ],
)
def test_a_condition_that_cannot_be_read_is_refused(condition: Any) -> None:
    with pytest.raises(ValidationError):
        rule("deny", {"a": condition})


@pytest.mark.parametrize("where", {json.dumps(where): where for where, _, _ in CASES}.values())
def test_rules_can_be_stored_as_json(where: dict[Any, Any]) -> None:
    made = rule("deny", where)
    assert PermissionRule.model_validate_json(made.model_dump_json(exclude_unset=True)) == made


# -- what rules see of arguments ------------------------------------------------------------------------


class Color(Enum):
    RED = "red"


class Payment(BaseModel):
    amount: Decimal
    code: SecretStr


@dataclass
class Place:
    path: Path


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (Color.RED, "red"),
        (Path("/etc/passwd"), "/etc/passwd"),
        (date(2026, 1, 2), "2026-01-02"),
        ({"x"}, ["x"]),
        (("x", 1), ["x", 1]),
        (Place(Path("a")), {"path": "a"}),
        (Decimal("100.50"), Decimal("100.50")),
        (b"abc", "abc"),
        (b"\xff", UNREADABLE),
        (SecretStr("x"), UNREADABLE),
        (object(), UNREADABLE),
        (Payment(amount=Decimal(5), code=SecretStr("x")), {"amount": Decimal(5), "code": UNREADABLE}),
    ],
)
def test_rules_see_arguments_as_json(value: Any, seen: Any) -> None:
    assert readable_value({"a": [value]}) == {"a": [seen]}


def test_decimals_are_compared_exactly() -> None:
    amount = ArgumentMatcher(at_most=100)
    assert amount.verdict(Decimal("100.00")) is True
    assert amount.verdict(Decimal("100.00000000000000000001")) is False
    assert amount.verdict(Decimal("NaN")) is None
    assert ArgumentMatcher(equals=0.1).verdict(Decimal("0.10")) is True
    assert ArgumentMatcher(at_least=10**5000).verdict(Decimal("1e4999")) is False


def test_what_is_no_json_meets_no_condition_and_cannot_be_evaluated() -> None:
    for condition in ({"glob": "*"}, {"equals": "**********"}, {"present": True}, {"every": "*"}, {"where": {}}):
        assert ArgumentMatcher.model_validate(condition).verdict(UNREADABLE) is None


@pytest.mark.parametrize("depth", [101, 1000, 100_000])
def test_what_is_nested_too_deeply_is_not_read(depth: int) -> None:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    with pytest.raises(ValueError, match="100 deep"):
        readable_value(value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("pattern", ["(a+)+", "(a|a)*b", "(a|aa)+$", "(.*a){20}", "([a-z]+)*!", "(x+x+)+y"])
@pytest.mark.parametrize("text", ["a" * 20_000 + "?", "x" * 20_000, "a" * 20_000 + "\u0430"], ids=["a", "x", "alike"])
def test_a_regular_expression_takes_linear_time(pattern: str, text: str) -> None:
    """With Python's ``re``, most of these take longer than the universe exists."""
    assert ArgumentMatcher(regex=pattern).verdict(text) is not True


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "(?<!x)y", "a{9999}", "\ud800"])
def test_a_regular_expression_that_re2_does_not_know_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError, match="not a valid regular expression of RE2"):
        ArgumentMatcher(regex=pattern)


def test_a_text_that_is_not_unicode_cannot_be_evaluated() -> None:
    assert ArgumentMatcher(regex=".*").verdict("a\ud800") is None


def test_a_rule_with_a_regular_expression_is_refused_without_re2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(ValidationError, match=r"agentfsm\[regex\]"):
        deny("shell", where={"command": ArgumentMatcher(regex="rm .*")})
    with pytest.raises(ConfigurationError, match=r"agentfsm\[regex\]"):
        permissions({"action": "deny", "tool": "shell", "where": {"command": {"regex": "rm .*"}}})
    assert ArgumentMatcher(glob="rm *").verdict("rm x") is True
