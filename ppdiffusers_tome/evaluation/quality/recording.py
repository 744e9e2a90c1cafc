"""Record what was merged while a picture was drawn: the plan of every block and step, and the groups in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from paddle import nn

from ...errors import ToMeConfigError
from ...hooks import CallHook
from ...matching import MergePlan
from ...models import MergeableBlock, denoisers, find_blocks, token_grid
from ...positions import Grid


@dataclass(frozen=True, eq=False)
class RecordedPlan:
    """What one block merged in one step."""

    denoiser: str  # its model's name in the pipeline, e.g. "unet"; of a model on its own its class
    path: str  # of the block in that model
    level: int  # downsample factor
    step: int  # 0, 1, ...: how often the block had run since the recording began
    grid: Grid  # tokens along each axis
    plan: MergePlan


@contextmanager
def record_plans(target: Any) -> Iterator[list[RecordedPlan]]:
    """Note the plan of every block and step while a pipeline or model runs; what it computes is not changed.

    Args:
        target: a ppdiffusers pipeline or model in which merging is on.

    Yields:
        A list that grows, in the order of the calls. A block that merges nothing (ratio 0, a grid without a whole
        cell) leaves no entry. When the block ends, however it ends, the recording hooks are gone.

    Raises:
        ToMeConfigError: target is no pipeline or model, or merging is off there.

    Example:
        >>> with pipe.tome(ratio=0.5), record_plans(pipe) as recorded:
        ...     image = pipe("a 3d render of fox").images[0]
    """
    recorded: list[RecordedPlan] = []
    merging = [
        (name, found, call_hook)
        for name, denoiser in denoisers(target).items()
        for found in find_blocks(denoiser)
        for call_hook in found.block._forward_pre_hooks.values()
        if isinstance(call_hook, CallHook)
    ]
    if not merging:
        raise ToMeConfigError(f"{type(target).__name__} merges nothing: apply_tome(ratio=...) before record_plans.")
    handles: list[Any] = []
    try:
        for name, found, call_hook in merging:
            handles += _record(name, found, call_hook, recorded)
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _record(name: str, found: MergeableBlock, call_hook: CallHook, recorded: list[RecordedPlan]) -> list[Any]:
    """Hooks beside those that merge: one reads the grid, one the plan as soon as the block has it."""
    grids: list[Grid] = []
    steps = 0

    def read_grid(layer: nn.Layer, inputs: tuple) -> None:
        grids[:] = [token_grid(layer, inputs[0])]

    def read_plan(layer: nn.Layer, inputs: tuple) -> None:
        nonlocal steps
        if (plan := call_hook.plan()) is not None:
            recorded.append(RecordedPlan(name, found.path, found.level, steps, grids[0], plan))
        steps += 1

    planned = found.block.norm1 if found.is_joint else found.block
    return [found.grid_layer.register_forward_pre_hook(read_grid), planned.register_forward_pre_hook(read_plan)]


def conditional_index(plan: MergePlan, pictures: int = 1, picture: int = 0) -> int:
    """Which image of the batch is a picture's conditional pass: a guided batch has the unconditional ones first.

    Args:
        plan: of a pass over `pictures` images, or, with guidance, over twice as many.
        pictures: how many pictures were drawn at once.
        picture: which of them, 0, 1, ...

    Raises:
        ToMeConfigError: there is no such picture, or the batch is neither of the two.
    """
    batch = plan.source_rows.shape[0] // int(plan.tokens)
    if batch not in (pictures, 2 * pictures) or not 0 <= picture < pictures:
        raise ToMeConfigError(
            f"picture={picture} of pictures={pictures} is not in a batch of {batch}: it must hold {pictures} images, "
            f"or {2 * pictures} with guidance."
        )
    return picture + batch - pictures


def groups(plan: MergePlan, grid: Grid, image_index: int = 0) -> np.ndarray:
    """For each token which group it is in: [H, W] int64, labels from 0 to N-r-1, equal where tokens were merged.

    A label is the token's row in the merged sequence of its image, so labels below the number of dst are dst groups.

    Raises:
        ToMeConfigError: the grid has another number of tokens than the plan, or the batch no such image.
    """
    rows = _of_image(plan, grid, image_index)
    return (rows - image_index * int(plan.kept)).reshape(grid.h, grid.w)


def dst_tokens(plan: MergePlan, grid: Grid, image_index: int = 0) -> np.ndarray:
    """Which tokens are dst, those that others are merged into: [H, W] bool. Raises as `groups`."""
    _of_image(plan, grid, image_index)
    found = np.zeros(grid.tokens, bool)
    found[plan.dst_rows.numpy().reshape(-1, int(plan.dst))[image_index] % grid.tokens] = True
    return found.reshape(grid.h, grid.w)


def _of_image(plan: MergePlan, grid: Grid, image_index: int) -> np.ndarray:
    rows = plan.source_rows.numpy()
    if grid.tokens != int(plan.tokens) or not 0 <= image_index < len(rows) // grid.tokens:
        raise ToMeConfigError(
            f"a plan of {int(plan.tokens)} tokens for a batch of {len(rows) // int(plan.tokens)} has no image "
            f"{image_index} on a grid of {grid.h}×{grid.w}."
        )
    return rows.reshape(-1, grid.tokens)[image_index]
