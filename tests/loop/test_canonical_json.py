"""Canonical JSON: RFC 8785 wherever that can say a value, and always the same value back."""

import json
import math
import random

import pytest
import rfc8785

from agentfsm.loop.canonical_json import MAX_INT, decode, encode

CASES = 10_000

ALPHABETS = (
    "abcxyz_09",
    '"\\/\x00\x01\x08\t\n\x0c\r\x1f\x7f\x80',
    "äß€\u2028\u2029\uffff\ufb33",
    "\U0001f600\U00010000\U0010ffff",
    "\ud800\udbff\udc00\udfff",
    "$.0e1-",
)


def text(draw: random.Random) -> str:
    alphabet = draw.choice(ALPHABETS) + draw.choice(ALPHABETS)
    return "".join(draw.choices(alphabet, k=draw.randrange(6)))


def number(draw: random.Random) -> int | float:
    match draw.randrange(7):
        case 0:
            return draw.randrange(-10, 10)
        case 1:
            return draw.choice((MAX_INT, -MAX_INT, MAX_INT + 1, -MAX_INT - 1, 10**15, 10**30))
        case 2:
            return draw.choice((0.0, -0.0, 1.0, 1e16, 1e21, 1e-4, 1e-5, 1e-7, 5e-324, 1.7976931348623157e308))
        case 3:
            return draw.choice((math.inf, -math.inf))
        case 4:
            return draw.uniform(-1000, 1000)
        case 5:
            return math.ldexp(draw.random(), draw.randrange(-1074, 1024))
        case _:
            return round(draw.uniform(-1000, 1000), 3)


def value(draw: random.Random, depth: int = 3):
    match draw.randrange(8 if depth else 5):
        case 0:
            return draw.choice((None, True, False))
        case 1 | 2:
            return number(draw)
        case 3 | 4:
            return text(draw)
        case 5:
            return [value(draw, depth - 1) for _ in range(draw.randrange(4))]
        case _:
            return {text(draw): value(draw, depth - 1) for _ in range(draw.randrange(5))}


def lone(string: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in string)


def sayable(v) -> bool:
    """Whether RFC 8785 can say a value without changing it (by the RFC's own rules, not by the encoder)."""
    match v:
        case bool() | None:
            return True
        case int():
            return abs(v) <= 2**53 - 1
        case float():  # ECMAScript writes 1.0 as 1, and exponents otherwise than Python
            return math.isfinite(v) and not v.is_integer() and 1e-4 <= abs(v) < 1e16
        case str():
            return not lone(v)
        case list():
            return all(map(sayable, v))
        case dict():
            return all(sayable(k) and not k.startswith("$") and sayable(x) for k, x in v.items())


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def test_it_is_rfc_8785_and_gives_every_value_back():
    said = 0
    for seed in range(CASES):
        v = value(random.Random(seed))
        written = encode(v)
        assert same(decode(written), v), seed
        assert rfc8785.dumps(json.loads(written)).decode() == written, seed  # whatever we write is canonical
        if sayable(v):
            said += 1
            assert rfc8785.dumps(v).decode() == written, seed
    assert said > CASES // 4


@pytest.mark.parametrize(
    ("v", "written"),
    [
        ({"b": 1, "a": [True, None, "ü"]}, '{"a":[true,null,"ü"],"b":1}'),
        (1.0, '{"$float":"1.0"}'),
        ([0.5, -0.0], '[0.5,{"$float":"-0.0"}]'),
        (2**53, '{"$int":"9007199254740992"}'),
        ("\ud800", '{"$str":"eda080"}'),
        ({"$ref": 1}, '{"$items":[["$ref",1]]}'),
        ("\x00", '"\\u0000"'),
        ({"\U0001f600": 1, "\ufb33": 2}, '{"\U0001f600":1,"\ufb33":2}'),  # by UTF-16, as the RFC wants it
        ({"at": "12:1.0e5"}, '{"at":"12:1.0e5"}'),  # looks like a number, is none
    ],
)
def test_each_odd_value_has_the_text_that_the_rules_give_it(v, written):
    assert encode(v) == written


def test_nan_comes_back_as_nan():
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("v", [{1: 2.0}, object(), {"a": {1, 2}}, b"bytes"])
def test_what_is_no_json_is_refused(v):
    with pytest.raises(TypeError):
        encode(v)


@pytest.mark.slow
def test_a_value_that_holds_itself_or_never_ends_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(ValueError, match="Circular"):
        encode(loop)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        encode(deep)


@pytest.mark.parametrize("written", ['{"$float":"1.0","b":1}', '{"$other":1}', "{", "[" * 100_000])
def test_a_text_that_no_encoder_made_is_refused(written):
    with pytest.raises(ValueError, match=r"tag|deep|Expecting"):
        decode(written)
