"""Integrations with other standards, each an optional extra: MCP servers and OpenTelemetry."""
