"""Whether two guards or effects have the same code, in one process or against a digest that was written to a file.

Compared are the instructions, the constants and the defaults of a function, what its closure holds, and what it uses
of its module: constants, and the code of your own functions and classes, however deep, with the attributes and bases of
classes. What other objects hold is not compared: it may change while they are used. Names, comments, docstrings,
annotations and lines do not count, and a function that only passes its arguments on is the one that it calls. Code of
the standard library, of installed packages and of this package is compared by name, unless it is the guard itself.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import hashlib
import inspect
import re
import sys
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from textwrap import dedent
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast
from uuid import UUID

from pydantic import BaseModel

Body = Callable[[FunctionType], object]

_MAX_DEPTH = 12
"""How deep the values that a function uses are compared; data of this depth is not a constant."""

_LOCAL_NAMES = frozenset(dis.haslocal)
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_OPPOSITES = {
    "POP_JUMP_IF_TRUE": "POP_JUMP_IF_FALSE",
    "POP_JUMP_IF_FALSE": "POP_JUMP_IF_TRUE",
    "POP_JUMP_IF_NONE": "POP_JUMP_IF_NOT_NONE",
    "POP_JUMP_IF_NOT_NONE": "POP_JUMP_IF_NONE",
}
_PLAIN_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...))
_VALUES: tuple[type, ...] = (
    *(Decimal, Fraction, date, time, timedelta, tzinfo, UUID, PurePath, re.Pattern, range),
    *(attrgetter, itemgetter, methodcaller),
)
"""Their text says all that they are."""
_PARTIAL = (functools.partial, functools.partialmethod)
_CACHED = type(lru_cache(lambda: None))


class DigestOnly:
    """A guard or an effect of which only its name and perhaps the digest of its code are known."""

    def __init__(self, name: str, digest: str = "") -> None:
        self.__name__ = name
        self.digest = digest

    def __call__(self, run: object) -> bool:
        """Cannot be evaluated.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"{self.__name__!r} is known by its name only and cannot be evaluated")


def same_code(old: object, new: object) -> bool | None:
    """Whether two functions do the same, as far as their code says; None if the code of one is not known."""
    if old is new:
        return True
    sources = isinstance(old, DigestOnly) or isinstance(new, DigestOnly)
    keys = code_key(old, sources=sources), code_key(new, sources=sources)
    return None if "" in keys else keys[0] == keys[1]


def code_key(function: object, *, sources: bool) -> str:
    """A text that is equal for functions with the same code; empty if the code is not known.

    Args:
        function: A guard or an effect.
        sources: Whether to compare sources, because of some functions only digests are known, or what really runs.
    """
    return code_digest(function) if sources else _hash(_Description(_instructions).of(function))


def code_digest(function: object) -> str:
    """A digest of a function's source, which is the same in every version of Python; empty if there is no source."""
    if isinstance(function, DigestOnly):
        return function.digest
    try:
        described = _Description(_syntax).of(function)
    except (OSError, TypeError, SyntaxError, LookupError):
        return ""
    return _hash(described)


def _hash(described: object) -> str:
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


