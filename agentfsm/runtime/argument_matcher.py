"""Conditions on the arguments of a call, in three values: a condition holds, does not hold, or cannot be evaluated.

A condition cannot be evaluated (None) if its value is absent, of a type that it is not about, or a text that meets it
only as a look-alike, in another case or with other white space at its ends. ``PermissionRule`` says what each kind of
rule makes of that.
"""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from enum import Enum
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, field_validator, model_validator
from pydantic.types import SecretBytes, SecretStr
from pydantic_core import PydanticSerializationError, to_jsonable_python

from agentfsm.errors import MissingExtraError
from agentfsm.loop.read_only import MAX_NESTING
from agentfsm.runtime.schema_check import compile_linear


class _NoValue(Enum):
    """What stands in place of a value that is not there to be matched."""

    MISSING = "absent from the call"
    UNDECLARED = "no argument of the tool"
    UNREADABLE = "not JSON"


MISSING: Final = _NoValue.MISSING
UNDECLARED: Final = _NoValue.UNDECLARED
UNREADABLE: Final = _NoValue.UNREADABLE


def all_hold(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all conditions hold: False if one does not; else None if one cannot be evaluated."""
    seen = set(verdicts)
    return False if False in seen else None if None in seen else True


def any_holds(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether a condition holds: True if one does; else None if one cannot be evaluated."""
    seen = set(verdicts)
    return True if True in seen else None if None in seen else False


# -- paths ----------------------------------------------------------------------------------------------

_BARE_KEY = re.compile(r'[^."\[\]\s]+')
_KEY = re.compile(r'"(?:[^"\\]|\\.)*"|[^."\[\]\s]+')


@lru_cache(maxsize=1024)
def parse_path(text: str) -> tuple[str, ...]:
    """The names in a path: ``options.force``, or ``"a.b".c`` for a name with dots, as in TOML.

    Raises:
        ValueError: It is not a path.
    """
    keys: list[str] = []
    position = 0
    while match := _KEY.match(text, position):
        key = match.group()
        keys.append(json.loads(key) if key.startswith('"') else key)
        position = match.end()
        if position == len(text):
            return tuple(keys)
        if text[position] != ".":
            break
        position += 1
    raise ValueError(
        f"{text!r} is not a path of names with dots between them. Put a name with dots, spaces, quotes or brackets "
        "in double quotes, or give a tuple of names; items of a list are matched with every= or any="
    )


def path_text(path: Iterable[str]) -> str:
    """The text of a path, which ``parse_path`` reads back."""
    return ".".join(key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False) for key in path)


def _normal_path(path: object) -> object:
    """A path as text, given as text or as a tuple of names."""
    if isinstance(path, str):
        return path_text(parse_path(path))
    if isinstance(path, tuple):
        keys = cast("tuple[object, ...]", path)
        if keys and all(isinstance(key, str) for key in keys):
            return path_text(cast("tuple[str, ...]", keys))
    return path  # pyright: ignore[reportUnknownVariableType]  # refused by pydantic


def value_at(value: Any, path: tuple[str, ...]) -> Any:
    """The value at a path through objects; ``MISSING``, or ``UNREADABLE`` if it leads through anything else."""
    for key in path:
        if value is None:
            return MISSING
        if not isinstance(value, dict):
            return UNREADABLE
        value = cast("dict[str, Any]", value).get(key, MISSING)
        if value is MISSING:
            return MISSING
    return value


# -- values ---------------------------------------------------------------------------------------------


