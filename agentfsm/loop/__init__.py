"""The agent loop: its table, the state of a run, and how it changes. Pure data and pure functions, no I/O."""
