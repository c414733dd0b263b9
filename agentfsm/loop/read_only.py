"""Read-only JSON values, and who tried to change one: user code cannot change what it receives of a run.

``freeze`` makes dicts and lists read-only, at every depth; ``read_only`` does the same for the fields of a class. They
remain dicts, lists and dataclasses for everything that only reads. An attempt at a change raises ``ReadOnlyError``. If
user code of a run makes it, it is also noted under that code's name, so that it ends the run even where the code
swallows the exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import field, fields, make_dataclass
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

from agentfsm.errors import ReadOnlyError

_T = TypeVar("_T")

_Caller = tuple[str, object, list[str]]
"""User code that runs: its role, the function or object, and the attempts in its run so far."""

_current: ContextVar[_Caller | None] = ContextVar("agentfsm_user_code", default=None)
"""The user code that runs now. Tasks that it starts inherit it."""


class user_code:  # noqa: N801  # used as ``with user_code(...)``
    """A block in which user code runs: what it tries to change is noted.

    Raises:
        ReadOnlyError: On leaving the block: there was an attempt, even if the code has handled that error.
    """

    __slots__ = ("_attempts", "_before", "_caller")
    _before: _Caller | None

    def __init__(self, role: str, function: object, attempts: list[str]) -> None:
        self._caller, self._attempts = (role, function, attempts), attempts

    def __enter__(self) -> None:
        self._before = _current.get()
        _current.set(self._caller)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.set(self._before)
        if self._attempts and (kind is None or issubclass(kind, Exception)):  # a cancellation comes first
            raise ReadOnlyError(self._attempts[0]) from error


def code_name(function: object) -> str:
    """The qualified name of user code, for errors: that of a function, or of an object's class."""
    function = getattr(function, "__func__", function)
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def refuse_change(what: str, attempts: list[str] | None = None) -> NoReturn:
    """Refuse a change, and note who tried.

    Args:
        what: The change, such as ``set 'state'``.
        attempts: Where to note it if it is not known which user code runs, as in a thread.

    Raises:
        ReadOnlyError: Always.
    """
    caller = _current.get()
    if caller is not None:
        role, function, attempts = caller
        attempts.append(f"{role} {code_name(function)} tried to change the run: {what}")
    elif attempts is not None:
        attempts.append(f"user code tried to change the run: {what}")
    raise ReadOnlyError(
        f"cannot {what}: it is read-only, and user code cannot change a run. Change a copy "
        "(copy.deepcopy, dataclasses.replace), or return a decision"
    )


def _refuse_method(kind: str, method: str) -> Any:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        refuse_change(f"change a {kind} ({method})")

    refuse.__name__ = method
    return refuse


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed, made by ``freeze``. Its copies are ordinary dicts."""

    __slots__ = ()

    __setitem__ = _refuse_method("dict", "__setitem__")
    __delitem__ = _refuse_method("dict", "__delitem__")
    __ior__ = _refuse_method("dict", "update")
    clear = _refuse_method("dict", "clear")
    pop = _refuse_method("dict", "pop")
    popitem = _refuse_method("dict", "popitem")
    setdefault = _refuse_method("dict", "setdefault")
    update = _refuse_method("dict", "update")

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: object) -> dict[str, Any]:
        return cast("dict[str, Any]", thaw(self))


class RefusesListChanges:
    """A base class of sequences that cannot be changed: every method of ``list`` that changes it raises."""

    __slots__ = ()

    __setitem__ = _refuse_method("list", "__setitem__")
    __delitem__ = _refuse_method("list", "__delitem__")
    __iadd__ = _refuse_method("list", "extend")
    __imul__ = _refuse_method("list", "extend")
    append = _refuse_method("list", "append")
    clear = _refuse_method("list", "clear")
    extend = _refuse_method("list", "extend")
    insert = _refuse_method("list", "insert")
    pop = _refuse_method("list", "pop")
    remove = _refuse_method("list", "remove")
    reverse = _refuse_method("list", "reverse")
    sort = _refuse_method("list", "sort")


class FrozenList(RefusesListChanges, list[Any]):
    """A list that cannot be changed, made by ``freeze``. Its copies are ordinary lists."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)

    def __copy__(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, memo: object) -> list[Any]:
        return cast("list[Any]", thaw(self))


_set_entry = cast("Callable[[dict[str, Any], str, Any], None]", getattr(dict, "__setitem__"))  # noqa: B009  # typed
_set_item = cast("Callable[[list[Any], int, Any], None]", getattr(list, "__setitem__"))  # noqa: B009

_ATOMS = frozenset({str, int, float, bool, type(None), FrozenDict, FrozenList})
"""The classes whose values need no freezing."""


MAX_NESTING = 100
"""How deeply the arguments of a call may be nested: far less than Python's recursion limit, so that all code can walk
them."""

_ANY_NESTING = 1000
"""More than Python's recursion limit lets ``freeze`` descend."""


