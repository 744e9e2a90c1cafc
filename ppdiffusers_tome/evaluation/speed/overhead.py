"""What merging itself costs: the shares of a block's time that matching, merging and unmerging take."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
    calls: list[_Call] = []
    replaced: list[tuple[dict[int, Any], int, _TimedHook]] = []
    for layer in model.sublayers(include_self=True):
        for hooks in (layer._forward_pre_hooks, layer._forward_post_hooks):
            for key, hook in hooks.items():
                if isinstance(hook, (CallHook, FinishHook, *PARTS)):
                    replaced.append((hooks, key, _TimedHook(hook, calls)))
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
    if shares := _shares(calls):
        return shares
    raise ToMeConfigError(
        f"no block of {type(model).__name__} merged tokens in the pass: run it eagerly, with a ratio and a size "
        "at which tokens merge."
    )


class _Call(NamedTuple):
    """A hook's call."""

    hook: type[ToMeHook]
    start: float
    end: float
    has_result: bool  # hooks that move tokens return None where nothing merges


class _TimedHook(ToMeHook):
    """Calls another hook in its place and records when."""

    def __init__(self, hook: Any, calls: list[_Call]) -> None:
        self.hook, self._calls = hook, calls

    def __call__(self, *args: Any) -> Any:
        start = now()
        result = self.hook(*args)
        self._calls.append(_Call(type(self.hook), start, now(), result is not None))
        return result


def _shares(calls: list[_Call]) -> dict[str, float]:
    """The parts' shares of the time of the blocks that merged; empty if none did. Blocks are not nested."""
    parts, blocks = dict.fromkeys(PARTS.values(), 0.0), 0.0
    block: dict[str, float] = {}
    start = 0.0
    for call in calls:
        if issubclass(call.hook, CallHook):
            block, start = {}, call.start
        elif issubclass(call.hook, FinishHook):
            if "merge" in block:
                blocks += call.start - start
                parts = {part: seconds + block.get(part, 0.0) for part, seconds in parts.items()}
            block = {}
        elif call.has_result or call.hook is PlanHook:
            part = PARTS[call.hook]
            block[part] = block.get(part, 0.0) + call.end - call.start
    return {part: seconds / blocks for part, seconds in parts.items()} if blocks else {}
