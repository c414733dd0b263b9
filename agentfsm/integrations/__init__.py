"""Integrations with other standards, each behind an extra: MCP servers, OpenTelemetry."""
