"""Speed results as `bench` writes them, read into types, and the ratios of times that all reports are made of."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ToMeConfigError
from .names import BOTH, BUILT_IN, FORMAT, KIND, LIMIT, MEASURED, MEMORY_EFFICIENT, PLAIN, PYTORCH, TOME

OURS = (TOME, BOTH)  # the arms that merge by this package; in PyTorch it is tomesd that merges
ARM_NAMES = {PLAIN: "plain", MEMORY_EFFICIENT: "memory-efficient", TOME: "ToMe", BOTH: "ToMe + memory-efficient"} | {
    BUILT_IN: "ppdiffusers' built-in ToMe",
    LIMIT: "free-merge limit",
}
SCOPES = {"unet": "one UNet pass", "block": "one top-level block", "pipeline": "whole pictures"}


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (inclusive); one value is its own quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def within_rounds(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """The spread of the ratio of two arms' seconds, taken round by round."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


@dataclass(frozen=True)
class Arm:
    """One way to compute a case's outputs, and what it cost; the fields are those of the result file."""

    arm: str
    backend: str
    attention: str
    ratio: float
    max_downsample: int | None
    kept: int
    status: str
    reason: str | None
    seconds: tuple[float, ...]
    parity: dict[str, Any] | None
    peak_memory_bytes: int | None
    macs: int | None
    shares: dict[str, float] | None

    @property
    def identity(self) -> tuple:
        """What stays the same when the arm is measured again."""
        return self.arm, self.backend, self.attention, self.ratio, self.max_downsample

    @property
    def is_measured(self) -> bool:
        return self.status == MEASURED

    @property
    def name(self) -> str:
        """In words: "ToMe 0.5, eager"."""
        merging = "tomesd" if self.backend == PYTORCH and self.arm == TOME else ARM_NAMES.get(self.arm, self.arm)
        ratio = "" if self.arm in (PLAIN, MEMORY_EFFICIENT) else f" {self.ratio:g}"
        level = "" if self.max_downsample is None else f", max_downsample {self.max_downsample}"
        sliced = f", {self.attention}" if self.arm == LIMIT and self.attention != "plain" else ""
        return f"{merging}{ratio}{level}{sliced}, {self.backend}"


@dataclass(frozen=True)
class Case:
    """One model at one size and batch, with all arms that took turns on it."""

    model: str
    scope: str
    size: int  # px, square
    batch: int
    dtype: str
    steps: int | None
    guidance: float | None
    tokens: int
    memory_limit_gb: float | None
    arms: tuple[Arm, ...]

    @property
    def identity(self) -> tuple:
        """What stays the same when the case is measured again."""
        return (
            self.model,
            self.scope,
            self.size,
            self.batch,
            self.dtype,
            self.steps,
            self.guidance,
            self.memory_limit_gb,
        )

    @property
    def shape(self) -> str:
        """ "512 px, batch 2", with the memory limit where there was one."""
        limit = "" if self.memory_limit_gb is None else f", limit {self.memory_limit_gb:g} GB"
        return f"{self.size} px, batch {self.batch}{limit}"

    @property
    def name(self) -> str:
        """In words: "sd15, one UNet pass, 512 px, batch 2"."""
        return f"{self.model}, {SCOPES.get(self.scope, self.scope)}, {self.shape}"

    def find(
        self, arm: str, backend: str, ratio: float | None = None, max_downsample: int | None = None
    ) -> Arm | None:
        """The arm of that name; ratio and level are asked for only of arms that merge."""
        for each in self.arms:
            same = each.arm == arm and each.backend == backend
            if same and (
                arm in (PLAIN, MEMORY_EFFICIENT) or (each.ratio, each.max_downsample) == (ratio, max_downsample)
            ):
                return each
        return None

    def same_merge(self, arm: Arm, name: str, backend: str | None = None) -> Arm | None:
        """The arm `name` at the ratio and level of `arm`; in its backend unless told."""
        return self.find(name, backend or arm.backend, arm.ratio, arm.max_downsample)

    def limit(self, arm: Arm) -> Arm | None:
        """The free-merge limit of a merging arm: the same backend, attention, ratio and level."""
        wanted = (LIMIT, *arm.identity[1:])
        return next((each for each in self.arms if each.identity == wanted), None)

    def unmerged(self, arm: Arm) -> Arm | None:
        """What computes as `arm` does but merges nothing: plain, or memory-efficient attention alone."""
        return self.find(MEMORY_EFFICIENT if arm.arm == BOTH else PLAIN, arm.backend)

    def times_faster(self, arm: Arm, other: Arm | None) -> Spread | None:
        """`other`'s time over `arm`'s; None unless both were measured."""
        if other is None or not (arm.is_measured and other.is_measured):
            return None
        return within_rounds(other.seconds, arm.seconds)

    def speed_up(self, arm: Arm) -> Spread | None:
        """Plain's time over the arm's, in the arm's backend; None unless both were measured."""
        return self.times_faster(arm, self.find(PLAIN, arm.backend))

    def distance(self, arm: Arm) -> Spread | None:
        """How much longer than its free-merge limit the arm takes, as a share: 0.03 is 3 %."""
        limit = self.limit(arm)
        ratio = None if limit is None else self.times_faster(limit, arm)
        return None if ratio is None else Spread(*(each - 1 for each in ratio))


