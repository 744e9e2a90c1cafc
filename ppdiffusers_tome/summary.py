"""What merging does to a pipeline or model at one picture size: which blocks, how many tokens, how much work saved."""

from dataclasses import dataclass
from typing import Any

from ppdiffusers import DiffusionPipeline

from .errors import ToMeConfigError
from .macs import count_macs, saved_macs
from .models import block_grid, denoisers, is_countable, latent_grid, text_tokens, vae_factor
from .patch import chosen_blocks, config_of, merging_layers
from .positions import Grid, count_removed


@dataclass(frozen=True)
class BlockSummary:
    """One block that merges."""

    denoiser: str  # its model's name in the pipeline, e.g. "unet"
    path: str  # its path in that model
    level: int  # downsample factor
    grid: Grid  # tokens along each axis
    kept: int  # tokens that stay, of grid.tokens
    merges: tuple[str, ...]  # some of "attn", "crossattn", "mlp"


@dataclass(frozen=True)
class ToMeSummary:
    """The blocks that merge, and what that saves of the denoisers' multiply-accumulates. `str()` is a table."""

    settings: dict[str, str]  # denoiser: its config, or "off"
    latent: Grid
    blocks: tuple[BlockSummary, ...]
    notes: tuple[str, ...]  # one for each denoiser that has no attention at level 1, on what counts as the first
    macs: int | None  # of one pass for one image without merging; None where a model's cannot be counted
    saved: int | None  # of them, with the matching's own cost taken off

    @property
    def saved_share(self) -> float | None:
        """saved / macs, from 0 to 1; below 0 where the matching costs more than merging saves."""
        return None if self.macs is None or self.saved is None else self.saved / self.macs

    def __str__(self) -> str:
        lines = [f"{name}: {setting}" for name, setting in self.settings.items()]
        lines += self.notes
        lines.append(f"latents {self.latent.h}×{self.latent.w}")
        if self.blocks:
            width = max(len(f"{b.denoiser}.{b.path}") for b in self.blocks)
            lines.append(f"{'block':<{width}}  level  grid       tokens stay      merges")
            for b in self.blocks:
                grid, stay = f"{b.grid.h}×{b.grid.w}", f"{b.kept} of {b.grid.tokens}"
                name, merges = f"{b.denoiser}.{b.path}", ", ".join(b.merges)
                lines.append(f"{name:<{width}}  {b.level:>5}  {grid:<9}  {stay:<15}  {merges}")
        if self.macs is None or self.saved_share is None:
            lines.append("MACs: not counted for this kind of model")
        else:
            lines.append(f"MACs saved: {self.saved_share:.1%} of {self.macs / 1e9:.2f} G per image and pass")
        return "\n".join(lines)


def summarize(target: Any, height: int | None = None, width: int | None = None) -> ToMeSummary:
    """See `mixin.tome_summary`, which users call."""
    models = denoisers(target)
    configs = {name: config_of(denoiser) for name, denoiser in models.items()}
    factor = vae_factor(target) if isinstance(target, DiffusionPipeline) else 1
    made_for = next((grid for grid in map(latent_grid, models.values()) if grid), None)
    latent = Grid(
        _latent_side("height", height, factor, made_for.h if made_for else None),
        _latent_side("width", width, factor, made_for.w if made_for else None),
    )
    text = text_tokens(target)
    countable = all(is_countable(denoiser) for denoiser in models.values())
    blocks, notes, saved = [], [], 0
    for name, config in configs.items():
        if config is None:
            continue
        chosen = chosen_blocks(models[name], config)
        if config.max_downsample is None and chosen[0].level > 1:
            notes.append(f"{name}: no shallower attention than at level {chosen[0].level}, which counts as the first")
        for found in chosen:
            grid, merges = block_grid(found, latent), tuple(merging_layers(found, config))
            kept = grid.tokens - count_removed(grid, config)
            blocks.append(BlockSummary(name, found.path, found.level, grid, kept, merges))
            saved += saved_macs(found, config, latent, text) if countable else 0
    return ToMeSummary(
        settings={name: config.describe() if config else "off" for name, config in configs.items()},
        latent=latent,
        blocks=tuple(blocks),
        notes=tuple(notes),
        macs=sum(count_macs(denoiser, latent, text) for denoiser in models.values()) if countable else None,
        saved=saved if countable else None,
    )


def _latent_side(name: str, pixels: int | None, factor: int, made_for: int | None) -> int:
    if pixels is None:
        if made_for is None:
            raise ToMeConfigError(
                f"{name}=None is not allowed here: the model's config has no sample_size to fall back on."
            )
        return made_for
    if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < factor:
        raise ToMeConfigError(f"{name}={pixels!r} is not allowed: it must be an int of at least {factor} pixels.")
    return pixels // factor
