"""What sits in the model's seat in the demo: rules that read the tools' real results and decide.

It has no script: every call follows from what stands in the request. On purpose it also makes mistakes that
models make, each once, so that a run shows how the loop recovers from them.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from agentfsm.core.messages import FinishReason, Message, Reply, Role, ToolCall
from agentfsm.core.model import ModelRequest
from agentfsm.errors import TransientProviderError

__all__ = ["MISTAKES", "TASK", "StandIn"]

TASK = "Which Python modules of this folder are too long? Ask me how long one may be, and write a report."

MISTAKES = ("busy", "unknown tool", "wrong argument", "only talks", "no such file")
"""What goes wrong on purpose, in this order: the provider's 429, then four mistakes of the model."""

_PATTERN = "**/*.py"
_FILE_THAT_IS_NOT = "docs/STYLE_GUIDE.md"
_RETRY_AFTER_S = 2.0
_LIMIT = 300
_LOOKED_AT = 5

Said = str | list[ToolCall]


@dataclass
class _Seen:
    """What stands in a request, sorted for the rules: the calls made and their results, by tool."""

    good: dict[str, list[tuple[ToolCall, str]]] = field(default_factory=dict[str, list[tuple[ToolCall, str]]])
    bad: dict[str, str] = field(default_factory=dict[str, str])
    last: str = ""

    @classmethod
    def of(cls, request: ModelRequest) -> _Seen:
        seen = cls()
        calls = {c.id: c for m in request.messages for c in m.tool_calls}
        for message in request.messages:
            seen.last = message.content
            call = calls.get(message.tool_call_id or "")
            if message.role is Role.TOOL and call is not None:
                text = message.content.partition("\n[Note:")[0]
                if message.is_error:
                    seen.bad[call.name] = text
                else:
                    seen.good.setdefault(call.name, []).append((call, text))
        return seen

    def data(self, tool: str) -> Any:
        """The newest good result of a tool, read as JSON; None where there is none."""
        return json.loads(self.good[tool][-1][1]) if tool in self.good else None


