"""The wraps of layers outside of blocks: they begin a pass, and read its timestep and its token grids.

A call of a layer belongs to the last pass of its thread, unless the layer begins the next pass. A layer that may begin
a pass does so if the last pass has already run this layer, or a block:

layer           wrap             may begin a pass                  in which models it comes first
--------------  ---------------  --------------------------------  -----------------------------------------------
timestep layer  TimestepWrap     in every model                    UNets, their ControlNets, FLUX, CogVideoX,
                                                                   VCtrl, HunyuanVideo
transformer     TransformerWrap  the first that merges, in a UNet  UNets whose timestep is not read
                                 without a timestep layer
grid layer      GridWrap         outside of UNets, and of such a   Stable Diffusion 3, PixArt, DiT, VQ-Diffusion,
                                 transformer unless its wrap ran   Wan
block           BlockWrap        never                             none

The first `apply_tome` may install the wraps while a pass runs, and nothing merges in that pass: if the first layer
that runs in a thread may not begin a pass, it joins a pass that has begun before, and so does a block if its grid
layer or its timestep layer has not run in the pass. After such a pass, any layer that may begin a pass does.

Gradient checkpointing runs a transformer or a block again after its pass, with an input that is recorded. Such a call
belongs to the pass of its input.
"""

import inspect
import weakref
from typing import Any, NamedTuple

import paddle
from paddle import nn

from ..errors import ToMePassError
from ..families.blocks import MergeableBlock
from ..families.grids import grid_of_ids, token_grid
from ..families.table import Family
from ..grid import Grid
from ..methods import ToMeConfig
from ..methods.plan import turn_at
from ..methods.steps import plain_steps_of
from ..methods.turns import turn_table
from ..tensors import constants, first_number
from .forward import Wrap
from .state import Attachment, Cache, Pass, PerThread, Records, TimestepOfPass

THROUGH_ITS_MODEL = "call it through its model, or remove_tome() first"


class PassWrap(Wrap):
    """Wrap of a layer that knows to which pass a call of it belongs.

    Args:
        attachment: of the denoiser.
    """

    is_recomputed = False  # whether gradient checkpointing may run the layer again without what came before it

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.records = Records()

    def is_equivalent(self, new: "PassWrap") -> bool:
        return self.attachment is new.attachment

    def may_begin(self, current: Pass | None) -> bool:
        """Whether the layer may begin the pass after the current one."""
        return False

    def enter(self, layer: nn.Layer, x: paddle.Tensor) -> Pass:
        """The pass to which a call with the input x belongs."""
        attachment, current = self.attachment, self.attachment.current
        keeps_records = self.is_recomputed and paddle.in_dynamic_mode()
        is_again = current is not None and self in current.seen
        known = self.records.find(x) if keeps_records and (current is None or is_again) else None
        if known is not None:
            current = attachment.continue_with(known)
        elif current is None:
            current = attachment.begin()
            if not self.may_begin(None):
                current.mark_partial()
        elif self.may_begin(current) and (is_again or current.reached_blocks or current.is_partial):
            current = attachment.begin()
        current.seen.add(self)
        if keeps_records and layer.training:
            self.records.add(x, current)
        return current


class TimestepWrap(PassWrap):
    """Wrap of the layer that gets the timestep: read it, once in a pass.

    Args:
        attachment: of the denoiser.
        family: of its blocks.
    """

    def __init__(self, attachment: Attachment, family: Family) -> None:
        super().__init__(attachment)
        self._family = family
        self._tables = Cache()

    def may_begin(self, current: Pass | None) -> bool:
        return True

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        timestep = _first(args, kwargs)
        current = self.enter(layer, timestep)
        if current.applied is not None and current.applied.config.takes_turns:
            current.timestep = read_timestep(timestep, current.applied.config, self._family, self._tables)
        return self.forward(layer, *args, **kwargs)


class TransformerWrap(PassWrap):
    """Wrap of a transformer inside a UNet, which gradient checkpointing may run again as a whole.

    Args:
        attachment: of the denoiser.
        is_first: whether no layer before it has a wrap.
    """

    is_recomputed = True

    def __init__(self, attachment: Attachment, is_first: bool) -> None:
        super().__init__(attachment)
        self.is_first = is_first

    def may_begin(self, current: Pass | None) -> bool:
        return self.is_first

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        self.enter(layer, _first(args, kwargs))
        return self.forward(layer, *args, **kwargs)


