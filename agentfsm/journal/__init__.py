"""Runs that outlive a crash and stand up to an audit: records in a chain, stores, verification, replay."""
