"""Equal code is recognized wherever it stands; any change of what a guard does is seen, also in what it uses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

from agentfsm.analysis.code_comparison import DigestOnly, code_digest, code_key, same_code
from agentfsm.loop import detectors
from agentfsm.loop.transition_table import LOOP

GUARD = """
from functools import partial
LIMIT = 500
KINDS = {"pay": 1, "send": 2}

def amount(call):
    return call["amount"]

class Rule:
    def __init__(self, limit):
        self.limit = limit

    def __call__(self, run):
        return self.limit < run

def over(run, factor=1):
    "Too much."
    return any(amount(c) * factor > LIMIT for c in run if c["name"] in KINDS)

def at_least(limit):
    def guard(run):
        return run >= limit
    return guard

def careful(run):
    try:
        limit = KINDS["pay"]
    except KeyError:
        return False
    return run > limit

guard = over
"""


class Load(Protocol):
    def __call__(self, source: str, name: str = "guard") -> Any: ...


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes a module of its own to a file, imports it, and returns one of its names."""
    numbers = count()

    def make(source: str, name: str = "guard") -> Any:
        path = tmp_path / f"rules_{next(numbers)}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return eval(name, vars(module))

    return make


def compared(old: Any, new: Any) -> tuple[bool | None, bool]:
    return same_code(old, new), code_digest(old) == code_digest(new)


@pytest.mark.parametrize(
    "name", ["over", "at_least(3)", "Rule(3)", "careful", "partial(over, factor=2)", "Rule(3).__call__"]
)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("\nLIMIT", "\n\n\n# Other lines, and a comment.\nUNRELATED = 7\nLIMIT"),
        ('"Too much."', '"Says it in other words."'),
        ('    "Too much."\n', ""),
        ("def over(run, factor=1):", "def over(run: list, factor: int = 1) -> bool:"),
        ("return any(amount(c) * factor > LIMIT", "return any(\n        amount(c) * factor > LIMIT  # why\n       "),
        ("        return False\n    return run", "        pass\n        return False\n    return run"),
    ],
)
def test_the_same_source_on_other_lines_is_the_same_code(load: Load, name: str, old: str, new: str) -> None:
    assert old in GUARD
    first, second = load(GUARD, name), load(GUARD.replace(old, new), name)
    assert same_code(first, second) is True
    if "pass" not in new:
        assert code_digest(first) == code_digest(second) != ""


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("over", "> LIMIT", ">= LIMIT"),
        ("over", "LIMIT = 500", "LIMIT = 5000"),
        ("over", "factor=1", "factor=2"),
        ("over", 'call["amount"]', 'call["total"]'),
        ("over", '"send": 2', '"transfer": 2'),
        ("over", "any(", "all("),
        ("at_least(3)", "run >= limit", "limit >= run"),
        ("Rule(3)", "self.limit < run", "self.limit <= run"),
        ("partial(over, factor=2)", "LIMIT = 500", "LIMIT = 501"),
        ("careful", '    try:\n        limit = KINDS["pay"]', '    limit = KINDS["pay"]\n    try:\n        pass'),
        ("careful", "return False", "return 0"),
    ],
)
def test_every_change_of_what_a_guard_does_is_seen(load: Load, name: str, old: str, new: str) -> None:
    assert old in GUARD
    assert compared(load(GUARD, name), load(GUARD.replace(old, new), name)) == (False, False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("at_least(3)", "at_least(4)"),
        ("Rule(3)", "Rule(4)"),
        ("partial(over, factor=2)", "partial(over, factor=3)"),
        ("over", "careful"),
        ("Rule(3).__call__", "Rule(4).__call__"),
    ],
)
def test_what_a_closure_or_an_object_holds_counts(load: Load, old: str, new: str) -> None:
    assert compared(load(GUARD, old), load(GUARD, new)) == (False, False)


def test_a_loop_that_does_nothing_can_be_compared(load: Load) -> None:
    source = "def guard(run):\n    if run:\n        while True:\n            pass\n    return {}\n"
    assert same_code(load(source.format(1)), load(source.format(1))) is True
    assert same_code(load(source.format(1)), load(source.format(2))) is False


