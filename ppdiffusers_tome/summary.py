"""What merging does in a pipeline or model at one image size: which blocks, how many tokens, how many MACs saved."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ppdiffusers import DiffusionPipeline

from .attach.attach import attached_placements, last_timesteps
from .attach.placement import Placement
from .errors import ToMeConfigError
from .families.applications import is_countable
from .families.blocks import MergeableBlock
from .families.grids import latent_grid
from .families.kernels import attention_label
from .families.pipelines import (
    components,
    count_frames,
    find_denoisers,
    text_tokens,
    vae_factor,
    why_nothing_merges,
)
from .families.schedules import default_steps, timesteps_of
from .grid import Grid
from .macs import count_macs, saved_macs
from .methods.steps import PlainSteps, plain_steps_of


@dataclass(frozen=True)
class BlockSummary:
    """One block that merges, or would at a higher ratio or on a larger grid."""

    denoiser: str  # name of its model in the pipeline, e.g. "unet"
    path: str  # path in that model
    level: int  # downsample factor
    grid: Grid  # tokens along each axis
    kept_queries: int  # tokens, of grid.tokens, on which its layers run; of a video in each frame
    kept_keys: int  # tokens that give keys and values to self-attention
    is_below_min_tokens: bool  # the grid has fewer tokens than min_tokens, so the block stays plain
    # Where it merges: some of "attn" (or "kv": only its keys and values), "crossattn", "mlp"; empty if nothing does.
    merges: tuple[str, ...]


@dataclass(frozen=True)
class ToMeSummary:
    """The blocks that merge, and the multiply-accumulates that this saves.

    `str()` is a table, in ASCII so that any terminal and log can show it.
    """

    settings: dict[str, str]  # denoiser: its config, "off", or what was exported; empty where nothing can merge
    latent: Grid | None  # None where nothing can merge and no size was passed
    blocks: tuple[BlockSummary, ...]
    # A note for each denoiser without attention at level 1, or for what was exported; or why nothing can merge.
    notes: tuple[str, ...]
    macs: int | None  # of one pass for one image without merging; None for models or videos that cannot be counted
    saved: int | None  # MACs saved in a step that merges, net of the cost of matching
    # The attention processors of the blocks, each with whether its kernel is fused: "AttnProcessor (not fused)".
    attention: tuple[str, ...] = ()
    plain: PlainSteps | None = None  # the steps of an image in which all tokens remain; None if there are none
    steps: int | None = None  # of an image; None if its schedule is not known
    plain_steps: int = 0  # those of them in which all tokens remain
    saved_of_image: float | None = None  # MACs saved in a step, the mean over those of an image; None as for `saved`

    @property
    def saved_share(self) -> float | None:
        """saved / macs, at most 1; negative if the matching costs more than merging saves."""
        return None if self.macs is None or self.saved is None else self.saved / self.macs

    @property
    def saved_share_of_image(self) -> float | None:
        """saved_of_image / macs, smaller than `saved_share` if some steps keep all tokens."""
        return None if self.macs is None or self.saved_of_image is None else self.saved_of_image / self.macs

    def __str__(self) -> str:
        lines = [f"{name}: {setting}" for name, setting in self.settings.items()]
        lines += self.notes
        if self.latent is not None:
            lines.append(f"latents {self.latent.h}x{self.latent.w}")
        if self.attention:
            lines.append(f"attention: {', '.join(self.attention)}")
        if self.blocks:
            rows = [("block", "level", "grid", "tokens kept", "merges")]
            for b in self.blocks:
                of_keys = "" if b.kept_keys == b.kept_queries else "keys and values "
                plain = "plain (min_tokens)" if b.is_below_min_tokens else "plain"
                kept, merges = f"{of_keys}{b.kept_keys} of {b.grid.tokens}", ", ".join(b.merges) or plain
                rows.append((f"{b.denoiser}.{b.path}", str(b.level), f"{b.grid.h}x{b.grid.w}", kept, merges))
            w = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += [f"{a:<{w[0]}}  {b:>{w[1]}}  {c:<{w[2]}}  {d:<{w[3]}}  {e}" for a, b, c, d, e in rows]
        if self.macs is None or self.saved_share is None:
            if self.settings and not any(note.startswith("MACs") for note in self.notes):
                lines.append("MACs: cannot be counted for this kind of model")
        else:
            lines.append(f"MACs saved: {self.saved_share:.1%} of {self.macs / 1e9:.2f} G per image and pass")
            if self.plain_steps and self.saved_share_of_image is not None:
                lines[-1] += (
                    f" that merges; {self.plain_steps} of {self.steps} steps keep all tokens, so "
                    f"{self.saved_share_of_image:.1%} of an image"
                )
        return "\n".join(lines)


def tome_summary(
    target: Any,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
) -> ToMeSummary:
    """Report which blocks merge, how many tokens they keep, their attention processors, and the share of MACs saved.

    Args:
        target: a pipeline or model; if merging is off, no block is listed and nothing is saved.
        height, width: the image size; for a pipeline in image pixels, as in its call, for a model in latent pixels.
            Both or neither: the default is the size in the config of the denoiser.
        frames: latent frames of a video whose frames are one sequence (CogVideoX, Wan, HunyuanVideo), for its MACs;
            by default those in the config, which only CogVideoX has. Tokens are counted in one frame.
        steps: of an image of a pipeline, to count those in which all tokens remain; by default those of its call.

    Returns:
        A ToMeSummary, whose str() is a table. It covers all denoisers of a pipeline, at one latent size. For an
        exported pipeline it says what was exported, and where nothing can merge, why; neither needs a size.

    Raises:
        ToMeConfigError: target is not a pipeline or model, a size, frames or steps is not positive, one of height and
            width is missing, or the size is unknown.

    Example:
        >>> print(pipe.apply_tome(ratio=0.5).tome_summary(height=256, width=256))
    """
    found = find_denoisers(target)
    placed = {name: attached_placements(model, of_model) for name, model, of_model in found}
    factor = vae_factor(target, found) if isinstance(target, DiffusionPipeline) else 1
    if (height is None) != (width is None):  # the default of the missing side belongs to an image of a different size
        raise ToMeConfigError(
            f"{'width' if width is None else 'height'} is missing: pass both height and width, as in "
            "tome_summary(height=512, width=512), or neither for the size in the model's config."
        )
    if not found and height is None:
        return _without_blocks(target, None)
    default = next((grid for grid in (latent_grid(denoiser.model) for denoiser in found) if grid), None)
    latent = Grid(
        _latent_side("height", height, factor, default.h if default else None),
        _latent_side("width", width, factor, default.w if default else None),
    )
    if not found:
        return _without_blocks(target, latent)
    if frames is not None and (frames := _integer(given := frames)) < 1:
        raise ToMeConfigError(f"frames={given!r} is not allowed: it must be an int of at least 1.")
    if steps is not None and (steps := _integer(number := steps)) < 1:
        raise ToMeConfigError(f"steps={number!r} is not allowed: it must be an int of at least 1.")
    timesteps = _timesteps(target, steps)
    plain, of_image = None, 0.0
    text, length = text_tokens(target, found), count_frames(found, frames)
    countable = length is not None and all(is_countable(denoiser.model, denoiser.blocks) for denoiser in found)
    blocks, saved, attention = [], 0.0, set()
    notes = [] if length else ["MACs of a video: pass frames, the number of its latent frames"]
    if not isinstance(target, DiffusionPipeline) and default is not None and latent.tokens >= 16 * default.tokens:
        size = f"{latent.h}x{latent.w}"
        notes.append(f"the size of a model is in latent pixels, here {size}; that of a pipeline in pixels")
    for denoiser in found:
        name, of_denoiser = denoiser.name, placed[denoiser.name]
        saved_before, own_plain = saved, _plain_steps(of_denoiser)
        plain = plain or own_plain
        share = own_plain.count(timesteps) / len(timesteps) if own_plain and timesteps else 0.0
        for block, placement in of_denoiser:
            grid = block.grid(latent)
            keys = placement.count_kept(grid)
            queries = keys if placement.config.merges_queries else grid.tokens
            is_below_min_tokens = grid.tokens < placement.config.min_tokens
            merges = _merging_layers(placement) if keys < grid.tokens else ()
            blocks.append(
                BlockSummary(name, block.path, block.level, grid, queries, keys, is_below_min_tokens, merges)
            )
            layers = block.sublayers.get("attn") or block.sublayers.get("crossattn", ())
            attention |= {attention_label(layer, block.family) for layer in layers}
            if countable:
                saved += saved_macs(block, placement, latent, text, length or 1)
        of_image += (saved - saved_before) * (1 - share)
        if any(placement.takes_turns and not block.sees_timestep for block, placement in of_denoiser):
            notes.append(f"{name}: its timestep cannot be read, so each step chooses the same tokens")
        elif own_plain and not timesteps:
            notes.append(f"{name}: the first and last steps of an image keep all tokens (merge_steps='middle')")
        if len({*last_timesteps(denoiser)}) > 1:
            notes.append(
                f"{name}: the images of its last batch had different timesteps, and all took the turn of the first; "
                "in a stream batch no image changes its turn"
            )
        if of_denoiser and of_denoiser[0][1].config.max_downsample is None and (level := of_denoiser[0][0].level) > 1:
            notes.append(f"{name}: its largest feature maps with attention are at level {level}")
    settings = {name: of[0][1].config.describe() if of else "off" for name, of in placed.items()}
    macs = None
    if countable:
        macs = sum(count_macs(model, latent, text, length or 1, of_model) for _, model, of_model in found)
    return ToMeSummary(
        settings=settings,
        latent=latent,
        blocks=tuple(blocks),
        notes=tuple(notes),
        macs=macs,
        saved=round(saved) if countable else None,
        attention=tuple(sorted(attention)),
        plain=plain,
        steps=len(timesteps) if timesteps else None,
        plain_steps=plain.count(timesteps) if plain and timesteps else 0,
        saved_of_image=of_image if countable else None,
    )


def _timesteps(target: Any, steps: int | None) -> list[float] | None:
    """The timesteps of an image of a pipeline; None of a model, or if its scheduler cannot tell."""
    scheduler, steps = getattr(target, "scheduler", None), steps or default_steps(target)
    return None if scheduler is None or steps is None else timesteps_of(scheduler, steps)


def _plain_steps(placed: Sequence[tuple[MergeableBlock, Placement]]) -> PlainSteps | None:
    """The steps in which all tokens remain in a denoiser with these blocks; None if there are none."""
    if not placed or not placed[0][1].config.has_plain_steps or not placed[0][0].sees_timestep:
        return None
    return plain_steps_of(placed[0][0].family.is_flow)


def _merging_layers(placement: Placement) -> tuple[str, ...]:
    """Where a block merges, in the words of `BlockSummary`."""
    return placement.layers if placement.config.merges_queries else ("kv",)


def _without_blocks(target: Any, latent: Grid | None) -> ToMeSummary:
    """The summary of an exported pipeline or UNet, or of what cannot merge."""
    settings, notes = {}, []
    for name, component in components(target).items():
        if hasattr(component, "exported_merging"):
            settings[name], *notes = component.exported_merging()
    return ToMeSummary(settings, latent, (), tuple(notes or [why_nothing_merges(target)]), None, None)


def _latent_side(name: str, pixels: int | None, factor: int, default: int | None) -> int:
    if pixels is None:
        if default is None:
            raise ToMeConfigError(f"{name} is required: the model's config has no sample_size to use as the default.")
        return default
    if (side := _integer(pixels)) < factor:
        raise ToMeConfigError(f"{name}={pixels!r} is not allowed: it must be an int of at least {factor} pixels.")
    return side // factor


def _integer(value: Any) -> int:
    """An int or a NumPy integer as an int; -1 for anything else."""
    try:
        return -1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return -1
