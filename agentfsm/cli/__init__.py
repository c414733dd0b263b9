"""The command line, ``agentfsm``: a demo, a run with any model, a resumed run, pictures of graphs.

It needs the extra ``cli`` (click and rich); ``main`` says so where they are missing. Nothing imports this
package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentfsm.errors import MissingExtraError

__all__ = ["main"]

_EXTRA_PACKAGES = ("click", "rich")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code.

    The codes: 0 it worked, 1 the run did not complete, 2 wrong usage or setup, 3 the run is suspended and
    waits for a person, 130 (or 143) it was interrupted.

    Args:
        args: The words behind ``agentfsm``; those of the process unless given.
    """
    try:
        from agentfsm.cli.app import run_app

        return run_app(args)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA_PACKAGES:
            raise
        print(f"agentfsm: {MissingExtraError('the command line', 'cli')}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first command began
        return 130
