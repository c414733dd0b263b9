"""Hooks in a picture: each at the door of its state, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentfsm.diagrams.view import View

__all__ = ["Doors"]


@dataclass(frozen=True, slots=True)
class Doors:
    """The hooks of an agent, beside what each state does; ``agent.diagram()`` lays it over.

    ::

        print(diagram(LOOP, "text", overlay=Doors({"dispatch_tool": ["permissions"]})))

    Attributes:
        hooks: Names of hooks by the state at whose door they stand, in order.
    """

    hooks: Mapping[str, Sequence[str]]

    def on(self, view: View) -> View:
        """The view with the names of its hooks in each box.

        Raises:
            GraphError: A hook stands at the door of a state that the graph does not have.
        """
        named = {str(view.graph.spec(state).name): names for state, names in self.hooks.items() if names}
        boxes = tuple(
            replace(box, spec=replace(box.spec, note=f"{', '.join(names)} \N{RIGHTWARDS ARROW} {box.note}".rstrip()))
            if (names := named.get(box.name))
            else box
            for box in view.boxes
        )
        count = sum(map(len, named.values()))
        caption = f"{view.caption}, {count} hook{'' if count == 1 else 's'}"
        return replace(view, boxes=boxes, caption=caption, overlaid=True)
