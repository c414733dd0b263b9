"""Guards of which at most one can hold, found by reading their source.

A guard holds only if its ``return`` gives something true. From the source follows what must then be equal to what:
``return run.action is Action.stop`` holds only where ``run.action`` is ``stop``. Two guards that need the same value to
be equal to different constants exclude each other. What the source does not say plainly (a loop, a call of a method, a
variable that is set twice) is taken to allow anything, so guards are never called exclusive without a reason.

That rests on what guards promise: they read the run, which is plain data, and change nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from types import FunctionType, ModuleType
from typing import cast

from agentfsm.analysis.code_comparison import parsed_statement

Constants = frozenset[object]
Required = Mapping[str, Constants]
"""What must be equal to one of which constants, by the path that is read (``run.action``)."""

_MAX_CALLS = 4
"""How deep functions that a guard calls are read."""


@dataclass(frozen=True)
class _Path:
    """A value read from the run."""

    text: str


@dataclass(frozen=True)
class _Constant:
    """A value that never changes."""

    value: object


_Value = _Path | _Constant | None
"""What an expression is known to be; None if that is not known."""


def are_disjoint(first: Required, second: Required) -> bool:
    """Whether no run has the values that both of two guards require, so that they never hold together."""
    return any(path in second and first[path].isdisjoint(second[path]) for path in first)


def required_values(guard: object) -> Required:
    """What must be equal to what wherever a guard holds; empty if its source does not say."""
    if not isinstance(guard, FunctionType) or guard.__code__.co_argcount != 1:
        return {}
    return _Reader(guard, 0).read([_Path("run")])


class _Reader:
    """Reads one function."""

    def __init__(self, function: FunctionType, depth: int) -> None:
        self._function, self._depth = function, depth
        self._known: dict[str, _Value] = {}

    def read(self, arguments: Sequence[_Value]) -> Required:
        """What must hold where the function, called with these arguments, returns something true."""
        node = _definition(self._function)
        if node is None or len(arguments) != self._function.__code__.co_argcount:
            return {}
        names = self._function.__code__.co_varnames[: len(arguments)]
        assigned = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
        self._known = {n: (v if n not in assigned else None) for n, v in zip(names, arguments, strict=True)}
        self._known |= {name: None for name in assigned if name not in names}
        self._once = {name for name in assigned if assigned.count(name) == 1 and name not in names}
        return _any_of(list(self._walk(node.body, {})))

    def _walk(self, body: Sequence[ast.stmt], before: Required) -> Iterator[Required]:
        """What must hold at each ``return`` of something that may be true."""
        for statement in body:
            match statement:
                case ast.Return(value=value):
                    if value is not None and not self._is_false(value):
                        yield _both(before, self._where_true(value))
                    return
                case ast.If(test=test, body=inner, orelse=other):
                    yield from self._walk(inner, _both(before, self._where_true(test)))
                    yield from self._walk(other, _both(before, self._where_false(test)))
                    if _always_leaves(inner):
                        before = _both(before, self._where_false(test))
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in self._once:
                    self._known[name] = self._value(value)
                case ast.Expr(value=ast.Constant()) | ast.Pass():
                    pass
                case _:
                    if any(isinstance(n, ast.Return) for n in ast.walk(statement)):
                        yield {}

    def _where_true(self, node: ast.expr) -> Required:
        match node:
            case ast.BoolOp(op=ast.And(), values=values):
                return reduce(_both, map(self._where_true, values))
            case ast.BoolOp(op=ast.Or(), values=values):
                return _any_of([self._where_true(value) for value in values if not self._is_false(value)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._where_false(operand)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                ways = [(self._where_true(test), body), (self._where_false(test), orelse)]
                return _any_of([_both(way, self._where_true(v)) for way, v in ways if not self._is_false(v)])
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is() | ast.In() as op], comparators=[right]):
                return self._equal(left, right, within=isinstance(op, ast.In))
            case ast.Call(func=function, args=arguments, keywords=[]):
                return self._called(function, arguments)
            case _:
                return {}

    def _where_false(self, node: ast.expr) -> Required:
        match node:
            case ast.BoolOp(op=ast.Or(), values=values):
                return reduce(_both, map(self._where_false, values))
            case ast.BoolOp(op=ast.And(), values=values):
                return _any_of([self._where_false(value) for value in values])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._where_true(operand)
            case ast.Compare(left=left, ops=[ast.NotEq() | ast.IsNot() | ast.NotIn() as op], comparators=[right]):
                return self._equal(left, right, within=isinstance(op, ast.NotIn))
            case _:
                return {}

    def _equal(self, left: ast.expr, right: ast.expr, *, within: bool) -> Required:
        if within:
            path, values = self._value(left), self._constants(right)
            return {path.text: values} if isinstance(path, _Path) and values is not None else {}
        for one, other in ((self._value(left), self._value(right)), (self._value(right), self._value(left))):
            if isinstance(one, _Path) and isinstance(other, _Constant) and _is_simple(other.value):
                return {one.text: frozenset((other.value,))}
        return {}

    def _constants(self, node: ast.expr) -> Constants | None:
        if not isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            value = self._value(node)
            members = value.value if isinstance(value, _Constant) else None
            if isinstance(members, (tuple, frozenset)) and all(map(_is_simple, cast("tuple[object, ...]", members))):
                return frozenset(cast("tuple[object, ...]", members))
            return None
        values = [self._value(item) for item in node.elts]
        if not all(isinstance(value, _Constant) and _is_simple(value.value) for value in values):
            return None
        return frozenset(value.value for value in values if isinstance(value, _Constant))

    def _called(self, function: ast.expr, arguments: Sequence[ast.expr]) -> Required:
        called = self._value(function)
        if called == _Constant(bool) and len(arguments) == 1:
            return self._where_true(arguments[0])
        target = called.value if isinstance(called, _Constant) else None
        if not isinstance(target, FunctionType) or self._depth >= _MAX_CALLS:
            return {}
        return _Reader(target, self._depth + 1).read([self._value(argument) for argument in arguments])

    def _is_false(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Constant) and not node.value

    def _value(self, node: ast.expr) -> _Value:
        """What an expression is known to be."""
        match node:
            case ast.Constant(value=value):
                return _Constant(value)
            case ast.Name(id=name):
                if name in self._known:
                    return self._known[name]
                return self._global(name)
            case ast.Attribute(value=owner, attr=attribute):
                return _attribute(self._value(owner), attribute)
            case _:
                return None

    def _global(self, name: str) -> _Value:
        if name in self._function.__code__.co_freevars:
            cells = dict(zip(self._function.__code__.co_freevars, self._function.__closure__ or (), strict=False))
            return _Constant(cells[name].cell_contents)
        if name in self._function.__globals__:
            return _Constant(self._function.__globals__[name])
        return _Constant(bool) if name == "bool" else None


def _attribute(owner: _Value, name: str) -> _Value:
    if isinstance(owner, _Path):
        return _Path(f"{owner.text}.{name}")
    held = None if owner is None else owner.value
    if isinstance(held, type) and issubclass(held, Enum) and name in held.__members__:
        return _Constant(held.__members__[name])
    return _Constant(getattr(held, name, None)) if isinstance(held, ModuleType) else None


def _is_simple(value: object) -> bool:
    """Whether a value is equal to another only if it is the same constant."""
    return value is None or isinstance(value, (bool, int, str, Enum))


def _definition(function: FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a plain function; None if its source cannot be read."""
    node = parsed_statement(function.__code__)
    return node if isinstance(node, ast.FunctionDef) and node.name == function.__code__.co_name else None


def _always_leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Return, ast.Raise))


def _both(a: Required, b: Required) -> dict[str, Constants]:
    """What must hold where both must."""
    return {
        path: a[path] & b[path] if path in a and path in b else (a.get(path) or b.get(path) or frozenset())
        for path in {**a, **b}
    }


def _any_of(ways: Sequence[Required]) -> dict[str, Constants]:
    """What must hold where one of them must."""
    if not ways:
        return {}
    return {
        path: reduce(lambda x, y: x | y, [way[path] for way in ways])
        for path in ways[0]
        if all(path in w for w in ways)
    }