def readable_value(value: Any, depth: int = 0) -> Any:
    """A validated argument as rules see it: JSON, with Decimals kept; ``UNREADABLE`` for what is not JSON, or secret.

    Raises:
        ValueError: It is nested more than ``MAX_NESTING`` deep, or contains itself.
    """
    kind = value.__class__
    if kind is str or kind is bool or kind is int or kind is float or value is None:
        return value
    if depth >= MAX_NESTING:
        raise ValueError(f"nested more than {MAX_NESTING} deep")
    if isinstance(value, Enum):
        return readable_value(value.value, depth + 1)
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(name): readable_value(item, depth + 1) for name, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [readable_value(item, depth + 1) for item in cast("Iterable[Any]", value)]
    if isinstance(value, Decimal):
        return value
    if isinstance(value, SecretStr | SecretBytes):
        return UNREADABLE
    serializer: Any = getattr(kind, "__pydantic_serializer__", None)
    if serializer is not None:
        return readable_value(serializer.to_python(value, by_alias=True), depth + 1)
    if dataclasses.is_dataclass(value):
        return {f.name: readable_value(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, UnicodeDecodeError):
        return UNREADABLE


# -- text -----------------------------------------------------------------------------------------------

# A selection of https://www.unicode.org/Public/security/latest/confusables.txt (UTS #39): the letters of Cyrillic,
# Greek, Armenian and the phonetic alphabet, and the punctuation, that look like ASCII and that NFKC leaves alone.
_LOOK_ALIKES = {
    int(number, 16): char
    for char, numbers in {
        "!": "01c3",
        '"': "201c 201d",
        "'": "02b9 02bc 02c8 2018 2019 2032",
        "*": "2217 204e",
        ",": "066b",
        "-": "2010 2011 2012 2013 2212",
        ".": "3002 06d4 0701",
        "/": "2044 2215 29f8",
        ":": "02d0 2236 a789",
        "<": "2039",
        ">": "203a",
        "A": "0410 0391",
        "B": "0412 0392",
        "C": "0421",
        "E": "0415 0395",
        "G": "050c",
        "H": "041d 0397",
        "I": "0406 0399",
        "J": "0408 037f",
        "K": "041a 039a",
        "M": "041c 039c",
        "N": "039d",
        "O": "041e 039f 0555",
        "P": "0420 03a1",
        "Q": "051a",
        "S": "0405",
        "T": "0422 03a4",
        "U": "054d",
        "V": "0474",
        "W": "051c",
        "X": "0425 03a7",
        "Y": "04ae 0423 03a5",
        "Z": "0396",
        "\\": "2216 29f5",
        "a": "0430 03b1 0251",
        "c": "0441 03f2",
        "d": "0501",
        "e": "0435",
        "g": "0581 0261",
        "h": "04bb 0570",
        "i": "0456 03b9 0131 026a 0269",
        "j": "0458 03f3",
        "k": "043a 03ba",
        "l": "04cf 04c0 01c0",
        "n": "043f 0578 057c",
        "o": "043e 03bf 03c3 0585",
        "p": "0440 03c1",
        "q": "051b 0563 0566",
        "r": "0433",
        "s": "0455",
        "t": "03c4",
        "u": "03c5 057d",
        "v": "0475 03bd",
        "w": "051d 0561",
        "x": "0445 03c7",
        "y": "0443 04af 03b3 028b",
        "|": "2223",
        "~": "02dc 223c",
    }.items()
    for number in numbers.split()
}


def _is_invisible(char: str) -> bool:
    """Whether a character shows nothing: format characters, fillers and variation selectors."""
    number = ord(char)
    filler = number in (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0)
    selector = 0x180B <= number <= 0x180F or 0xFE00 <= number <= 0xFE0F or 0xE0000 <= number <= 0xE0FFF
    return filler or selector or unicodedata.category(char) == "Cf"


def _fold(text: str) -> str:
    """A text with look-alikes replaced by what they look like, as NFKC."""
    if text.isascii():
        return text
    visible = "".join(char for char in text if not _is_invisible(char))
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", visible).translate(_LOOK_ALIKES))


def _plain(text: str) -> str:
    """A text without all in which texts that a tool may take for each other differ."""
    return _fold(text).strip().casefold()


def _fold_pattern(pattern: str) -> str:
    """A regular expression for folded texts."""
    return "".join(char if char.isascii() else re.escape(_fold(char)) for char in unicodedata.normalize("NFC", pattern))


_Matches = Callable[[str], bool]


@lru_cache(maxsize=512)
def _glob_patterns(pattern: str) -> tuple[_Matches, _Matches | None, _Matches | None]:
    """What a pattern of ``fnmatch`` matches: a text as it is, the folded text, and that in any case."""
    return _alike(translate(pattern), _compile_glob)


@lru_cache(maxsize=512)
def _regex_patterns(pattern: str) -> tuple[_Matches, _Matches | None, _Matches | None]:
    """What a regular expression matches: a text as it is, the folded text, and that in any case."""
    return _alike(pattern, _compile_regex)


def _alike(
    pattern: str, compile_pattern: Callable[[str, bool], _Matches]
) -> tuple[_Matches, _Matches | None, _Matches | None]:
    exact = compile_pattern(pattern, False)
    try:
        folded = _fold_pattern(pattern)
        return exact, compile_pattern(folded, False), compile_pattern(folded, True)
    except ValueError:
        return exact, None, None


def _compile_glob(pattern: str, any_case: bool) -> _Matches:
    try:  # what translate() writes does not backtrack from one star into another
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if any_case else 0))
    except re.error as error:
        raise ValueError(str(error)) from None
    return lambda text: compiled.fullmatch(text) is not None


