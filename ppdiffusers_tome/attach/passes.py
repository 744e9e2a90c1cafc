"""What a forward pass computes: the token grid, and the plan of the block that runs.

The wrap of a transformer's first layer reads the token grid. That of a block makes the plan from the block's input,
for as long as the block runs; wraps of the layers inside the block merge and unmerge by this plan. What a pass
computes is stored per thread. All other state is in the wraps.
"""

import secrets
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import paddle
from paddle import nn

from ..errors import ToMeConfigError, ToMePassError
from ..families.grids import token_grid
from ..families.models import is_chunked, use_old_recompute
from ..families.table import FIRST, Family
from ..grid import Grid
from ..methods.method import Form
from ..methods.plan import MergePlan, join_frames
from .forward import Wrap, is_outermost
from .placement import Placement

Value = TypeVar("Value")
_THROUGH_ITS_MODEL = "call it through its model, or remove_tome() first"
MAX_CACHED = 8  # values of a `Cache`; the constants of a grid of 64×64 tokens take 0.2 MB
CHUNKED_FEED_FORWARD = (
    "merge_mlp=True cannot be combined with chunked feed-forward layers (enable_forward_chunking(), "
    "set_chunk_feed_forward()), which get the tokens in pieces: turn chunking off or leave merge_mlp=False."
)


class _PerThread(threading.local):
    """Thread-local attributes; a copy or a pickle starts empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _Pass(_PerThread):
    block: nn.Layer | None = None  # the one that runs
    plan: MergePlan | None = None  # of that block; None if nothing merges
    use_gpu_form: bool | None = None  # None: the form that suits the place of the tokens


_current = _Pass()


@contextmanager
def gpu_form(use: bool) -> Iterator[None]:
    """Merge in this thread in the form that suits a GPU, or in the other one, wherever the tokens are.

    Programs may run on another device later. Leaving the context restores what was chosen before.
    """
    before, _current.use_gpu_form = _current.use_gpu_form, use
    try:
        yield
    finally:
        _current.use_gpu_form = before


def uses_gpu_form(tensor: paddle.Tensor) -> bool:
    """Whether what is computed from a tensor merges in the form for GPUs: as `gpu_form` says, or the tensor is on one.

    A tensor that is traced is nowhere yet. The current device decides, so that a program equals eager mode there.
    """
    if _current.use_gpu_form is not None:
        return _current.use_gpu_form
    if paddle.in_dynamic_mode():
        return bool(tensor.place.is_gpu_place())
    return paddle.get_device().startswith("gpu")


def is_for_gpu() -> bool:
    """Whether what runs becomes a program for GPUs, or is compared with one."""
    return _current.use_gpu_form is True


class Cache:
    """The values that a wrap used last, at most `MAX_CACHED`; a copy or a pickle of the wrap starts empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Hashable, Any] = {}  # the one that was used last is last

    def __reduce__(self) -> Any:
        return type(self), ()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """The value of a key, which `build` returns if it is not there."""
        with self._lock:
            value: Value = self._values.pop(key) if key in self._values else build()
            self._values[key] = value
            if len(self._values) > MAX_CACHED:
                del self._values[next(iter(self._values))]
        return value


def current_plan() -> MergePlan | None:
    """The plan of the block that runs in this thread; None outside blocks, and where nothing merges."""
    return _current.plan


class PlacedWrap(Wrap):
    """Wrap of a transformer block: it stores what merges there. At ratio 0 it is the only wrap, and nothing merges."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement


class InnerWrap(Wrap):
    """Wrap of a layer inside a block. It merges by the plan of the block."""

    block: nn.Layer | None = None  # set when the wrap is installed in a block

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def plan(self) -> MergePlan | None:
        """The plan of the block; None outside it, and where nothing merges.

        Raises:
            ToMePassError: another library's `forward` of the block has left out the wrap of the block.
        """
        if self.block is not None and self.block is not _current.block and not is_outermost(self.block):
            raise ToMePassError(
                f"the layers of a {type(self.block).__name__} run without its merging, because another library has "
                "replaced the forward of the block since apply_tome(), or put back an earlier one: call apply_tome() "
                "again afterwards, or remove_tome() first."
            )
        return _current.plan


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


class GridOfPass(NamedTuple):
    """What the blocks of a transformer need to know of a pass."""

    grid: Grid  # of its tokens
    seed: int | None  # of the random choice of dst


class GridsOfInputs:
    """The pass that each input of a block belongs to, while the input exists; a copy or a pickle starts empty.

    Gradient checkpointing runs a block again after its pass, with the input from before, perhaps as another tensor in
    the same memory, and other passes may have come in between.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[weakref.ref, GridOfPass]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()

    def get(self, x: paddle.Tensor, current: GridOfPass) -> GridOfPass:
        """The pass in which the block first got x: the current one if that is now."""
        if not paddle.in_dynamic_mode():
            return current
        address = x.data_ptr()
        _, known = self._by_address.get(address, (None, None))
        if known is None:
            entry = weakref.ref(x, lambda _: self._by_address.pop(address, None))
            self._by_address[address] = entry, current
        return known or current


