"""Which of ppdiffusers' pipelines merge: each class, its denoisers as published, and what merges by default."""

from collections.abc import Iterator
from dataclasses import dataclass

import ppdiffusers

from ..errors import NoMergeableLayerError, UnsupportedVersionError
from ..limits import REASONS, why_nothing_merges
from ..mixin import apply_tome, tome_summary
from ..models import find_blocks
from .layouts import (
    ADDED_TEXT,
    AUDIO,
    AUDIO_2,
    CONTROLNET,
    CONTROLNET_SDXL,
    DEPTH,
    DIT_XL_2,
    LATENT_UPSCALER,
    LDM,
    MODELSCOPE,
    MOTION,
    PIXART,
    SD,
    SD3,
    SDXL,
    SVD,
    UNCLIP,
    UPSCALER,
    VQ_DIFFUSION,
    Layout,
)

# Pipelines: their denoisers by component, each a layout, or the class of a model in which nothing can merge.
_GROUPS: tuple[tuple[str, dict[str, Layout | str]], ...] = (
    (
        """AltDiffusion AltDiffusionImg2Img BlipDiffusion CycleDiffusion LatentConsistencyModel
        LatentConsistencyModelImg2Img PaintByExample SemanticStableDiffusion StableDiffusion StableDiffusionAdapter
        StableDiffusionAttendAndExcite StableDiffusionDiffEdit StableDiffusionGLIGEN StableDiffusionGLIGENTextImage
        StableDiffusionImageVariation StableDiffusionImg2Img StableDiffusionInpaint
        StableDiffusionInpaintPipelineLegacy StableDiffusionInstructPix2Pix StableDiffusionLDM3D
        StableDiffusionModelEditing StableDiffusionPanorama StableDiffusionParadigms
        StableDiffusionPipelineSafe StableDiffusionPix2PixZero StableDiffusionSAG TextToVideoZero""",
        {"unet": SD},
    ),
    ("StableDiffusionDepth2Img", {"unet": DEPTH}),
    ("StableUnCLIP", {"prior": "PriorTransformer", "unet": UNCLIP}),
    ("StableUnCLIPImg2Img", {"unet": UNCLIP}),
    ("StableDiffusionUpscale", {"unet": UPSCALER}),
    ("StableDiffusionLatentUpscale", {"unet": LATENT_UPSCALER}),
    (
        """StableDiffusionXL StableDiffusionXLAdapter StableDiffusionXLImg2Img StableDiffusionXLInpaint
        StableDiffusionXLInstructPix2Pix TextToVideoZeroSDXL""",
        {"unet": SDXL},
    ),
    (
        """BlipDiffusionControlNet StableDiffusionControlNet StableDiffusionControlNetImg2Img
        StableDiffusionControlNetInpaint""",
        {"unet": SD, "controlnet": CONTROLNET},
    ),
    (
        "StableDiffusionXLControlNet StableDiffusionXLControlNetImg2Img StableDiffusionXLControlNetInpaint",
        {"unet": SDXL, "controlnet": CONTROLNET_SDXL},
    ),
    ("LDMTextToImage", {"unet": LDM}),
    ("VersatileDiffusion VersatileDiffusionImageVariation", {"image_unet": SD}),
    (
        "VersatileDiffusionDualGuided VersatileDiffusionTextToImage",
        {"image_unet": SD, "text_unet": "UNetFlatConditionModel"},
    ),
    ("DiT", {"transformer": DIT_XL_2}),
    ("PixArtAlpha", {"transformer": PIXART}),
    ("StableDiffusion3 StableDiffusion3Img2Img", {"transformer": SD3}),
    ("VQDiffusion", {"transformer": VQ_DIFFUSION}),
    ("AnimateDiff", {"unet": MOTION}),
    ("TextToVideoSD VideoToVideoSD", {"unet": MODELSCOPE}),
    ("StableVideoDiffusion", {"unet": SVD}),
    ("AudioLDM MusicLDM", {"unet": AUDIO}),
    ("AudioLDM2", {"unet": AUDIO_2}),
    (
        """IF IFImg2Img IFImg2ImgSuperResolution IFInpainting IFInpaintingSuperResolution IFSuperResolution Kandinsky
        KandinskyImg2Img KandinskyInpaint KandinskyV22 KandinskyV22Controlnet KandinskyV22ControlnetImg2Img
        KandinskyV22Img2Img KandinskyV22Inpaint""",
        {"unet": ADDED_TEXT},
    ),
    (
        """KandinskyCombined KandinskyImg2ImgCombined KandinskyInpaintCombined KandinskyV22Combined
        KandinskyV22Img2ImgCombined KandinskyV22InpaintCombined""",
        {"prior_prior": "PriorTransformer", "unet": ADDED_TEXT},
    ),
    ("KandinskyPrior KandinskyV22Prior KandinskyV22PriorEmb2Emb ShapE ShapEImg2Img", {"prior": "PriorTransformer"}),
    ("Kandinsky3 Kandinsky3Img2Img", {"unet": "Kandinsky3UNet"}),
    ("UnCLIP", {"prior": "PriorTransformer", "decoder": ADDED_TEXT, "super_res_first": "UNet2DModel"}),
    ("UnCLIPImageVariation", {"decoder": ADDED_TEXT, "super_res_first": "UNet2DModel"}),
    ("WuerstchenCombined", {"prior_prior": "WuerstchenPrior", "decoder": "WuerstchenDiffNeXt"}),
    ("WuerstchenDecoder", {"decoder": "WuerstchenDiffNeXt"}),
    ("WuerstchenPrior", {"prior": "WuerstchenPrior"}),
    (
        """AudioDiffusion ConsistencyModel DDIM DDPM KarrasVe LDM LDMSuperResolution PNDM RePaint ScoreSdeVe""",
        {"unet": "UNet2DModel"},
    ),
    ("DanceDiffusion", {"unet": "UNet1DModel"}),
    ("SpectrogramDiffusion", {"decoder": "T5FilmDecoder"}),
    ("LDMTextToImageUViT", {"unet": "UViTT2IModel"}),
    ("UniDiffuser", {"unet": "UniDiffuserModel"}),
    ("LDMTextToImageLargeDiT", {"transformer": "DiTLLaMAT2IModel"}),
    ("LVDMTextToVideo LVDMUncond", {"unet": "LVDMUNet3DModel"}),
    ("ImgToVideoSD", {"unet": "STUNetModel"}),
    ("VideoToVideoModelscope", {"unet": "Vid2VidSTUNet"}),
    (
        """PaddleInferCycleDiffusion PaddleInferStableDiffusion PaddleInferStableDiffusionControlNet
        PaddleInferStableDiffusionImg2Img PaddleInferStableDiffusionInpaint
        PaddleInferStableDiffusionInpaintPipelineLegacy PaddleInferStableDiffusionMega PaddleInferStableDiffusionXL
        PaddleInferStableDiffusionXLImg2Img PaddleInferStableDiffusionXLInpaint
        PaddleInferStableDiffusionXLInstructPix2Pix PaddleInferStableDiffusionXLMega
        PaddleInferStableVideoDiffusion""",
        {"unet": "PaddleInferRuntimeModel"},
    ),
)
PIPELINES = {
    name if "Pipeline" in name else f"{name}Pipeline": parts for names, parts in _GROUPS for name in names.split()
}