class _Description:
    """Turns a function, and what it uses, into nested tuples that are equal for equal code."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._places: dict[int, int] = {}
        self._package = ""

    def of(self, value: object) -> object:
        """The description of a guard or an effect."""
        value = _without_wrapper(value)
        target = value if isinstance(value, (FunctionType, type)) else type(value)
        self._package = _package(target)
        if _is_plain_object(value):
            return self._object(value, 0)
        return self._value(value, 0)

    def _object(self, value: object, depth: int) -> object:
        return ("object", self._value(type(value), depth), self._mapping(_state(value), depth))

    def _value(self, value: object, depth: int) -> object:
        if isinstance(value, Enum):
            return ("enum", type(value).__qualname__, value.name)
        if isinstance(value, (*_PLAIN, *_VALUES)):
            return (type(value).__name__, repr(value))
        if isinstance(value, ModuleType):
            return ("module", "" if self._is_followed(value) else value.__name__)
        if depth > _MAX_DEPTH:
            return ("too deep", type(value).__qualname__)
        if isinstance(value, _CACHED):
            return self._value(value.__wrapped__, depth)
        if isinstance(value, (FunctionType, MethodType, *_PARTIAL, type)):
            return self._code(value, depth)
        if isinstance(value, SimpleNamespace):
            return ("namespace", self._mapping(vars(value), depth))
        if isinstance(value, (tuple, list, deque)):
            items = cast("tuple[object, ...]", value)
            return (type(items).__name__, tuple(self._value(item, depth + 1) for item in items))
        if isinstance(value, (set, frozenset)):
            members = cast("frozenset[object]", value)
            return (type(members).__name__, tuple(sorted(repr(self._value(item, depth + 1)) for item in members)))
        if isinstance(value, defaultdict):
            values = cast("defaultdict[object, object]", value)
            return ("defaultdict", self._value(values.default_factory, depth + 1), self._mapping(values, depth))
        if isinstance(value, Mapping):
            return ("mapping", self._mapping(cast("Mapping[object, object]", value), depth))
        if dataclasses.is_dataclass(value) or isinstance(value, BaseModel):
            return ("data", type(value).__qualname__, self._mapping(_state(value), depth))
        if self._is_followed(type(value)):
            return ("instance", self._value(type(value), depth + 1))  # what it holds may change while it is used
        if _is_hashed_by_value(type(value)):
            return (type(value).__qualname__, repr(value))
        return (type(value).__module__, type(value).__qualname__)

    def _mapping(self, values: Mapping[Any, object], depth: int) -> object:
        return tuple((repr(key), self._value(value, depth + 1)) for key, value in values.items())

    def _code(self, value: Any, depth: int) -> object:
        """The description of something that has code."""
        if isinstance(value, MethodType):
            return ("method", self._value(value.__func__, depth), self._object(value.__self__, depth))
        if isinstance(value, _PARTIAL):
            parts = cast("functools.partial[object]", value)
            return ("partial", *(self._value(part, depth + 1) for part in (parts.func, parts.args, parts.keywords)))
        if (depth and not self._is_followed(value)) or (isinstance(value, type) and _package(value) == "agentfsm"):
            return ("named", value.__module__, value.__qualname__)
        if id(value) in self._places:  # it uses itself, or was described already
            return ("see", self._places[id(value)])
        self._places[id(value)] = len(self._places)
        if isinstance(value, type):
            bases = tuple(self._value(base, depth + 1) for base in value.__bases__ if base is not object)
            return ("class", value.__qualname__, self._mapping(_members(value), depth), bases)
        function = cast("FunctionType", value)
        defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
        return (
            "function",
            self._body(function),
            tuple(self._value(part, depth + 1) for part in defaults),
            tuple(self._cell(cell, depth) for cell in function.__closure__ or ()),
            tuple((name, self._value(used, depth + 1)) for name, used in _used_globals(function)),
        )

    def _cell(self, cell: Any, depth: int) -> object:
        try:
            return self._value(cell.cell_contents, depth + 1)
        except ValueError:  # the cell is empty: the variable has no value yet
            return ("empty",)

    def _is_followed(self, value: Any) -> bool:
        """Whether code is compared itself, and not by its name: your own code is."""
        package = _package(value)
        if package == self._package:
            return True
        if package == "agentfsm" or package in sys.stdlib_module_names:
            return False
        module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
        return "site-packages" not in str(getattr(module, "__file__", "site-packages"))


def _package(value: Any) -> str:
    return str(value.__name__ if isinstance(value, ModuleType) else value.__module__).partition(".")[0]


def _is_hashed_by_value(kind: Any) -> bool:
    """Whether a class of the standard library is one whose objects never change and say what they are."""
    plain: Any = object
    by_value = kind.__hash__ not in (None, plain.__hash__) and kind.__repr__ is not plain.__repr__
    return by_value and _package(kind) in sys.stdlib_module_names


def _is_plain_object(value: object) -> bool:
    """Whether a guard is an object with ``__call__``: neither a function, a method, a partial nor a class."""
    return callable(value) and not isinstance(value, (FunctionType, MethodType, functools.partial, type))


def _state(value: object) -> dict[str, object]:
    """What an object holds, without names and documentation."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    values = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return {name: held for name, held in sorted(values.items()) if not (name.startswith("__") and name.endswith("__"))}


def _members(kind: type) -> dict[str, object]:
    """What a class defines itself: its methods, and its attributes without those of Python."""
    found: dict[str, object] = {}
    for name, member in vars(kind).items():
        if isinstance(member, (staticmethod, classmethod)):
            found[name] = cast("Any", member).__func__
        elif isinstance(member, property):
            found[name] = (member.fget, member.fset)
        elif isinstance(member, functools.cached_property):
            found[name] = cast("Any", member).func
        elif isinstance(member, FunctionType) or not (name.startswith("__") and name.endswith("__")):
            found[name] = member
    return found


def _used_globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """What a function uses of its module, by name, and of your own modules that it names."""
    for name, attribute in _global_names(function.__code__):
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if not attribute:
            yield name, value
        elif isinstance(value, ModuleType) and hasattr(value, attribute):
            yield f"{name}.{attribute}", getattr(value, attribute)


@lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> tuple[tuple[str, str], ...]:
    """The global names that a code object uses, and the attributes that it reads of them directly."""
    found: dict[tuple[str, str], None] = {}
    for each in _nested(code):
        name = ""
        for step in dis.get_instructions(each):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name = str(step.argval)
                found[name, ""] = None
                continue
            if name and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                found[name, str(step.argval)] = None
            name = ""
    return tuple(sorted(found))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _instructions(function: FunctionType) -> object:
    """A function's instructions, with what they refer to; without what only says where a line begins."""
    return _code_object(function.__code__)