def _compile_regex(pattern: str, any_case: bool) -> _Matches:
    compiled = compile_linear(pattern, dot_matches_newline=True, any_case=any_case)
    return lambda text: compiled.fullmatch(text.encode()) is not None


def _text_matches(text: Any, patterns: tuple[_Matches, _Matches | None, _Matches | None]) -> bool | None:
    if not isinstance(text, str):
        return None
    exact, folded, any_case = patterns
    try:
        if folded is None or any_case is None:  # no look-alike can be recognised
            return exact(text) if text.isascii() and text == text.strip() else None
        alike = _fold(text).strip()
        holds = exact(text)
        if holds == folded(alike):
            return True if holds else None if any_case(alike) else False
    except UnicodeEncodeError:  # half of a surrogate pair, which no pattern of RE2 can match
        return None
    return None


def _glob_matches(text: Any, pattern: str) -> bool | None:
    return None if _leads_elsewhere(text, pattern) else _text_matches(text, _glob_patterns(pattern))


def _regex_matches(text: Any, pattern: str) -> bool | None:
    unescaped = pattern.replace("\\", "")
    return None if _leads_elsewhere(text, unescaped) else _text_matches(text, _regex_patterns(pattern))


_SEPARATOR = re.compile(r"[/\\]|%2f|%5c", re.IGNORECASE)
_ENCODED_DOT = re.compile("%2e", re.IGNORECASE)


def _leads_elsewhere(text: Any, pattern: str) -> bool:
    """Whether a path or URL has steps such as ``..`` that a pattern with slashes does not have.

    What opens it follows them, so it may not be what the pattern is about: ``/data/../x`` is not in ``/data/*``.
    """
    if not isinstance(text, str) or _SEPARATOR.search(pattern) is None:
        return False
    has, may_have = _dot_steps(_fold(text)), _dot_steps(pattern)
    return any(has.count(step) > may_have.count(step) for step in (".", ".."))


def _dot_steps(path: str) -> list[str]:
    steps = _SEPARATOR.split(_ENCODED_DOT.sub(".", path))
    return [step.strip() for step in steps if step.strip() in (".", "..")]


# -- numbers, equality, items ---------------------------------------------------------------------------