@dataclass(frozen=True)
class Result:
    """One result file."""

    path: Path
    command: str
    commit: str
    environment: dict[str, Any]
    rounds: int
    threads: int
    cases: tuple[Case, ...]

    @property
    def machine(self) -> tuple:
        """What must be equal for seconds to be put side by side."""
        names = ("machine", "device", "paddlepaddle", "paddlepaddle-gpu", "ppdiffusers")
        return self.threads, *(str(self.environment.get(name)) for name in names)


def parse(data: dict[str, Any], source: Path | str) -> Result:
    """A result out of its JSON.

    Raises:
        ToMeConfigError: it is of another kind or format, lacks something, or an arm missed a round.
    """
    if data.get("kind") != KIND:
        raise ToMeConfigError(
            f"{source}: kind={data.get('kind')!r} is not a speed result: give a file that bench wrote."
        )
    if data.get("format") != FORMAT:
        raise ToMeConfigError(
            f"{source}: format={data.get('format')!r} is not known, only {FORMAT}: measure it again with this version."
        )
    try:
        cases = tuple(_case(each) for each in data["cases"])
        known = {name: data[name] for name in ("command", "commit", "environment", "rounds", "threads")}
        result = Result(path=Path(source), cases=cases, **known)
    except (KeyError, TypeError) as error:
        raise ToMeConfigError(f"{source}: not a whole speed result, {error!r}: measure it again.") from error
    for case in cases:
        rounds = max((len(arm.seconds) for arm in case.arms), default=0)
        for arm in case.arms:
            wanted = rounds if arm.is_measured else 0
            if (
                len(arm.seconds) != wanted
                or any(taken <= 0 for taken in arm.seconds)
                or (arm.is_measured and not rounds)
            ):
                raise ToMeConfigError(
                    f"{source}: {case.name}: {arm.name} is {arm.status!r} and has seconds={list(arm.seconds)!r}: "
                    f"{wanted or 'a number'} of them, each above 0, go with its case. Measure it again."
                )
    return result


def _case(data: dict[str, Any]) -> Case:
    arms = tuple(
        Arm(**{name: each[name] for name in Arm.__dataclass_fields__} | {"seconds": tuple(each["seconds"])})
        for each in data["arms"]
    )
    known = {name: data[name] for name in Case.__dataclass_fields__ if name not in ("arms", "guidance")}
    return Case(**known, guidance=data.get("guidance"), arms=arms)


def read(files: Iterable[Path]) -> tuple[list[Result], list[tuple[Path, str]]]:
    """The speed results among the files, and the files of another kind with that kind.

    Raises:
        ToMeConfigError: a file cannot be read, no file is a speed result, or as `parse`.
    """
    results, skipped = [], []
    for file in files:
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ToMeConfigError(f"{file}: no result can be read from it: {error}.") from error
        kind = data.get("kind") if isinstance(data, dict) else None
        if kind == KIND:
            results.append(parse(data, file))
        else:
            skipped.append((file, f"kind {kind!r}" if kind else "no kind"))
    if not results:
        named = ", ".join(f"{file} ({kind})" for file, kind in skipped) or "no file was given"
        raise ToMeConfigError(f"No speed result to report: {named}. Give files that bench wrote.")
    return results, skipped