class PositionsWrap(Wrap):
    """Wrap of a denoiser whose grid follows from the positions of its tokens: read them once for an image.

    A pipeline passes the same tensor in each step. To read it waits for a GPU, so it is read again only if a different
    tensor comes, or if it was written to.

    Args:
        argument: of the denoiser, with the positions of its image tokens.
    """

    def __init__(self, argument: str) -> None:
        self.argument = argument
        self._thread = _PositionsInThread()

    def is_equivalent(self, new: "PositionsWrap") -> bool:
        return self.argument == new.argument

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(type(layer).forward).bind_partial(layer, *args, **kwargs).arguments
        self._thread.positions = arguments.get(self.argument)
        try:
            return self.forward(layer, *args, **kwargs)
        finally:
            self._thread.positions = None

    def grid(self) -> Grid | None:
        """The grid of the call that runs in this thread; None outside of a call, and in a program."""
        positions, last = self._thread.positions, self._thread.last  # [N, 3], or [1, N, 3]
        if positions is None or not paddle.in_dynamic_mode():
            return None
        if last is None or last.version != positions.inplace_version or last.positions() is not positions:
            grid = grid_of_ids(positions.reshape([-1, 3]))
            self._thread.last = last = _Read(weakref.ref(positions), positions.inplace_version, grid)
        return last.grid


class _Read(NamedTuple):
    """Positions that were read."""

    positions: weakref.ref
    version: int  # how often they had been written to
    grid: Grid


class _PositionsInThread(PerThread):
    positions: Any = None  # a tensor: of the call that runs
    last: _Read | None = None


class GridWrap(PassWrap):
    """Wrap of a transformer's first layer: read the token grid.

    Args:
        attachment: of the denoiser.
        block: any block of the transformer.
        transformer: the wrap of the transformer inside a UNet; None outside UNets.
        positions: the wrap of the denoiser, if its grid follows from positions.
    """

    def __init__(
        self,
        attachment: Attachment,
        block: MergeableBlock,
        transformer: TransformerWrap | None,
        positions: PositionsWrap | None,
    ) -> None:
        super().__init__(attachment)
        self._family: Family = block.family
        self._transformer, self._positions = transformer, positions

    def may_begin(self, current: Pass | None) -> bool:
        """In a UNet only in place of its transformer, whose wrap a cache may leave out."""
        if self._transformer is None:
            return True
        return self._transformer.is_first and (current is None or self._transformer not in current.seen)

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        x = _first(args, kwargs)
        current = self.enter(layer, x)
        if current.applied is not None and current.applied.merges:
            of_positions = None if self._positions is None else self._positions.grid()
            current.grids[self] = token_grid(self._family, layer, x, current.grids.get(self), of_positions)
        return self.forward(layer, *args, **kwargs)

    def is_equivalent(self, new: PassWrap) -> bool:
        return super().is_equivalent(new) and isinstance(new, GridWrap) and self._positions is new._positions

    def check(self, grid: Grid, tokens: int) -> None:
        """Raise ToMePassError unless the tokens of a block are those of a grid, or of the frames of a video."""
        if tokens != grid.tokens and not (self._family.has_frames and tokens % grid.tokens == 0):
            raise ToMePassError(
                f"a block got {tokens} tokens but the feature map was {grid.h}×{grid.w}: {THROUGH_ITS_MODEL}."
            )


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


def read_timestep(timestep: paddle.Tensor, config: ToMeConfig, family: Family, tables: Cache) -> TimestepOfPass:
    """What follows from a timestep, [B] or a number, with a config. `tables` caches the table of turns by device.

    Where the first and last steps are plain, eager mode decides it in Python, and waits for a GPU to know the value.
    """
    with paddle.no_grad():
        is_eager = paddle.in_dynamic_mode()
        table = tables.get(paddle.get_device(), _turns) if is_eager else _turns()
        is_plain: bool | paddle.Tensor = False
        if config.has_plain_steps:
            is_plain = plain_steps_of(family.is_flow).include(first_number(timestep))
            is_plain = bool(is_plain) if is_eager else is_plain
        turn = turn_at(timestep, table, family.is_flow)
        values = timestep if is_eager else None
        return TimestepOfPass(turn, timestep.shape[0] if timestep.ndim else 1, is_plain, values)


@paddle.jit.not_to_static  # not to be computed in the program
def _turns() -> paddle.Tensor:  # [LAST_TIMESTEP + 1] int64
    table: paddle.Tensor = constants(turn_table())
    return table