def _as_number(value: Any) -> int | Decimal | None:
    """A number to compare exactly, a float as the decimal that it prints as; None for anything else and NaN."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        value = Decimal(repr(value))
    if isinstance(value, Decimal):
        return None if value.is_nan() else value
    return value if isinstance(value, int) else None


def _at_least(value: Any, limit: Any) -> bool | None:
    number, bound = _as_number(value), _as_number(limit)
    return None if number is None or bound is None else number >= bound


def _at_most(value: Any, limit: Any) -> bool | None:
    number, bound = _as_number(value), _as_number(limit)
    return None if number is None or bound is None else number <= bound


def _equals(value: Any, expected: Any) -> bool | None:
    """Whether two JSON values are equal: numbers by value, text exactly, lists in order, objects in any order."""
    if isinstance(value, _NoValue) or value != value:  # NaN
        return None
    if isinstance(value, str) and isinstance(expected, str):
        return True if value == expected else None if _plain(value) == _plain(expected) else False
    if isinstance(value, list) and isinstance(expected, list | tuple):
        items, others = cast("list[object]", value), cast("list[object]", expected)
        return len(items) == len(others) and all_hold(map(_equals, items, others))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        fields, wanted = cast("dict[str, Any]", value), cast("Mapping[str, Any]", expected)
        if fields.keys() == wanted.keys():
            return all_hold(_equals(fields[key], wanted[key]) for key in wanted)
        return None if len(fields) == len(wanted) and _equals(sorted(fields), sorted(wanted)) is None else False
    number, other = _as_number(cast("object", value)), _as_number(cast("object", expected))
    if number is not None and other is not None:
        return number == other
    return value.__class__ is expected.__class__ and bool(value == expected)  # pyright: ignore[reportUnknownMemberType]


def _every(value: Any, matcher: Any) -> bool | None:
    return all_hold(map(matcher.verdict, cast("list[object]", value))) if isinstance(value, list) and value else None


def _any(value: Any, matcher: Any) -> bool | None:
    return any_holds(map(matcher.verdict, cast("list[object]", value))) if isinstance(value, list) else None


def _where(value: Any, conditions: Any) -> bool | None:
    if not isinstance(value, dict):
        return None
    return all_hold(each.verdict(value_at(value, parse_path(path))) for path, each in conditions.items())


_CONDITIONS: Mapping[str, tuple[Callable[[Any, Any], bool | None], str]] = {
    "equals": (_equals, "= {}"),
    "one_of": (lambda value, allowed: any_holds(_equals(value, each) for each in allowed), "one of {}"),
    "glob": (_glob_matches, "like {}"),
    "regex": (_regex_matches, "matching {}"),
    "at_least": (_at_least, ">= {}"),
    "at_most": (_at_most, "<= {}"),
    "every": (_every, "every item {}"),
    "any": (_any, "any item {}"),
    "where": (_where, "{}"),
}
"""Each condition on a value that is there: how it is evaluated and printed."""


# -- the matcher ----------------------------------------------------------------------------------------


def _expand(value: Any) -> Any:
    """A matcher, for which a text is short for a glob, and another scalar for what it equals."""
    if isinstance(value, str):
        return ArgumentMatcher(glob=value)
    return ArgumentMatcher(equals=value) if value is None or isinstance(value, bool | int | float) else value


def _normal_conditions(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    conditions = cast("Mapping[object, object]", value)
    named = [(_normal_path(path), condition) for path, condition in conditions.items()]
    if len({path for path, _ in named}) < len(named):
        raise ValueError("a path is given twice")
    return dict(named)


_Number = Annotated[int, Strict()] | Annotated[float, Strict(), Field(allow_inf_nan=False)]


class ArgumentMatcher(BaseModel):
    """A condition on an argument. If several are given, all of them must hold.

    Each holds, does not hold, or cannot be evaluated for a value. Text is compared exactly. A text that meets a
    condition only in another case, only if look-alike characters are taken for each other, or only with or only
    without the white space at its ends, cannot be evaluated.

    Attributes:
        equals: The whole value, a list included, equals this JSON value. Numbers are compared by value, so 1 equals
            1.0; ``True`` is not 1, and ``"1"`` is not 1.
        one_of: The whole value equals one of these values.
        glob: It is a text that this pattern (``*``, ``?``, ``[...]``) matches completely.
        regex: It is a text that this regular expression of RE2 matches completely; a dot matches newlines too. RE2
            takes linear time, has no look-around and no backreferences, and its digits and word characters are ASCII.
        at_least: It is a number not less than this.
        at_most: It is a number not greater than this.
        every: It is a list, and each item meets this matcher. It cannot be evaluated for an empty list.
        any: It is a list, and at least one item meets this matcher.
        where: It is an object whose values at these paths meet these matchers.
        present: Whether there is a value at the path that is not null. It can be evaluated where all others cannot,
            so ``ArgumentMatcher(present=True, glob="rm *")`` does not hold for an absent argument.

    Raises:
        pydantic.ValidationError: No condition is given, or one is invalid, or ``regex`` is given and the package
            ``google-re2`` is not installed (extra ``regex``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    equals: Any = None
    one_of: _Values | None = None
    glob: str | None = None
    regex: str | None = None
    at_least: _Number | None = None
    at_most: _Number | None = None
    every: Matcher | None = None
    any: Matcher | None = None
    where: Conditions | None = None
    present: Annotated[bool, Strict()] | None = None

    @field_validator("every", "any", mode="before")
    @classmethod
    def _reject_null(cls, value: Any) -> Any:
        return ArgumentMatcher(equals=None) if value is None else value

    @field_validator("regex")
    @classmethod
    def _check_regex(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                compile_linear(value)
            except MissingExtraError:
                raise
            except ValueError as error:
                raise ValueError(f"this is not a valid regular expression of RE2: {error}") from None
        return value

    @model_validator(mode="after")
    def _require_condition(self) -> ArgumentMatcher:
        if not self.model_fields_set:
            raise ValueError(f"give at least one condition: {', '.join(type(self).model_fields)}")
        return self

    def conditions(self) -> dict[str, Any]:
        """The conditions that are given, by name."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def verdict(self, value: Any) -> bool | None:
        """Whether a JSON value meets the condition; None if that cannot be evaluated.

        Args:
            value: The value, or ``MISSING``, ``UNDECLARED`` or ``UNREADABLE`` in its place.
        """
        return all_hold(self._evaluate(name, value, limit) for name, limit in self.conditions().items())

    def _evaluate(self, name: str, value: Any, limit: Any) -> bool | None:
        if value is UNREADABLE:
            return None
        if name == "present":
            return bool(limit) is (value is not None and not isinstance(value, _NoValue))
        if isinstance(value, _NoValue):
            return False if value is UNDECLARED else None
        return _CONDITIONS[name][0](value, limit)

    def __str__(self) -> str:
        parts: list[str] = []
        for name, limit in self.conditions().items():
            if name == "present":
                parts.append("present" if limit else "absent or null")
            elif name == "where":
                parts.append("{" + ", ".join(f"{path} {each}" for path, each in limit.items()) + "}")
            else:
                shown = str(limit) if isinstance(limit, ArgumentMatcher) else _json_text(limit)
                parts.append(_CONDITIONS[name][1].format(shown))
        return " and ".join(parts)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


if TYPE_CHECKING:
    Matcher = ArgumentMatcher | str | float
    Conditions = Mapping[Any, Any]
    _Values = Collection[Any]
else:
    _Values = tuple[Any, ...]

    Matcher = Annotated[ArgumentMatcher, BeforeValidator(_expand)]
    """A matcher, or its short form: a text for ``glob``, another scalar for ``equals``."""

    Conditions = Annotated[dict[str, Matcher], BeforeValidator(_normal_conditions)]
    """Matchers by path, in the form that ``path_text`` writes; given with paths as text or as tuples of names."""

ArgumentMatcher.model_rebuild()
