"""The level of a layer in a denoiser: the downsample factor of its input feature map."""

from paddle import nn

from .positions import Grid


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
