"""``python -m agentfsm.cli``: the command line, where its script is not on the path."""

import sys

from agentfsm.cli import main

sys.exit(main())
