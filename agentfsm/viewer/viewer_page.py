"""What a page of the viewer is, and what its handlers answer with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from agentfsm.report.visible_text import visible

__all__ = ["Page", "PageError", "json_response", "markup_response", "shown"]


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its address, its ES module, and what that module asks the server for.

    Attributes:
        path: Its address below the viewer's, such as ``/run``.
        title: Its heading, and its name in the menu.
        script: The file of its ES module in ``static``.
        routes: What the module asks for, below ``/api``. Only what uses POST may change anything.
        in_menu: Whether the menu has it.
    """

    path: str
    title: str
    script: str
    routes: Sequence[BaseRoute]
    in_menu: bool = True


class PageError(Exception):
    """A request is refused, and the page says why.

    Args:
        status: The status of the answer.
        message: What is wrong, and what to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def shown(value: Any) -> Any:
    """A JSON value in which every text shows its hidden characters by their codes, as ``visible`` does."""
    match value:
        case str():
            return visible(value)
        case Mapping():
            return {visible(str(name)): shown(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return [shown(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def json_response(data: Any, status: int = 200) -> Response:
    """An answer in JSON; lone surrogates are escaped, as everything that is not ASCII is."""
    return Response(json.dumps(data, default=str), status, media_type="application/json")


def markup_response(markup: str, media_type: str = "text/html") -> Response:
    """An answer that is a fragment of HTML, or a picture, in which everything is escaped already."""
    return Response(markup.encode("utf-8", "replace"), media_type=media_type)
