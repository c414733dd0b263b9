"""What a run knows and how it changes: pure data and pure functions, with no I/O."""
