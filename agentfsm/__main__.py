"""``python -m agentfsm``: the command line, for systems where the ``agentfsm`` script is not on the path."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from agentfsm.cli import main

    sys.exit(main())
