"""A worker process that answers requests, one after the other; between them it waits and uses no processor."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ToMeError


class WorkerError(ToMeError, RuntimeError):
    """A worker's action failed; the worker still answers."""


class WorkerEndedError(ToMeError, RuntimeError):
    """A worker ended before it answered; `errors` is what it wrote to stderr, `status` negative for a signal."""

    def __init__(self, name: str, status: int, errors: str) -> None:
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if "Error" in line or "what()" in line), "".join(lines[-1:]))
        super().__init__(f"{name} ended {how}" + (f": {last[:300]}" if last else ""))
        self.status, self.errors = status, errors


class WorkerProcess:
    """A process that runs `worker_loop.answer_requests`. A context: leaving it ends the process.

    `name` is for messages, `threads` its OMP_NUM_THREADS.
    """

    def __init__(self, command: Sequence[str], name: str, threads: int) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in close
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            text=True,
        )

    @property
    def pid(self) -> int:
        """The process number."""
        return self._process.pid

    def ask(
        self, action: str, on_event: Callable[[dict[str, Any]], None] | None = None, /, **arguments: Any
    ) -> Mapping[str, Any]:
        """The answer to a request; events that come before it go to `on_event`.

        Raises:
            WorkerError: the action failed.
            WorkerEndedError: the process ended.
        """
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):  # it has ended: the loop below finds no line
            self._process.stdin.write(json.dumps({"action": action, **arguments}) + "\n")
            self._process.stdin.flush()
        for text in self._process.stdout:
            line = json.loads(text)
            if "event" in line:
                if on_event:
                    on_event(line)
            elif "error" in line:
                raise WorkerError(f"{self._name} failed at {action!r}: {line['error']}")
            else:
                return line["answer"]
        status = self._process.wait()
        self._errors.seek(0)
        raise WorkerEndedError(self._name, status, self._errors.read())

    def close(self, timeout: float = 30) -> None:
        """End the process: by the end of its stdin, or after `timeout` seconds by force."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(timeout=0 if exception[0] else 30)
