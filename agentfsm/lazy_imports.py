"""Lazy exports: a package's public names, each imported from its module on first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a package whose names load on first use.

    Assign them under ``if not TYPE_CHECKING``, and import the same names under ``if TYPE_CHECKING``: a type checker
    that sees ``__getattr__`` accepts any name.

    Args:
        package: The package's ``__name__``.
        modules: The exported names, separated by spaces, by the module that defines them.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(module_of[name]), name)
        return value

    def names() -> list[str]:
        return sorted({*namespace, *module_of})

    return load, names