@dataclass(frozen=True)
class Verdict:
    """What apply_tome does, at its defaults, with one class of pipelines."""

    pipeline: str
    merges: bool
    blocks: str  # for each denoiser how many of its blocks merge, at which level and grid; "" where none does
    told_from: str  # the published models
    reason: str  # for each denoiser that does not merge why


def pipeline_classes() -> list[str]:
    """All pipeline classes that the installed ppdiffusers offers, by name; also what this Paddle fails to import."""
    found = set()
    for module in (ppdiffusers, ppdiffusers.pipelines):
        for name in (name for name in dir(module) if "Pipeline" in name):
            try:
                offered = getattr(module, name)
            except AttributeError:  # announced and not there
                continue
            except RuntimeError:  # there, but what it imports is not: LDMTextToImageLargeDiTPipeline on Paddle 3.3
                found.add(name)
                continue
            if isinstance(offered, type) and issubclass(offered, ppdiffusers.DiffusionPipeline):
                found.add(offered.__name__)
    return sorted(found - {"DiffusionPipeline"})


def verdicts() -> list[Verdict]:
    """One for each class, the merging ones first.

    Raises:
        UnsupportedVersionError: ppdiffusers has pipeline classes that the table does not know.
    """
    pipelines = pipeline_classes()
    if unknown := set(pipelines) - set(PIPELINES):
        raise UnsupportedVersionError(
            f"the table was made for ppdiffusers 0.29.0, and {ppdiffusers.__version__} also has "
            f"{', '.join(sorted(unknown))}: apply_tome() on such a pipeline says whether it merges."
        )
    seen: dict[str, tuple[str, str]] = {}
    found = []
    for pipeline in pipelines:
        merging, refusals = [], []
        for component, model in PIPELINES[pipeline].items():
            key = model if isinstance(model, str) else model.of
            blocks, reason = seen[key] = seen.get(key) or _try(model)
            if blocks:
                merging.append(f"{component}: {blocks}")
            else:
                refusals.append(f"{component}: {reason}")
        of = [model.of if isinstance(model, Layout) else model for model in PIPELINES[pipeline].values()]
        found.append(Verdict(pipeline, bool(merging), "; ".join(merging), ", ".join(of), "; ".join(refusals)))
    return sorted(found, key=lambda verdict: not verdict.merges)