@lru_cache(maxsize=4096)
def _code_object(code: CodeType) -> object:
    bytecode = dis.Bytecode(code)
    steps = _direct_jumps([s for s in bytecode if s.opname not in ("NOP", "EXTENDED_ARG", "CACHE", "RESUME")])
    offsets = [step.offset for step in steps]
    local_names: dict[object, int] = {}
    described: list[object] = []
    for step in steps:
        argument: object = step.argval
        if isinstance(argument, CodeType):
            argument = _code_object(argument)
        elif step.opcode in _JUMPS:
            argument = bisect_left(offsets, step.argval)
        elif step.opcode in _LOCAL_NAMES:
            argument = local_names.setdefault(argument, len(local_names))
        described.append((step.opname, _constant(argument)))
    handlers = _handlers(getattr(bytecode, "exception_entries", ()), offsets)
    flags = code.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return (code.co_argcount, code.co_kwonlyargcount, flags, tuple(described), handlers)


def _direct_jumps(steps: list[dis.Instruction]) -> list[dis.Instruction]:
    """The steps, with each conditional jump going where it ends: Python 3.12 lets some take detours, by their lines."""
    offsets, targets = [step.offset for step in steps], {step.argval for step in steps if step.opcode in _JUMPS}
    direct: list[dis.Instruction] = []
    for index, step in enumerate(steps):
        before = direct[-1] if direct else step
        if step.opname in _OPPOSITES:
            direct.append(step._replace(argval=_end_of_jump(step, steps, offsets)))
        elif (
            step.opname in _PLAIN_JUMPS
            and step.offset not in targets
            and before.opname in _OPPOSITES
            and bisect_left(offsets, before.argval) == index + 1
        ):
            direct[-1] = before._replace(opname=_OPPOSITES[before.opname], argval=step.argval)
        else:
            direct.append(step)
    return direct


def _end_of_jump(jump: dis.Instruction, steps: list[dis.Instruction], offsets: list[int]) -> int:
    """The offset where a jump ends that may lead to other jumps."""
    for _ in steps:  # a loop that does nothing is a jump to itself
        after = bisect_left(offsets, jump.argval)
        if after == len(steps) or steps[after].opname not in _PLAIN_JUMPS:
            break
        jump = steps[after]
    return cast("int", jump.argval)


def _handlers(entries: Iterable[Any], offsets: list[int]) -> tuple[tuple[int, ...], ...]:
    """The ranges of steps with an exception handler, and its place; one range for two without a step between them."""
    found: list[tuple[int, ...]] = []
    for entry in entries:
        start, end = bisect_left(offsets, entry.start), bisect_left(offsets, entry.end)
        handler = (bisect_left(offsets, entry.target), entry.depth)
        if found and found[-1][1:] == (start, *handler):
            start = found.pop()[0]
        found.append((start, end, *handler))
    return tuple(found)


def _constant(value: object) -> object:
    """A constant with its type: 1, 1.0 and True are equal, and not the same."""
    if isinstance(value, (tuple, frozenset)):
        members = [_constant(item) for item in cast("tuple[object, ...]", value)]
        if isinstance(value, frozenset):
            return ("frozenset", tuple(sorted(members, key=repr)))
        return ("tuple", tuple(members))
    return (type(value).__name__, repr(value))


def _without_wrapper(value: object) -> object:
    """A function that only passes its arguments on to another one does what that one does."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(value, FunctionType) or value.__closure__ or value.__defaults__ or value.__kwdefaults__:
            break
        try:
            node = _definition(value)
        except (OSError, TypeError, SyntaxError, LookupError):
            break
        match _statements(node) if isinstance(node, ast.FunctionDef) else []:
            case [ast.Return(value=ast.Call(func=ast.Name() | ast.Attribute() as called, args=passed, keywords=[]))]:
                pass
            case _:
                break
        own = value.__code__.co_varnames[: value.__code__.co_argcount]
        if (
            [n.id if isinstance(n, ast.Name) else "" for n in passed] != list(own)
            or node.args.vararg
            or node.args.kwarg
        ):
            break
        target = dict(_used_globals(value)).get(ast.unparse(called))
        if not isinstance(target, FunctionType):
            break
        value = target
    return value


def _syntax(function: FunctionType) -> object:
    """A function's syntax tree as nested tuples.

    Raises:
        OSError: There is no source.
        SyntaxError: The source cannot be read by itself, as that of a lambda.
    """
    node = _definition(function)
    return (type(node).__name__, _tree(node.args), tuple(_tree(statement) for statement in _statements(node)))


def _definition(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef:
    node = parsed_statement(function.__code__)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise SyntaxError(f"{function.__qualname__} is not defined by a statement")
    return node


@lru_cache(maxsize=4096)
def parsed_statement(code: CodeType) -> ast.stmt | None:
    """The statement that a code object comes from; None if its source cannot be read."""
    try:
        return ast.parse(dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None


def _statements(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """The body of a function without its docstring."""
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
        case _:
            return node.body


def _tree(node: object) -> object:
    if isinstance(node, list):
        return tuple(_tree(item) for item in cast("list[object]", node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, getattr(node, name, None)) for name in node._fields if name not in ("annotation", "ctx", "kind"))
    return (type(node).__name__, *((name, _tree(value)) for name, value in fields if value not in (None, [])))
