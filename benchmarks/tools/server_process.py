"""A server in a process of its own, for the scripts that send it requests."""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import requests


def start_server(command: Sequence[str], log: Path, **environment: str) -> tuple[subprocess.Popen, str]:
    """Start a server; returns the process and its URL when it is ready, or ends the script with its log."""
    with log.open("w") as file:
        process = subprocess.Popen([*command], stdout=file, stderr=file, env={**os.environ, **environment})
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        address = re.search(r"listening at (http://\S+)", log.read_text())
        with contextlib.suppress(requests.ConnectionError):  # the server may have ended
            if address and requests.get(f"{address[1]}/ready", timeout=120).status_code == 200:
                return process, address[1]
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the server did not become ready:\n{log.read_text()}")
