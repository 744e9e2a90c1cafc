"""What merging itself costs: the share of a merging block's time that goes into matching, merging and unmerging."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import paddle
from paddle import nn

from ...errors import ToMeConfigError
from ...hooks import CallHook, FinishHook, MergeHook, MergeOutputHook, PlanHook, ToMeHook, UnmergeHook

PARTS: dict[type[ToMeHook], str] = {
    PlanHook: "matching",
    MergeHook: "merge",
    MergeOutputHook: "merge",
    UnmergeHook: "unmerge",
}


def measure_shares(model: nn.Layer, run: Callable[[], Any]) -> dict[str, float]:
    """Run a pass once and tell what part of the time of the blocks that merge is spent on merging.

    A block's time is that of its forward; blocks that merge nothing in this pass do not count. On a GPU the host waits
    for the device before and after all that is timed, so that the pass takes longer than one that is left alone.

    Args:
        model: a denoiser with merging attached (`apply_tome`). Its hooks are as they were afterwards, also after an
            error.
        run: makes one pass through the model, eagerly and in this thread. Warm up before: a first pass is slower.

    Returns:
        "matching" (tokens to plan), "merge" and "unmerge", each from 0 to 1.

    Raises:
        ToMeConfigError: the model has no merging attached, or nothing merged in the pass.

    Example:
        >>> unet.apply_tome(ratio=0.5)
        >>> measure_shares(unet, lambda: unet(sample, timestep, text))
        {'matching': 0.11, 'merge': 0.01, 'unmerge': 0.01}
    """
    clock = _Clock()
    with _timed(model, clock) as found:
        if not found:
            raise ToMeConfigError(f"{type(model).__name__} has no merging attached: call apply_tome(ratio=0.5) first.")
        run()
    if not clock.blocks:
        raise ToMeConfigError(
            f"no block of {type(model).__name__} merged tokens in the pass: run it eagerly, with a ratio and a size "
            "at which tokens merge."
        )
    return {part: seconds / clock.blocks for part, seconds in clock.parts.items()}


class _Clock:
    """Seconds by part, and of all blocks that merged."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys(PARTS.values(), 0.0)
        self.blocks = 0.0
        self._block: dict[str, float] = {}  # parts of the block that is running
        self._began = 0.0

    def call(self, hook: Any, *args: Any) -> Any:
        """Call a hook and note when."""
        if isinstance(hook, FinishHook):  # blocks do not stand in one another
            if "merge" in self._block:
                self.blocks += _now() - self._began
                for name, seconds in self._block.items():
                    self.parts[name] += seconds
            self._block = {}
            return hook(*args)
        began = _now()
        if isinstance(hook, CallHook):
            self._block, self._began = {}, began
        result = hook(*args)
        part = PARTS.get(type(hook))
        # Hooks that move tokens return nothing where nothing merges.
        if part and (part == "matching" or result is not None):
            self._block[part] = self._block.get(part, 0.0) + _now() - began
        return result


class _TimedHook(ToMeHook):
    """Stands in a hook's place."""

    def __init__(self, hook: Any, clock: _Clock) -> None:
        self.hook = hook
        self._clock = clock

    def __call__(self, *args: Any) -> Any:
        return self._clock.call(self.hook, *args)


@contextmanager
def _timed(model: nn.Layer, clock: _Clock) -> Iterator[list[_TimedHook]]:
    """A timed hook in the place of each that merges; those that still stand there are taken out at the end."""
    stands: list[tuple[dict[int, Any], int, _TimedHook]] = []
    for layer in model.sublayers(include_self=True):
        for hooks in (layer._forward_pre_hooks, layer._forward_post_hooks):
            for key, hook in hooks.items():
                if isinstance(hook, (CallHook, FinishHook, *PARTS)):
                    stands.append((hooks, key, _TimedHook(hook, clock)))
    try:
        for hooks, key, timed in stands:
            hooks[key] = timed
        yield [timed for _, _, timed in stands]
    finally:
        for hooks, key, timed in stands:
            if hooks.get(key) is timed:
                hooks[key] = timed.hook


def _now() -> float:
    """Seconds, when a GPU has finished what it was given; the CPU computes at once."""
    if paddle.get_device() != "cpu":
        paddle.device.synchronize()
    return perf_counter()
