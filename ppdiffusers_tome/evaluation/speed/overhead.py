"""What merging itself costs: the shares of a block's time that matching, merging and unmerging take."""

from collections.abc import Callable
from typing import Any

from paddle import nn

from ...errors import ToMeConfigError
from ...hooks import CallHook, FinishHook, MergeHook, MergeOutputHook, PlanHook, ToMeHook, UnmergeHook
from ..clock import now

PARTS: dict[type[ToMeHook], str] = {
    PlanHook: "matching",
    MergeHook: "merge",
    MergeOutputHook: "merge",
    UnmergeHook: "unmerge",
}


def measure_overhead(model: nn.Layer, run: Callable[[], Any]) -> dict[str, float]:
    """Run one pass and measure which share of the time of the merging blocks is spent on merging.

    A block's time is that of its forward. Blocks that merge nothing in this pass do not count. On a GPU the host waits
    for the device around every timed part, so the pass takes longer than usual.

    Args:
        model: a denoiser with merging attached (`apply_tome`). Its hooks are restored afterwards, also after an error.
        run: makes one pass through the model, eagerly and in this thread. Warm up before: a first pass is slower.

    Returns:
        "matching" (tokens to plan), "merge" and "unmerge", from 0 to 1.

    Raises:
        ToMeConfigError: the model has no merging attached, or nothing merged in the pass.

    Example:
        >>> unet.apply_tome(ratio=0.5)
        >>> measure_overhead(unet, lambda: unet(sample, timestep, text))
        {'matching': 0.11, 'merge': 0.01, 'unmerge': 0.01}
    """
    times = _Times()
    replaced: list[tuple[dict[int, Any], int, _TimedHook]] = []
    for layer in model.sublayers(include_self=True):
        for hooks in (layer._forward_pre_hooks, layer._forward_post_hooks):
            for key, hook in hooks.items():
                if isinstance(hook, (CallHook, FinishHook, *PARTS)):
                    replaced.append((hooks, key, _TimedHook(hook, times)))
    if not replaced:
        raise ToMeConfigError(f"{type(model).__name__} has no merging attached: call apply_tome(ratio=0.5) first.")
    try:
        for hooks, key, timed in replaced:
            hooks[key] = timed
        run()
    finally:
        for hooks, key, timed in replaced:
            if hooks.get(key) is timed:  # unless the pass has removed it
                hooks[key] = timed.hook
    if not times.blocks:
        raise ToMeConfigError(
            f"no block of {type(model).__name__} merged tokens in the pass: run it eagerly, with a ratio and a size "
            "at which tokens merge."
        )
    return {part: seconds / times.blocks for part, seconds in times.parts.items()}


class _Times:
    """Seconds of each part and of all blocks that merged. Blocks are not nested, so there is one current block."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys(PARTS.values(), 0.0)
        self.blocks = 0.0
        self._current: dict[str, float] = {}
        self._start = 0.0

    def start_block(self) -> None:
        self._current, self._start = {}, now()

    def add(self, part: str, seconds: float) -> None:
        self._current[part] = self._current.get(part, 0.0) + seconds

    def finish_block(self) -> None:
        if "merge" in self._current:
            self.blocks += now() - self._start
            for part, seconds in self._current.items():
                self.parts[part] += seconds
        self._current = {}


class _TimedHook(ToMeHook):
    """Calls another hook in its place and records the time."""

    def __init__(self, hook: Any, times: _Times) -> None:
        self.hook, self._times = hook, times

    def __call__(self, *args: Any) -> Any:
        if isinstance(self.hook, FinishHook):
            self._times.finish_block()
        if isinstance(self.hook, CallHook):
            self._times.start_block()
        start = now()
        result = self.hook(*args)
        part = PARTS.get(type(self.hook))
        # Hooks that move tokens return None where nothing merges.
        if part and (part == "matching" or result is not None):
            self._times.add(part, now() - start)
        return result