def test_a_module_of_your_own_is_followed(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "import {} as helpers\ndef guard(run):\n    return helpers.limit(run) and run\n"
    for name, limit in (("helpers_a", 1), ("helpers_b", 1), ("helpers_c", 2)):
        (tmp_path / f"{name}.py").write_text(f"def limit(run):\n    return run > {limit}\n", encoding="utf-8")
    a, b, c = (load(source.format(name)) for name in ("helpers_a", "helpers_b", "helpers_c"))
    assert same_code(a, c) is False
    assert code_digest(a) != code_digest(c)
    assert same_code(a, b) is True


def test_a_function_that_only_passes_its_arguments_on_is_the_one_that_it_calls(load: Load) -> None:
    wrapped = load(GUARD + "\ndef mine(run):\n    'In our words.'\n    return careful(run)\n", "mine")
    turned = load(GUARD + "\ndef mine(run):\n    return not careful(run)\n", "mine")
    awaited = load(GUARD + "\nasync def mine(run):\n    return careful(run)\n", "mine")
    assert compared(load(GUARD, "careful"), wrapped) == (True, True)
    assert compared(load(GUARD, "careful"), turned) == (False, False)
    assert compared(load(GUARD, "careful"), awaited) == (False, False)


def test_functions_that_use_each_other_can_be_compared(load: Load) -> None:
    source = "def guard(run):\n    return run and other(run - 1)\ndef other(run):\n    return guard(run) or {}\n"
    assert compared(load(source.format(1)), load(source.format(1))) == (True, True)
    assert compared(load(source.format(1)), load(source.format(2))) == (False, False)


def test_code_that_is_known_by_name_only_is_not_called_the_same() -> None:
    guard = detectors.runaway
    assert same_code(DigestOnly("runaway"), guard) is None
    assert same_code(DigestOnly("runaway", code_digest(guard)), guard) is True
    assert same_code(guard, DigestOnly("runaway", "0123456789abcdef")) is False
    with pytest.raises(NotImplementedError, match="'runaway' is known by its name only"):
        DigestOnly("runaway")(None)


def test_a_function_without_source_has_no_digest_and_is_still_compared() -> None:
    space: dict[str, Any] = {}
    exec("def a(run): return run > 1\ndef b(run): return run > 1\ndef c(run): return run > 2", space)
    assert code_digest(space["a"]) == ""
    assert same_code(space["a"], space["b"]) is True
    assert same_code(space["a"], space["c"]) is False
    assert same_code(DigestOnly("a", "0123456789abcdef"), space["a"]) is None


def test_every_guard_of_the_loop_has_a_digest_and_no_two_of_them_are_the_same() -> None:
    guards = {row.name: row.guard for row in LOOP if row.guard is not None}
    digests = {name: code_digest(guard) for name, guard in guards.items()}
    assert all(digests.values())
    assert len(set(digests.values())) == len(guards)


def test_a_digest_is_the_same_in_another_process() -> None:
    program = (
        "from agentfsm.analysis.code_comparison import code_digest\n"
        "from agentfsm.loop import detectors\n"
        "print(code_digest(detectors.output_refused))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == code_digest(detectors.output_refused)


CHECK = "    def check(self, a): return a > self.high"
CALL = "    def __call__(self, a): return a > self.high"
USES = {
    "a constant": ["LIMIT = {}", "def rule(a): return a > LIMIT"],
    "a decimal": ["from decimal import Decimal", "LIMIT = Decimal({})", "def rule(a): return a > LIMIT"],
    "a time": ["from datetime import timedelta", "LIMIT = timedelta({})", "def rule(a): return a > LIMIT"],
    "a pattern": ["import re", "LIMIT = re.compile('{}')", "def rule(a): return LIMIT.match(a)"],
    "a namespace": [
        "from types import SimpleNamespace", "LIMITS = SimpleNamespace(a={})", "def rule(a): return a > LIMITS.a"],
    "a cached function": [
        "from functools import cache", "@cache", "def limit(): return {}", "def rule(a): return a > limit()"],
    "an attribute of a class": ["class Limits:", "    high = {}", "def rule(a): return a > Limits.high"],
    "an attribute of its own class": ["class R:", "    high = {}", CHECK, "rule = R().check"],
    "a class method": ["class R:", "    high = {}", "    @classmethod", CHECK, "rule = R.check"],
    "a static method": ["class R:", "    @staticmethod", "    def high(): return {}", CALL + "()", "rule = R()"],
    "a property": ["class R:", "    @property", "    def high(self): return {}", CALL, "rule = R()"],
    "a base class": ["class B:", "    def __call__(self, a): return a > {}", "class R(B): pass", "rule = R()"],
    "a cached property": [
        "from functools import cached_property", "class R:", "    @cached_property", "    def high(self): return {}",
        CALL, "rule = R()"],
    "a method with an argument of its own": [
        "from functools import partialmethod", "class R:", "    def over(self, high, a): return a > high",
        "    check = partialmethod(over, {})", "    def __call__(self, a): return self.check(a)", "rule = R()"],
    "an item getter": ["from operator import itemgetter", "GET = itemgetter({})", "def rule(a): return GET(a)"],
    "a queue": ["from collections import deque", "LIMITS = deque([{}])", "def rule(a): return a > LIMITS[0]"],
    "the default of a mapping": [
        "from collections import defaultdict", "def high(): return {}", "LIMITS = defaultdict(high)",
        "def rule(a): return a > LIMITS['a']"],
    "a dataclass": [
        "from dataclasses import dataclass", "@dataclass", "class L:", "    high: int", "L0 = L({})",
        "def rule(a): return a > L0.high"],
    "a network": ["import ipaddress", "OWN = ipaddress.ip_address({})", "def rule(a): return a == OWN"],
    "a time zone": [
        "from datetime import timezone, timedelta", "HERE = timezone(timedelta(minutes={}))",
        "def rule(a): return a == HERE"],
    "the code of an object": [
        "class L:", "    def over(self, a): return a > {}", "L0 = L()", "def rule(a): return L0.over(a)"],
}  # fmt: skip
"""The lines of rules that use a number, by what it stands in."""


def test_what_an_object_of_another_class_holds_may_change_while_it_is_used_and_does_not_count(load: Load) -> None:
    source = "class L:\n    def add(self, run): self.seen = run\nL0 = L()\ndef guard(run): return L0.seen > run\n"
    used, unused = load(source), load(source)
    used.__globals__["L0"].add(7)
    assert compared(used, unused) == (True, True)


@pytest.mark.parametrize("used", USES)
@pytest.mark.parametrize("sources", [True, False])
def test_another_value_of_what_a_rule_uses_is_other_code(tmp_path: Path, used: str, sources: bool) -> None:
    def key(number: int, name: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text("\n".join(USES[used]).format(number), "utf-8")
        spec = importlib.util.spec_from_file_location("own_rules", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return code_key(module.rule, sources=sources)

    assert key(100, "a") == key(100, "b") != key(200, "c") != ""