class StandIn:
    """A model made of rules. The first rule that applies decides, as in the loop itself.

    Args:
        pace_s: Seconds that each reply takes, so that a person can follow.
        mistakes: Which of ``MISTAKES`` it makes.
    """

    name = "stand-in"

    def __init__(self, pace_s: float = 0.0, mistakes: tuple[str, ...] = MISTAKES) -> None:
        self._pace_s = pace_s
        self._mistakes = list(mistakes)
        self._calls = 0

    async def reply(self, request: ModelRequest) -> Reply:
        """Decide what to do next from what stands in the request.

        Raises:
            TransientProviderError: Once, on purpose: what a busy provider's 429 becomes.
        """
        await asyncio.sleep(self._pace_s)
        if self._makes("busy"):
            raise TransientProviderError("429: too many requests", retry_after_s=_RETRY_AFTER_S, status=429)
        said = self._decide(_Seen.of(request))
        if isinstance(said, str):
            return Reply(Message.assistant(said))
        return Reply(Message.assistant("", tuple(said)), FinishReason.TOOL_CALLS)

    def _makes(self, mistake: str) -> bool:
        """Whether a mistake is still to be made; it then is made."""
        if mistake not in self._mistakes:
            return False
        self._mistakes.remove(mistake)
        return True

    def _call(self, tool: str, **arguments: Any) -> ToolCall:
        self._calls += 1
        return ToolCall(f"call_{self._calls}", tool, arguments)

    # -- the rules ------------------------------------------------------------------------------------

    def _decide(self, seen: _Seen) -> Said:
        for rule in (self._look, self._count, self._talk, self._ask, self._inspect, self._report):
            said = rule(seen)
            if said:
                return said
        return [self._finish(seen)]

    def _look(self, seen: _Seen) -> Said | None:
        """List the files; a name that is no tool is mended with the names that the loop answers with."""
        if seen.data("list_files") is None:
            if self._makes("unknown tool"):
                return [self._call("list", pattern=_PATTERN)]
            offered = re.search(r"\blist\w+", seen.bad.get("list", ""))
            return [self._call(offered[0] if offered else "list_files", pattern=_PATTERN)]
        if not seen.data("list_files"):
            reason = f"no file here fits {_PATTERN}"
            steps = ["name a folder that holds Python modules: agentfsm demo FOLDER"]
            return [self._call("return_unable", rationale=reason, blockers=[reason], suggested_next_steps=steps)]
        return None

    def _count(self, seen: _Seen) -> Said | None:
        """Count the lines; a wrong argument is mended with the name that the loop asks for."""
        if seen.data("count_lines") is not None:
            return None
        wanted = re.search(r"(\w+): (?:field required|missing)", seen.bad.get("count_lines", ""))
        name = "files" if self._makes("wrong argument") else wanted[1] if wanted else "paths"
        return [self._call("count_lines", **{name: seen.data("list_files")})]

    def _talk(self, seen: _Seen) -> Said | None:
        """Say what comes next in place of doing it."""
        if not self._makes("only talks"):
            return None
        return f"I have counted the lines of {len(seen.data('count_lines'))} modules and will look at the longest next."

    def _ask(self, seen: _Seen) -> Said | None:
        """Ask how long a module may be; once more where the answer holds no number."""
        answers = seen.good.get("ask_user", [])
        if _number(seen) is not None or len(answers) > 1:
            return None
        lines = list(seen.data("count_lines").values())
        about = f"The longest of {len(lines)} modules has {max(lines)} lines, the middle one {median(lines):g}."
        if answers:
            about = f"I need a number; {answers[-1][1]!r} holds none."
        return [self._call("ask_user", question="How many lines may a module have?", context=about)]

    def _inspect(self, seen: _Seen) -> Said | None:
        """Look into the longest modules, all at once, and where the longest one is imported."""
        worst = _long(seen)[:_LOOKED_AT]
        if not worst or "read_file" in seen.good:
            return None
        if self._makes("no such file"):
            return [self._call("read_file", path=_FILE_THAT_IS_NOT)]
        stem = worst[0].rpartition("/")[2].removesuffix(".py")
        reads = [self._call("read_file", path=path, last=1) for path in worst]
        return [*reads, self._call("search_text", text=f"{stem} import", pattern=_PATTERN)]

    def _report(self, seen: _Seen) -> Said | None:
        if "write_report" in seen.good or "write_report" in seen.bad:
            return None
        return [self._call("write_report", name="report.md", text=_report(seen))]

    def _finish(self, seen: _Seen) -> ToolCall:
        written = seen.good.get("write_report")
        where = f"The report: {written[-1][1]}." if written else f"There is no report: {seen.bad['write_report']}"
        return self._call("return_done", output=f"{_verdict(seen)}\n{where}")


# -- what follows from the results ------------------------------------------------------------------------


def _number(seen: _Seen) -> int | None:
    for _, text in seen.good.get("ask_user", []):
        if found := re.search(r"\d+", text):
            return int(found[0])
    return None


def _limit(seen: _Seen) -> int:
    number = _number(seen)
    return _LIMIT if number is None else number


def _long(seen: _Seen) -> list[str]:
    """The modules with too many lines, the longest first."""
    counts: dict[str, int] = seen.data("count_lines")
    too_long = [path for path, lines in counts.items() if lines > _limit(seen)]
    return sorted(too_long, key=lambda path: (-counts[path], path))


def _verdict(seen: _Seen) -> str:
    counts: dict[str, int] = seen.data("count_lines")
    found = _long(seen)
    if not found:
        return f"None of {len(counts)} modules has more than {_limit(seen)} lines."
    longest = f"{found[0]} with {counts[found[0]]}"
    return f"{len(found)} of {len(counts)} modules have more than {_limit(seen)} lines; the longest is {longest}."


def _report(seen: _Seen) -> str:
    counts: dict[str, int] = seen.data("count_lines")
    heads = {str(call.arguments["path"]): text for call, text in seen.good.get("read_file", [])}
    too_long = _long(seen)
    rows = [f"| {path} | {counts[path]} | {_head(heads[path])} |" for path in too_long if path in heads]
    lines = ["# Modules that are too long", "", _verdict(seen)]
    if rows:
        lines += ["", "| module | lines | its first line |", "| --- | ---: | --- |", *rows]
        lines += ["", f"{len(too_long) - len(rows)} more are not shown."] if len(too_long) > len(rows) else []
        used = {place.rpartition(":")[0] for place in seen.data("search_text") or ()} - {too_long[0]}
        lines += ["", f"Other files that import the longest by its name: {len(used)}."]
    return "\n".join(lines) + "\n"


def _head(text: str) -> str:
    return text.strip().strip("\"#' ").replace("|", "\\|")
