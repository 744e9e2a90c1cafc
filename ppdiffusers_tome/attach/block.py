"""The wrap of a block, which makes its plan, and those of the layers inside it, which move tokens by the plan."""

import inspect
from typing import Any

import paddle
from paddle import nn

from ..errors import ToMeConfigError, ToMePassError
from ..families.blocks import MergeableBlock, gets_timestep, is_chunked
from ..families.stream import split
from ..grid import Grid
from ..methods.plan import MergePlan, Turn
from ..tensors import constants
from .forward import Wrap, is_outermost
from .outer import THROUGH_ITS_MODEL, GridWrap, PassWrap, TimestepWrap, read_timestep
from .placement import Placement
from .running import Running, now_running, running
from .state import Attachment, Cache, Pass, TimestepOfPass

CHUNKED_FEED_FORWARD = (
    "merge_mlp=True cannot be combined with chunked feed-forward layers (enable_forward_chunking(), "
    "set_chunk_feed_forward()), which get the tokens in pieces: turn chunking off or leave merge_mlp=False."
)


class BlockWrap(PassWrap):
    """Wrap of a transformer block: make the plan that the layers inside it share.

    Args:
        attachment: of the denoiser.
        block: the block.
        grid: the wrap that sees the block's token grid.
        timestep: the wrap that sees the timestep; None if no layer shows it.
    """

    is_recomputed = True

    def __init__(
        self, attachment: Attachment, block: MergeableBlock, grid: GridWrap, timestep: TimestepWrap | None
    ) -> None:
        super().__init__(attachment)
        self.index, self._family, self._spec = block.index, block.family, block.spec
        self._grid = grid
        self._earlier = (grid,) if timestep is None else (grid, timestep)  # wraps that run before in each pass
        self._constants, self._tables = Cache(), Cache()

    def forget_constants(self) -> None:
        """Free the constants of earlier settings; a pass that still needs them builds them again."""
        self._constants.clear()

    def is_equivalent(self, new: PassWrap) -> bool:
        is_same = isinstance(new, BlockWrap) and (self.index, self._earlier) == (new.index, new._earlier)
        return is_same and super().is_equivalent(new)

    def last_grid(self) -> Grid | None:
        """The token grid of the block in the last pass of this thread; None before the first."""
        last = self.attachment.current
        return None if last is None else last.grids.get(self._grid)

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        name = self._spec.tokens
        if not args and name not in kwargs:
            raise ToMePassError(f"{type(layer).__name__} got no {name}: {THROUGH_ITS_MODEL}.")
        tokens, further = (args[0], args[1:]) if args else (kwargs[name], ())
        current = self.enter(layer, tokens)
        current.reached_blocks = True
        if not current.seen.issuperset(self._earlier):
            current.mark_partial()
        placement = None if current.applied is None else current.applied.placements.get(self.index)
        plan = None
        if placement is not None and placement.share < 1:
            if "mlp" in placement.layers and is_chunked(layer, self._spec):
                raise ToMeConfigError(CHUNKED_FEED_FORWARD)
            named = {key: value for key, value in kwargs.items() if key != name}
            plan = self._plan(placement, current, tokens, self._timestep(layer, placement, current, further, named))
        with running(Running(layer, placement, plan)):
            return self.forward(layer, *args, **kwargs)

    def _timestep(
        self, layer: nn.Layer, placement: Placement, current: Pass, args: tuple, kwargs: dict[str, Any]
    ) -> TimestepOfPass | None:
        """The timestep of a pass; None if it is not read."""
        if current.timestep is not None:
            return current.timestep
        name = self._spec.timestep
        if name is None or not (placement.takes_turns and gets_timestep(layer, self._spec)):
            return None
        arguments = inspect.signature(type(layer).forward).bind(layer, None, *args, **kwargs).arguments
        timestep = arguments.get(name)
        if timestep is None:
            return None
        read = read_timestep(timestep, placement.config, self._family, self._tables)
        # Blocks that get the timestep are those of images. One timestep may be that of both halves of guidance.
        read = read._replace(batch=-1)
        current.timestep = read  # for the blocks after this one
        return read

    def _plan(
        self,
        placement: Placement,
        current: Pass,
        tokens: paddle.Tensor,  # [B, N, C], of frames in one sequence [B, F·N, C], perhaps with text
        timestep: TimestepOfPass | None,
    ) -> MergePlan | None:
        """The plan of a call of the block; None if nothing merges on its grid."""
        grid = current.grids[self._grid]
        metric = split(self._spec.gets_text, tokens, grid.tokens).image
        self._grid.check(grid, metric.shape[1])
        kept = placement.count_kept(grid)
        is_plain = timestep is not None and timestep.is_plain
        if kept == grid.tokens or is_plain is True:
            return None
        frames = metric.shape[1] // grid.tokens
        if frames > 1:
            metric = metric.reshape([-1, grid.tokens, metric.shape[2]])
        number = None if timestep is None else timestep.turn
        turn = Turn(number, frames if frames > 1 else self._frames_in_batch(metric, timestep))
        choice = placement.config.choose(metric, self._constants_of(placement, grid, kept), kept, turn)
        if is_plain is not False:
            choice = choice.or_all(is_plain, grid.tokens)
        return MergePlan(choice, grid.tokens, frames)

    def _frames_in_batch(self, metric: paddle.Tensor, timestep: TimestepOfPass | None) -> int:
        """How many rows of the batch are the frames of one video; 1 where a program does not know it."""
        rows, batch = metric.shape[0], -1 if timestep is None else timestep.batch
        is_known = self._family.has_frame_rows and rows > batch > 0 and rows % batch == 0
        return rows // batch if is_known else 1

    def _constants_of(self, placement: Placement, grid: Grid, kept: int) -> Any:
        """The constants of a grid, cached by device; a traced program gets its own."""

        def build() -> Any:
            return constants(placement.config.constants(grid, kept, self.index))

        if not paddle.in_dynamic_mode():
            return build()
        return self._constants.get((paddle.get_device(), placement.config, grid, kept), build)


class InnerWrap(Wrap):
    """Wrap of a layer inside a block. It moves tokens by the plan of the block.

    Args:
        block: the block.
        name: of `LAYERS`.
    """

    def __init__(self, block: nn.Layer, name: str) -> None:
        self._block, self._name = block, name

    def is_equivalent(self, new: "InnerWrap") -> bool:
        return self._block is new._block and self._name == new._name

    def plan(self) -> MergePlan | None:
        """The plan of the block; None outside it, and where nothing merges around this layer.

        Raises:
            ToMePassError: another library's `forward` of the block has left out the wrap of the block.
        """
        now = now_running()
        if now.block is self._block:
            return now.plan if now.placement is not None and self._name in now.placement.layers else None
        if not is_outermost(self._block):
            raise ToMePassError(
                f"the layers of a {type(self._block).__name__} run without its merging, because another library has "
                "replaced the forward of the block since apply_tome(), or put an earlier forward back: call "
                "apply_tome() again afterwards, or remove_tome() first."
            )
        return None
