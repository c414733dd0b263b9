"""Durable execution: hash-chained records, stores, resuming, verification, replay, migration and redaction."""
