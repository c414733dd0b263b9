"""What varies from run to run, validated: tags and metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from agentfsm.errors import RunError
from agentfsm.loop.state import NO_DETAILS, RunDetails

__all__ = ["run_details"]


def run_details(tags: Iterable[str], metadata: Mapping[str, Any]) -> RunDetails:
    """What a run is given beside its prompt, after checking it.

    Args:
        tags: Short texts by which the run is found.
        metadata: A JSON object.

    Raises:
        RunError: It is not what it must be; the error says where.
    """
    if not tags and not metadata:
        return NO_DETAILS
    return RunDetails(_valid_tags(tags), _valid_metadata(metadata))


def _valid_tags(tags: Any) -> tuple[str, ...]:
    """The tags, each once, in their order."""
    if isinstance(tags, (str, bytes)) or not hasattr(tags, "__iter__"):
        raise RunError(f"tags are a list of texts, as in tags=['billing'], not {tags!r}")
    names: tuple[Any, ...] = tuple(tags)
    for each in names:
        if not isinstance(each, str) or not each.strip():
            raise RunError(f"a tag is a text that is not blank, not {each!r}")
    return tuple(dict.fromkeys(names))


def _valid_metadata(metadata: Any) -> dict[str, Any]:
    """A copy of the metadata as plain JSON data."""
    if not hasattr(metadata, "items"):
        raise RunError(f"metadata is a JSON object, as in metadata={{'tenant': 7}}, not {type(metadata).__name__}")
    given: dict[Any, Any] = dict(metadata)
    for name in given:
        if not isinstance(name, str):
            raise RunError(f"the names in metadata are strings, not {name!r}")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"metadata is not JSON: {error}") from None
    return copied
