"""Durable runs: hash-chained records, stores, verification, replay and redaction."""