def _try(model: Layout | str) -> tuple[str, str]:
    """Which blocks merge in a model, or why none does; one of the two is empty."""
    if isinstance(model, str):
        return "", REASONS[model]
    denoiser = model.build()
    try:
        apply_tome(denoiser)
    except NoMergeableLayerError:
        return "", why_nothing_merges(denoiser) or "no reason is known"
    blocks, total = tome_summary(denoiser, model.latent, model.latent).blocks, len(find_blocks(denoiser))
    return f"{len(blocks)} of {total} at level {blocks[0].level}, {blocks[0].grid.h}×{blocks[0].grid.w} tokens", ""


def format_text(found: list[Verdict]) -> str:
    """A table for the terminal."""
    width = max(len(verdict.pipeline) for verdict in found)
    lines = [f"{verdict.pipeline:<{width}}  {_word(verdict):<5}  {_what(verdict)}" for verdict in found]
    merging = sum(verdict.merges for verdict in found)
    lines.append(f"{merging} of {len(found)} pipeline classes of ppdiffusers {ppdiffusers.__version__} merge.")
    return "\n".join(lines)


def format_markdown(found: list[Verdict]) -> str:
    """docs/families.md."""
    return "\n".join(_markdown_lines(found)) + "\n"


def _markdown_lines(found: list[Verdict]) -> Iterator[str]:
    yield "# Pipelines"
    yield ""
    yield "Written by `python -m ppdiffusers_tome families --markdown`; do not edit."
    yield ""
    merging = sum(verdict.merges for verdict in found)
    yield (
        f"{merging} of the {len(found)} pipeline classes of ppdiffusers {ppdiffusers.__version__} merge. The blocks "
        "are those that `apply_tome()` merges at its defaults in the published models named, at their config's size."
    )
    yield ""
    yield "| pipeline | merges | blocks at the defaults, or why not | told from |"
    yield "|---|---|---|---|"
    for verdict in found:
        yield f"| `{verdict.pipeline}` | {_word(verdict)} | {_what(verdict)} | {verdict.told_from} |"


def _word(verdict: Verdict) -> str:
    return "yes" if verdict.merges else "no"


def _what(verdict: Verdict) -> str:
    return "; ".join(part for part in (verdict.blocks, verdict.reason) if part)
