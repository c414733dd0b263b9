"""What stands between an app and its models in a company: an authority of its own, and a proxy with a password."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

__all__ = ["PASSWORD", "Authority", "authenticating_proxy", "certificate_authority"]

PASSWORD = "pass-word-4711"
"""The password of ann at the proxy."""


@dataclass
class Authority:
    """A certificate authority: the file of its certificate, and what a server of it uses."""

    file: Path
    context: ssl.SSLContext


@pytest.fixture(scope="module", name="authority")
def certificate_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that nobody knows."""
    made = trustme.CA()
    file = tmp_path_factory.mktemp("authority") / "ca.pem"
    made.cert_pem.write_to_path(str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.issue_cert("127.0.0.1").configure_cert(context)  # pyright: ignore[reportUnknownMemberType]
    return Authority(file, context)


@pytest.fixture(scope="module", name="proxy")
def authenticating_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a proxy that asks for the password of ann."""
    port = tmp_path_factory.mktemp("proxy") / "port"
    command = [sys.executable, "-m", "proxy", "--hostname", "127.0.0.1", "--port", "0", "--port-file", str(port)]
    command += ["--basic-auth", f"ann:{PASSWORD}", "--num-workers", "1", "--log-level", "ERROR", "--threadless"]
    process = subprocess.Popen([*command, "--num-acceptors", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (port.exists() and port.read_text().strip()):
            assert process.poll() is None
        yield f"127.0.0.1:{port.read_text().strip()}"
    finally:
        process.terminate()
        process.wait()
