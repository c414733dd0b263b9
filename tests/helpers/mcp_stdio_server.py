"""An MCP server over stdio, with only the standard library, that misbehaves on demand.

    python mcp_stdio_server.py FOLDER

It writes every message that it gets to ``FOLDER/log.jsonl``, and takes the descriptions of its tools from
``FOLDER/descriptions.json``, read anew whenever it is asked for its list; null leaves a tool out. While there is a file
``FOLDER/no_list``, it refuses to give its list.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[-1])
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
ECHO: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 1, "x-note": "kept"},
        "times": {"$ref": "#/$defs/times", "default": 1},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"times": {"type": "integer", "minimum": 1}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS: dict[str, dict[str, Any]] = {
    "echo": ECHO,
    "die": NOTHING,
    "hang": NOTHING,
    "refuse": NOTHING,
    "reject": NOTHING,
    "many/parts": NOTHING,
    "odd_schema": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/never.json"}}},
    "tell_change": NOTHING,
    "pid": NOTHING,
}


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text_content(words: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}]}


def tools() -> list[dict[str, Any]]:
    said = json.loads((FOLDER / "descriptions.json").read_text())
    own = FOLDER / "schemas.json"  # of further tools: input and output schema, by name
    schemas: dict[str, dict[str, Any]] = json.loads(own.read_text()) if own.exists() else {}
    every = [{"name": n, "description": said.get(n, f"Does {n}."), "inputSchema": s} for n, s in TOOLS.items()]
    every += [{"name": name, **each} for name, each in schemas.items()]
    return [t for t in every if t.get("description", "") is not None]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    match name:
        case "echo":
            return text_content(" ".join([arguments["text"]] * arguments.get("times", 1)))
        case "die":
            os._exit(3)
        case "hang":
            return None
        case "refuse":
            return {**text_content("there is no paper"), "isError": True}
        case "many/parts":
            return {
                "content": [
                    {"type": "text", "text": "a picture:"},
                    {"type": "image", "data": PIXEL, "mimeType": "image/png"},
                    {"type": "resource", "resource": {"uri": "file:///a", "text": "inside a"}},
                    {"type": "resource", "resource": {"uri": "file:///b", "blob": "AAEC"}},
                    {"type": "resource_link", "uri": "file:///c", "name": "c", "description": "the third"},
                ],
                "structuredContent": {"n": 1},
            }
        case "tell_change":
            send({"method": "notifications/tools/list_changed"})
            return text_content("told")
        case "pid":
            return text_content(str(os.getpid()))
        case "word":
            return text_content(str(os.environ.get("WORD")))
        case "strange":
            return {"content": [{"type": "hologram", "data": "secret-of-the-tool"}]}
        case "both":
            return {"content": [{"type": "text", "text": "in words"}], "structuredContent": {"in": "data"}}
        case "long":
            text = " ".join(f"word{n}" for n in range(11_800))
            return {"content": [{"type": "text", "text": text}], "structuredContent": {"result": text}}
        case "structured":
            return {"content": [], "structuredContent": {"a": "a" * 35 + "!"}}
        case _:
            return text_content(f"did {name}")


def respond(message: dict[str, Any]) -> dict[str, Any] | None:
    """The response to a request: a result, an error, or None for none."""
    params: dict[str, Any] = message.get("params") or {}
    match message["method"]:
        case "initialize":
            result: dict[str, Any] = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "fake", "version": "1"},
            }
        case "tools/list" if (FOLDER / "no_list").exists():
            return {"error": {"code": -32603, "message": "the list is being printed"}}
        case "tools/list":
            every = tools()  # two pages
            result = {"tools": every[3:]} if params.get("cursor") else {"tools": every[:3], "nextCursor": "more"}
        case "tools/call" if params["name"] == "reject":
            return {"error": {"code": -32603, "message": "the printer is on fire"}}
        case "tools/call":
            outcome = call(params["name"], params.get("arguments") or {})
            if outcome is None:
                return None
            result = outcome
        case _:
            return {"error": {"code": -32601, "message": "Method not found"}}
    return {"result": result}


def main() -> None:
    sys.stderr.write("noise on stderr\n")
    with (FOLDER / "log.jsonl").open("a") as log:
        for line in sys.stdin:
            log.write(line)
            log.flush()
            message = json.loads(line)
            if "id" in message and "method" in message and (said := respond(message)) is not None:
                send({"id": message["id"], **said})


if __name__ == "__main__":
    main()