class GridWrap(Wrap):
    """Wrap of a transformer's first layer: read the token grid, and choose a seed if the config has none.

    Args:
        placement: of a block of the transformer.
    """

    def __init__(self, placement: Placement) -> None:
        self._family: Family = placement.family
        self._use_rand, self._seed = placement.config.use_rand, placement.config.seed
        self._thread = _PerThread()

    @property
    def changes_dst(self) -> bool:
        """Whether each pass has other dst, because they are random and the config has no seed."""
        return self._use_rand and self._seed is None

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        if self.changes_dst and layer.training and use_old_recompute():
            raise ToMePassError(
                "seed=None cannot be combined with FLAG_USE_OLD_RECOMPUTE: it runs whole transformers again for the "
                "gradients, and they would choose other tokens. Pass a seed to apply_tome(), or unset the flag."
            )
        before = self.current()
        grid = token_grid(self._family, layer, _first(args, kwargs), before and before.grid)
        self._thread.current = GridOfPass(grid, secrets.randbits(64) if self.changes_dst else self._seed)
        return self.forward(layer, *args, **kwargs)

    def current(self) -> GridOfPass | None:
        """The last pass in this thread; None before the first."""
        current: GridOfPass | None = getattr(self._thread, "current", None)
        return current

    def check(self, grid: Grid, tokens: int) -> None:
        """Raise ToMePassError unless the tokens of a block are those of a grid, or of the frames of a video."""
        if tokens != grid.tokens and not (self._family.has_frames and tokens % grid.tokens == 0):
            raise ToMePassError(
                f"a block got {tokens} tokens but the feature map was {grid.h}×{grid.w}: {_THROUGH_ITS_MODEL}."
            )

    def random_key(self, seed: int | None, block: int) -> tuple[int, ...] | None:
        """The key of a block's random dst, for the seed of the pass; None if dst is not random."""
        return (seed, block) if self._use_rand and seed is not None else None


class BlockWrap(PlacedWrap):
    """Wrap of a transformer block: make the plan that the layers inside it share.

    Args:
        placement: what merges in the block.
        grid: the wrap that sees the block's token grid.
    """

    def __init__(self, placement: Placement, grid: GridWrap) -> None:
        super().__init__(placement)
        self.grid = grid
        self._constants = Cache()
        self._inputs = GridsOfInputs()

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.placement.config.merge_mlp and is_chunked(layer, self.placement.facts):
            raise ToMeConfigError(CHUNKED_FEED_FORWARD)
        _current.block, _current.plan = layer, self.build_plan(hidden_states)
        try:
            return self.forward(layer, hidden_states, *args, **kwargs)
        finally:
            _current.block, _current.plan = None, None

    def build_plan(self, metric: paddle.Tensor) -> MergePlan | None:
        """The plan for a block's input [B, N, C], of frames in one sequence [B, F·N, C]; None if nothing merges."""
        placement, current = self.placement, self.grid.current()
        if current is None:
            raise ToMePassError(
                f"a block got {metric.shape[1]} tokens but no feature map was seen: {_THROUGH_ITS_MODEL}."
            )
        grid, seed = self._inputs.get(metric, current)
        if placement.facts.single_stream is not None and placement.facts.sequence == FIRST:
            metric = metric[:, -grid.tokens :]  # without the text
        tokens, use_gpu_form = metric.shape[1], uses_gpu_form(metric)
        self.grid.check(grid, tokens)
        kept = placement.kept(grid, use_gpu_form)
        if kept.keys == grid.tokens:
            return None
        if (frames := max(1, tokens // grid.tokens)) > 1:
            metric = metric.reshape([-1, grid.tokens, metric.shape[2]])
        form = placement.form(grid, use_gpu_form)
        return join_frames(form.plan(metric, self._constants_of(form, grid, seed), kept), frames)

    def _constants_of(self, form: Form, grid: Grid, seed: int | None) -> Any:
        """The constants of a grid, cached by device unless each pass has its own; a traced program gets its own."""

        def build() -> Any:
            return form.constants(grid, self.placement.config, self.grid.random_key(seed, self.placement.index))

        if self.grid.changes_dst or not paddle.in_dynamic_mode():
            return build()
        return self._constants.get((paddle.get_device(), type(form), grid), build)
