"""The agent loop: its table, what a run knows, and how that changes. Pure data and pure functions, no I/O."""