def freeze(value: Any, levels: int = _ANY_NESTING) -> Any:
    """A value with read-only copies of its mappings, lists and tuples; anything else in it stays as it is.

    Raises:
        RecursionError: It contains itself, or is nested too deeply.
    """
    kind = value.__class__
    if kind in _ATOMS:
        return value
    if not levels:
        raise RecursionError("nested too deeply")
    if kind is dict or issubclass(kind, Mapping):
        frozen = FrozenDict(value)
        if not _ATOMS.issuperset(map(type, frozen.values())):
            for name, item in frozen.items():
                if item.__class__ not in _ATOMS:
                    _set_entry(frozen, name, freeze(item, levels - 1))  # the key exists: the size does not change
        return frozen
    if isinstance(value, list):
        items = FrozenList(cast("list[object]", value))
        for index, item in enumerate(items):
            if item.__class__ not in _ATOMS:
                _set_item(items, index, freeze(item, levels - 1))
        return items
    return tuple(freeze(item, levels - 1) for item in value) if kind is tuple else value


_VALUES = frozenset({str, int, float, bool, type(None)})


def contains_objects(frozen: Any) -> bool:
    """Whether a frozen value contains an object that ``freeze`` cannot make read-only."""
    kind = frozen.__class__
    if kind is FrozenDict:
        return any(item.__class__ not in _VALUES and contains_objects(item) for item in frozen.values())
    if kind is FrozenList or kind is tuple:
        return any(item.__class__ not in _VALUES and contains_objects(item) for item in frozen)
    return kind not in _VALUES


def freeze_field(self: object, name: str, levels: int = _ANY_NESTING) -> None:
    """Freeze a field of a frozen dataclass, in its ``__post_init__``. One nested too deeply stays as it is."""
    value = getattr(self, name)
    if value.__class__ not in _ATOMS:
        object.__setattr__(self, name, freeze_if_shallow(value, levels))


def freeze_if_shallow(value: Any, levels: int = _ANY_NESTING) -> Any:
    """As ``freeze``, but a value that is nested too deeply is returned as it is."""
    try:
        return freeze(value, levels)
    except RecursionError:
        return value


def thaw(value: Any) -> Any:
    """A copy of a frozen value that may be changed, at every depth."""
    if isinstance(value, dict):
        return {name: thaw(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [thaw(item) for item in cast("list[object]", value)]
    return tuple(map(thaw, value)) if value.__class__ is tuple else value


def plain_value(cls: type[_T], value: _T) -> _T:
    """A value of exactly a class: itself, or a new one with the fields that a value of a subclass has now.

    Args:
        cls: A frozen dataclass.
        value: A value of it, or of a user class whose fields might change.
    """
    if value.__class__ is cls:
        return value
    return cls(*(getattr(value, name) for name in getattr(cls, "__match_args__")))  # noqa: B009  # of a dataclass


def _refuse_set(self: object, name: str, value: object) -> NoReturn:
    refuse_change(f"set {name!r} of {type(self).__name__}")


def _refuse_delete(self: object, name: str) -> NoReturn:
    refuse_change(f"delete {name!r} of {type(self).__name__}")


def _itself(self: _T, memo: object) -> _T:
    return self


def read_only(cls: type[_T]) -> type[_T]:
    """Decorator for frozen dataclasses and models that user code receives: attempts to set a field are noted."""
    cls.__setattr__ = _refuse_set  # type: ignore[method-assign]
    cls.__delattr__ = _refuse_delete  # type: ignore[method-assign]
    cls.__deepcopy__ = _itself  # type: ignore[attr-defined]  # it cannot change: it is its own copy, as a tuple is
    return cls


def quick_constructor(cls: type[_T], *, checks: bool = True) -> type[_T]:
    """A quicker constructor of a frozen dataclass with slots, for objects that every step of a run makes.

    The class's own takes 0.1 microseconds a field, since it gets round the ``__setattr__`` that refuses changes. This
    one fills an object of a class with the same slots that is not frozen, and turns it into one of the frozen class.
    Names of arguments cost as much as they save.

    Args:
        cls: The class.
        checks: Whether its ``__post_init__`` is called; False where all arguments are as it would leave them.
    """
    post_init: Any = getattr(cls, "__post_init__", None) if checks else None

    def turn(self: _T) -> None:
        self.__class__ = cls

    def turn_and_finish(self: _T) -> None:
        self.__class__ = cls
        post_init(self)

    own_fields: list[tuple[str, Any, Any]] = [
        (each.name, each.type, field(default=each.default, default_factory=each.default_factory))
        for each in fields(cast("Any", cls))
    ]
    made = make_dataclass(
        cls.__name__,
        own_fields,
        bases=cls.__bases__,
        namespace={"__post_init__": turn if post_init is None else turn_and_finish},
        slots=True,
        eq=False,
        repr=False,
        match_args=False,
    )
    return cast("type[_T]", made)
