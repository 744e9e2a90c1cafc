"""The token grid of a transformer: from its input in a pass, or from the size of the latents and the level."""

from typing import Any

import numpy as np
import paddle
from paddle import nn
from ppdiffusers.models.embeddings import ImagePositionalEmbeddings, PatchEmbed

from ..errors import ToMePassError
from ..grid import Grid
from .table import Family


def token_grid(
    family: Family,
    grid_layer: nn.Layer,
    x: paddle.Tensor,
    before: Grid | None = None,
    of_positions: Grid | None = None,
) -> Grid:
    """The token grid of a transformer, from the input x of its `grid_layer`.

    Args:
        family: the family of the transformer.
        grid_layer: the layer that shows the grid.
        x: the input of that layer.
        before: the grid of the previous pass. A program of FLUX is traced for it, because its positions are only known
            when it runs; the program checks them then.
        of_positions: the grid of FLUX's positions if it is known, so that they are not read.

    Raises:
        ToMePassError: x is not a feature map, has fewer indices than its grid, or has no fixed height and width.
    """
    if isinstance(grid_layer, ImagePositionalEmbeddings):  # [B, h·w] indices of a fixed grid, as in VQ-Diffusion
        grid = Grid(grid_layer.height, grid_layer.width)
        if x.shape[-1] not in (grid.tokens, -1):
            raise ToMePassError(
                f"{type(grid_layer).__name__} got {x.shape[-1]} indices, but its grid of {grid.h}×{grid.w} has "
                f"{grid.tokens}: merging needs the complete grid. Pass all indices, or remove_tome() first."
            )
        return grid
    if family.grid_positions is not None:
        if not paddle.in_dynamic_mode():
            return check_ids(x, before)
        return grid_of_ids(x) if of_positions is None else of_positions
    if x.ndim not in (4, 5):  # 5 in Hotshot-XL, [B, C, F, H, W], whose F frames become images of the batch
        raise ToMePassError(
            f"{type(grid_layer).__name__} got {list(x.shape)}: merging needs a feature map [B, C, H, W]."
        )
    data_format = getattr(grid_layer, "data_format", getattr(grid_layer, "_data_format", "NCHW"))
    channels_last = not data_format.startswith("NC")
    h_axis, w_axis = (1, 2) if channels_last else (x.ndim - 2, x.ndim - 1)
    h, w = x.shape[h_axis], x.shape[w_axis]
    if h < 0 or w < 0:
        raise ToMePassError(
            f"{type(grid_layer).__name__} got {list(x.shape)}: a program that merges needs a fixed height and width. "
            "Export one for each size, as export_pipeline(sizes=[(height, width), …]) does."
        )
    return _in_patches(grid_layer, Grid(h, w))


def grid_of_latents(grid_layer: nn.Layer, level: int, latent: Grid) -> Grid:
    """The token grid at a level of a transformer with this grid layer, for a grid of latents."""
    if isinstance(grid_layer, ImagePositionalEmbeddings):
        return Grid(grid_layer.height, grid_layer.width)
    return _in_patches(grid_layer, grid_at(latent, level))


def _in_patches(grid_layer: nn.Layer, grid: Grid) -> Grid:
    if isinstance(grid_layer, PatchEmbed):
        return Grid(grid.h // grid_layer.patch_size, grid.w // grid_layer.patch_size)
    if isinstance(grid_layer, (nn.Conv2D, nn.Conv3D)):
        return Grid(grid.h // grid_layer._stride[-2], grid.w // grid_layer._stride[-1])
    return grid


def grid_of_ids(ids: paddle.Tensor) -> Grid:
    """The grid of FLUX's image tokens, from the frame, row and column of each, [N, 3] or after the text's [T + N, 3].

    It reads them on the processor, and waits for a GPU.

    Raises:
        ToMePassError: they are not those of one grid.
    """
    positions = ids.cast("float32").numpy()  # NumPy has no bfloat16, in which a pipeline may pass them
    grid = Grid(*(int(last) + 1 for last in positions[:, 1:].max(axis=0)))
    if len(positions) < grid.tokens or (positions[-grid.tokens :] != _ids(grid)).any():
        raise ToMePassError(
            f"FluxPosEmbed got positions of {len(positions)} tokens that are not text and then one grid of "
            f"{grid.h}×{grid.w}: merging needs one image. remove_tome() first."
        )
    return grid


def check_ids(ids: paddle.Tensor, grid: Grid | None) -> Grid:
    """Return the grid for which a program is traced, and let the program fail for positions of a different grid.

    Raises:
        ToMePassError: grid is None.
    """
    if grid is None:
        raise ToMePassError(
            "a program of FLUX that merges is for one token grid, and none is known: run the model once at the size "
            "that it is for, with merging, and then trace the same model."
        )
    is_expected = ids[-grid.tokens :].cast("float32") == paddle.to_tensor(_ids(grid))
    paddle.static.nn.control_flow.Assert(is_expected.all())
    return grid


def _ids(grid: Grid) -> np.ndarray:  # [N, 3] float32
    return np.stack([np.zeros(grid.tokens), *np.divmod(np.arange(grid.tokens), grid.w)], axis=1).astype("float32")


def latent_grid(denoiser: nn.Layer) -> Grid | None:
    """The default grid of latents: `sample_size` of the model's config, or CogVideoX's; None if it has none."""
    config: Any = getattr(denoiser, "config", None)
    size = getattr(config, "sample_size", None)
    if size is None and getattr(config, "sample_height", None) is not None:
        size = config.sample_height, config.sample_width
    if size is None:
        return None
    return Grid(size, size) if isinstance(size, int) else Grid(*size)


def level_of(denoiser: nn.Layer, path: str) -> int:
    """The level of a layer's input, derived from its path in a UNet or ControlNet and the samplers before it.

    A model without `down_blocks` (DiT, PixArt, SD3) has one resolution: all its layers are at level 1.
    """
    if not hasattr(denoiser, "down_blocks"):
        return 1
    stage, _, rest = path.partition(".")
    exits = [1]  # the level at the input of the first down block, and at the output of each
    for block in denoiser.down_blocks:
        exits.append(exits[-1] * (2 if block.downsamplers is not None else 1))
    if stage == "down_blocks":
        return exits[int(rest.partition(".")[0])]
    if stage == "controlnet_down_blocks":  # one 1×1 convolution per residual of the ControlNet
        levels = [1]
        for block, entry, exit_ in zip(denoiser.down_blocks, exits, exits[1:], strict=False):
            levels += [entry] * len(block.resnets) + ([exit_] if block.downsamplers is not None else [])
        return levels[int(rest.partition(".")[0])]
    if stage in ("mid_block", "controlnet_mid_block"):
        return exits[-1]
    if stage != "up_blocks":
        return 1
    before = list(denoiser.up_blocks)[: int(rest.partition(".")[0])]
    samplers = sum(block.upsamplers is not None for block in before)
    return exits[-1] >> (samplers + (".upsamplers." in path))  # an upsampler's convolution follows its interpolation


def grid_at(latent: Grid, level: int) -> Grid:
    """The grid at a level: each halving rounds up, as a stride-2 convolution does."""
    return Grid(-(-latent.h // level), -(-latent.w // level))
