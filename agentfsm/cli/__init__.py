"""The command line, ``agentfsm``: run an agent, resume a run, inspect stored runs, and draw or check a graph.

It needs the extra ``cli`` (click and rich); ``main`` prints how to install it if they are missing. No other
package imports this one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentfsm.errors import MissingExtraError

__all__ = ["main"]

_EXTRA_PACKAGES = ("click", "rich")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    The codes: 0 success, 1 the run did not complete, 2 wrong usage or configuration, 3 the run is suspended
    and waits for a person, 130 (SIGINT) or 143 (SIGTERM) interrupted.

    Args:
        args: The arguments after ``agentfsm``; those of the process by default.
    """
    try:
        from agentfsm.cli.app import run_app

        return run_app(args)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA_PACKAGES:
            raise
        print(f"agentfsm: {MissingExtraError('the command line', 'cli')}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first command started
        return 130
