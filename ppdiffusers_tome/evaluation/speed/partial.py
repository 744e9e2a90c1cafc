"""A measurement on its way: every line that was measured is kept in a file, from which a killed run goes on."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ToMeConfigError

KEPT = ("about", "checked", "weighed", "shares", "failed", "round", "done")


@dataclass
class Found:
    """What is known of one case; arms by their labels."""

    macs: dict[str, int] = field(default_factory=dict)
    failed: dict[str, dict[str, str]] = field(default_factory=dict)  # "status", "reason"
    parity: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int | None] = field(default_factory=dict)
    shares: dict[str, Any] = field(default_factory=dict)
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    is_done: bool = False

    def take(self, event: dict[str, Any]) -> None:
        """Note what a line of the worker says."""
        kind, arm = event["event"], event.get("arm", "")
        if kind == "about":
            self.macs |= event["macs"]
        elif kind == "round":
            self.rounds[event["index"]] = event["seconds"]
        elif kind == "failed":
            self.failed[arm] = {name: event[name] for name in ("status", "reason")}
        elif kind == "checked":
            self.parity[arm] = event["parity"]
        elif kind == "weighed":
            self.memory[arm] = event["peak_memory_bytes"]
        elif kind == "shares":
            self.shares[arm] = event["shares"]
        elif kind == "done":
            self.is_done = True

    def seconds(self, arm: str) -> list[float]:
        """Of each round, in order; empty where the arm failed."""
        return [] if arm in self.failed else [self.rounds[index][arm] for index in sorted(self.rounds)]


class Partial:
    """The file beside a result that is not complete. Its first line is the plan, which it belongs to alone.

    Args:
        path: of the file.
        plan: what is measured, how, and with which versions; ready for JSON.
        about: noted beside the plan, and not compared.
        restart: begin again, whatever is there.

    Raises:
        ToMeConfigError: the file is of another plan, or none that was written here.
    """

    def __init__(self, path: Path, plan: dict[str, Any], about: dict[str, Any], restart: bool) -> None:
        self.path = path
        self.about = about
        self.found: dict[int, Found] = {}
        plan = json.loads(json.dumps(plan))
        lines = [] if restart or not path.exists() else list(_whole_lines(path))
        if lines:
            self._take_up(lines, plan)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
            self._append({"plan": plan, "about": about})

    def case(self, index: int) -> Found:
        """What is known of a case, by its place in the plan."""
        return self.found.setdefault(index, Found())

    def note(self, case: int, event: dict[str, Any]) -> None:
        """Keep a line of a case's worker, on the disk before the next is measured."""
        self.case(case).take(event)
        if event["event"] in KEPT:
            self._append({"case": case, **event})

    def remove(self) -> None:
        """The result is complete."""
        self.path.unlink(missing_ok=True)

    def _take_up(self, lines: list[dict[str, Any]], plan: dict[str, Any]) -> None:
        theirs = lines[0].get("plan", {})
        others = [name for name in plan if theirs.get(name) != plan[name]]
        if others:
            raise ToMeConfigError(
                f"{self.path} holds a measurement that began with another {', '.join(others)}: repeat its command to "
                "go on with it, or pass --restart to begin again and lose it."
            )
        self.about = lines[0]["about"]
        for event in lines[1:]:
            self.case(event["case"]).take(event)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.path.write_text(text, encoding="utf-8")  # without the line that a kill cut short

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)
