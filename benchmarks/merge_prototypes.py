"""Ways to merge that the package does not offer: each replaces functions of the package while it is open.

`experiments.py` measures them. They serve the bundled model: 2×2 cells, heights and widths that cells divide.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.nn.functional as F

from ppdiffusers_tome import ToMeConfig, matching, positions, wraps
from ppdiffusers_tome.positions import Grid, choose_dst

Match = Callable[..., matching.MergePlan]  # with the arguments of `match_tokens`
Plan = matching.MergePlan | None
Build = Callable[[Callable[[paddle.Tensor], Plan], wraps.BlockWrap, paddle.Tensor], Plan]  # original, its wrap, metric
Prototype = Callable[[], AbstractContextManager]  # replaces functions of the package while it is open


def building(make_build: Callable[[], Build]) -> Prototype:
    """A prototype of `BlockWrap.build_plan`; each pipeline call, or trace, gets a build of its own."""
    original = wraps.BlockWrap.build_plan

    def prototype() -> AbstractContextManager:
        build = make_build()
        replaced = lambda wrap, metric: build(partial(original, wrap), wrap, metric)  # noqa: E731
        return mock.patch.object(wraps.BlockWrap, "build_plan", replaced)

    return prototype


def matching_by(match: Match) -> Prototype:
    """A prototype of `match_tokens`."""
    return lambda: mock.patch.object(wraps, "match_tokens", match)


def ratios_by_height(ratios: Mapping[int, float]) -> Prototype:
    """A ratio for the grids of each height, in tokens."""
    original = wraps.tokens_kept
    return lambda: mock.patch.object(
        wraps, "tokens_kept", lambda grid, config: original(grid, replace(config, ratio=ratios[grid.h]))
    )


def kept(passes: int) -> Build:
    """Each block computes its plan in every `passes`-th pass and keeps it in between."""
    count: Counter[int] = Counter()
    plans: dict[int, Any] = {}

    def build(original: Callable, wrap: wraps.BlockWrap, metric: paddle.Tensor) -> Plan:
        if count[wrap.index] % passes == 0:
            plans[wrap.index] = original(metric)
        count[wrap.index] += 1
        return plans[wrap.index]

    return build


def shared(first: Sequence[int]) -> Build:
    """Blocks use the plan of the last block before them whose index is in `first`."""
    plans: list[Any] = []

    def build(original: Callable, wrap: wraps.BlockWrap, metric: paddle.Tensor) -> Plan:
        if wrap.index in first:
            plans[:] = [original(metric)]
        return plans[0]

    return build


def laplacian_match(metric: paddle.Tensor, grid: Grid, r: int, sx: int, sy: int, key: Any, window: Any) -> Any:
    """`match_tokens` with the token of each 2×2 cell as dst that differs least from the mean of its four neighbours.

    Each image has its own dst. Tokens change places within their cells so that dst come first, where `match_tokens`
    takes them, and the plan's rows are translated back. Source: L-GTM of BiGain, arXiv:2603.12240.
    """
    h, w, channels = grid.h, grid.w, metric.shape[2]
    with paddle.no_grad():
        tokens = metric.detach().transpose([0, 2, 1]).reshape([-1, channels, h, w])
        padded = F.pad(tokens, [1, 1, 1, 1], mode="replicate")
        beside = padded[:, :, :-2, 1:-1] + padded[:, :, 2:, 1:-1] + padded[:, :, 1:-1, :-2] + padded[:, :, 1:-1, 2:]
        contrast = ((tokens - beside / 4) ** 2).sum(axis=1).reshape([-1, h * w])
        cells = (choose_dst(grid)[:, None] + np.array([0, 1, w, w + 1])).reshape(-1)  # positions, cell by cell
        slot = np.argsort(cells)  # of each position in that order
        cell = paddle.to_tensor(slot // 4 * 2).cast("float64")
        within = contrast / (contrast.max(axis=1, keepdim=True) + 1e-30)  # 0 to 1
        by_cell = paddle.argsort(cell + within.cast("float64"), axis=1)
        position = paddle.gather(by_cell, paddle.to_tensor(slot), axis=1)  # [B, N]: the token that moves to each place
        batch = (paddle.cumsum(paddle.ones_like(position[:, :1]), axis=0) - 1) * h * w
        rows, places = ((x + batch).reshape([-1]) for x in (position, paddle.argsort(position, axis=1)))
        moved = paddle.gather(metric.detach().reshape([-1, channels]), rows).reshape([-1, h * w, channels])
        plan = matching.match_tokens(moved, grid, r, window=window)
        return replace(
            plan,
            dst_rows=paddle.gather(rows, plan.dst_rows),
            stay_rows=None if plan.stay_rows is None else paddle.gather(rows, plan.stay_rows),
            merged_rows=paddle.gather(rows, plan.merged_rows),
            source_rows=paddle.gather(plan.source_rows, places),
        )


def projected_match(metric: paddle.Tensor, *arguments: Any) -> matching.MergePlan:
    """`match_tokens` with a random projection of the metric to 32 channels."""
    matrix = np.random.RandomState(0).standard_normal([metric.shape[2], 32]).astype("float32")
    return matching.match_tokens(paddle.matmul(metric.detach(), paddle.to_tensor(matrix)), *arguments)


def shifted(offset: Callable[[int, int], tuple[int, int]]) -> Prototype:
    """Windows that begin offset(block index, window) tokens further up and left; those at the edges are smaller."""

    def constants(grid: Grid, sx: int, sy: int, key: tuple[int, int], window: int) -> positions.Positions:
        y, x = offset(key[1], window)
        rows, columns = (np.arange(grid.h) + y) // window, (np.arange(grid.w) + x) // window
        number = np.unique((rows[:, None] * grid.w + columns).reshape(-1), return_inverse=True)[1]
        with mock.patch.object(positions, "window_of", lambda *_: number):
            return positions.constant_positions.__wrapped__(grid, sx, sy, key, window)  # not kept

    return lambda: mock.patch.object(matching, "constant_positions", constants)


def half_in_second(index: int, window: int) -> tuple[int, int]:
    """Half a window in every second block of the bundled model's first level: 0 and 5 begin at 0, 4 at the half."""
    return (window // 2,) * 2 if index == 4 else (0, 0)


def random_offset(index: int, window: int) -> tuple[int, int]:
    """A multiple of the cell's two tokens along each axis, another in each block."""
    y, x = np.random.RandomState(index).randint(window // 2, size=2) * 2
    return int(y), int(x)


def fall_back(metric: paddle.Tensor, places: Any) -> tuple[paddle.Tensor, paddle.Tensor]:
    """`_most_similar` in windows, but in the whole grid for the half of the src whose similarity is lower."""
    best, similarity = _most_similar(metric, places)
    best_of_all, similarity_of_all = _most_similar(metric, places._replace(windows=None))
    middle = places.s // 2
    is_low = similarity < paddle.sort(similarity, axis=1)[:, middle : middle + 1]
    return paddle.where(is_low, best_of_all, best), paddle.where(is_low, similarity_of_all, similarity)


_most_similar = matching._most_similar


def splitting(queries: float, keys: float) -> Prototype:
    """With merge_attn="asymmetric": other ratios of queries, and of keys and values."""
    return lambda: mock.patch.object(ToMeConfig, "attention_ratios", property(lambda config: (queries, keys)))
