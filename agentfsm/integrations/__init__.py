"""Other people's standards, each in a module of its own and each behind an extra: MCP servers, OpenTelemetry."""
