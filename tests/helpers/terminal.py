"""The command line as a child process, with a pseudo-terminal or without one."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

TIMEOUT_S = 60.0
COMMAND = (sys.executable, "-m", "agentfsm")
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """The environment without the developer's API keys, colour settings and options."""
    secret = ("OPENAI_", "ANTHROPIC_", "OPENROUTER_", "OLLAMA_", "AGENTFSM_", "XDG_")
    colours = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CLICOLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(secret) and k not in colours}
    return {**kept, "HOME": str(home), "TERM": "xterm-256color", "PYTHONWARNINGS": "error", **more}


def run_without_terminal(
    arguments: Sequence[str], home: Path, *, stdin: str = "", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, with pipes as its streams."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd or home,
        env=clean_environment(home, **environment),
        check=False,
    )


def run_with_stderr_on_terminal(arguments: Sequence[str], home: Path, **environment: str) -> tuple[str, str]:
    """What the command line prints to stdout, which is a pipe, and what it shows on stderr, a pseudo-terminal."""
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=follower,
        cwd=home,
        env=clean_environment(home, **environment),
    ) as process:
        os.close(follower)
        assert process.stdout is not None
        printed, shown = process.stdout.read(), b""
        try:
            while piece := os.read(leader, 65536):
                shown += piece
        except OSError:  # the terminal is closed
            pass
        os.close(leader)
    return printed.decode(), shown.decode()


class TerminalProcess:
    """The command line at a pseudo-terminal; a context manager.

    Attributes:
        raw: All that it has printed, with its escape sequences.
        code: The exit code, once ``wait`` has come back.
    """

    def __init__(
        self, arguments: Sequence[str], home: Path, environment: Mapping[str, str] | None = None, columns: int = 120
    ) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=home,
            env=clean_environment(home, **(environment or {})),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # makes a typed Ctrl-C a signal
        )
        os.close(follower)
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.code: int | None = None
        self._seen = 0

    @property
    def text(self) -> str:
        """Everything printed so far, without escape sequences."""
        return _CODES.sub("", self.raw).replace("\r\n", "\n")

    def interrupt(self, words: str) -> None:
        """Press Ctrl-C until words are printed.

        Python's ``input`` has a moment, just before it reads, in which it does not notice; so do people press
        it twice.
        """
        for _ in range(5):
            self.type("\x03", end="")
            try:
                self.expect(words, 15.0)
            except AssertionError:
                continue
            return
        self.expect(words, 0.0)

    def expect(self, words: str, patience_s: float = TIMEOUT_S) -> None:
        """Wait until words are printed, after those of the last call."""
        give_up = time.monotonic() + patience_s
        while words not in self.text[self._seen :]:
            left = give_up - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"{words!r} never came; printed so far:\n{self.text}")
        self._seen = self.text.index(words, self._seen) + len(words)

    def type(self, line: str, end: str = "\n") -> None:
        """Type a line."""
        os.write(self._leader, (line + end).encode())

    def wait(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read(TIMEOUT_S):
            pass
        self.code = self.process.wait(TIMEOUT_S)
        return self.code

    def _read(self, timeout: float) -> bool:
        ready, _, _ = select.select([self._leader], [], [], timeout)
        if not ready:
            return False
        try:
            data = os.read(self._leader, 65536)
        except OSError:  # Linux reports EIO when the other end is closed
            return False
        self.raw += self._decoder.decode(data)
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._leader)
