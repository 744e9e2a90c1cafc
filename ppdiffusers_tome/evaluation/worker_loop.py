"""The worker's end of `worker_process.py`: requests in, answers and events out, one JSON object on each line.

Nothing but the standard library is imported here, because the worker's interpreter may not have Paddle. As a script:
`python worker_loop.py FILE` answers with the functions in that file's dictionary `ACTIONS`.
"""

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # from Linux' sys/prctl.h


def answer_requests(actions: Mapping[str, Callable[..., dict[str, Any] | None]]) -> None:
    """Answer requests from stdin until it ends.

    A request is {"action": name, **arguments}. Its answer is {"answer": what the action returns} or {"error": text};
    before it, an action may write events with the function `report` that it gets as its first argument.
    """
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to stderr, not between the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent
    with contextlib.suppress(OSError):  # where memory runs out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")

    def write(**line: Any) -> None:
        print(json.dumps(line), file=stream, flush=True)

    def report(event: str, **fields: Any) -> None:
        write(event=event, **fields)

    for line in sys.stdin:
        request = json.loads(line)
        try:
            write(answer=actions[request.pop("action")](report, **request) or {})
        except Exception as error:
            write(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are not meant to be imported from there
    answer_requests(runpy.run_path(sys.argv[1])["ACTIONS"])
