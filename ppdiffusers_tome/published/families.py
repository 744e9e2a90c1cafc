"""Which of ppdiffusers' pipelines merge: for each class its published denoisers, and the blocks that merge."""

from collections.abc import Iterator
from dataclasses import dataclass

import ppdiffusers

from ..api import apply_tome, tome_summary
from ..errors import NoMergeableLayerError, UnsupportedVersionError
from ..models import find_blocks
from ..unsupported import REASONS, no_merge_reason
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
    SD3_CONTROL,
    SDXL,
    SVD,
    UNCLIP,
    UPSCALER,
    VQ_DIFFUSION,
    Layout,
)

# Pipelines, and their denoisers by component: a layout, or the name of a model class in which nothing can merge.
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
        "StableDiffusion3ControlNet StableDiffusion3ControlNetInpainting",
        {"transformer": SD3, "controlnet": SD3_CONTROL},
    ),
    ("CogVideoX", {"transformer": "CogVideoXTransformer3DModel"}),
    (
        "CogVideoXVCtrl CogVideoXVCtrlImageToVideo",
        {"transformer": "CogVideoXTransformer3DVCtrlModel", "vctrl": "VCtrlModel"},
    ),
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
    name if "Pipeline" in name else f"{name}Pipeline": models for names, models in _GROUPS for name in names.split()
}


@dataclass(frozen=True)
class PipelineSupport:
    """What apply_tome does by default in one class of pipelines."""

    pipeline: str
    merges: bool
    blocks: str  # for each denoiser that merges: number, level and grid of the blocks; "" if none does
    models: str  # the published models that the class was checked with
    reason: str  # for each denoiser that does not merge: why


_ADDED_JOINT = "transformer: 24 of 24 at level 1, 64×64 tokens; controlnet: 6 of 6 at level 1, 64×64 tokens"
_ADDED_MODELS = "Stable Diffusion 3, ControlNet for Stable Diffusion 3"
_ADDED_REASON = f"transformer: {REASONS['CogVideoXTransformer3DModel']}"
_ADDED_CONTROL = ("CogVideoXTransformer3DVCtrlModel, VCtrlModel", f"{_ADDED_REASON}; vctrl: {REASONS['VCtrlModel']}")
# Of classes that ppdiffusers 0.29.0 does not have; tests/test_families_table.py compares them on a newer one.
ADDED = (
    PipelineSupport("StableDiffusion3ControlNetInpaintingPipeline", True, _ADDED_JOINT, _ADDED_MODELS, ""),
    PipelineSupport("StableDiffusion3ControlNetPipeline", True, _ADDED_JOINT, _ADDED_MODELS, ""),
    PipelineSupport("CogVideoXPipeline", False, "", "CogVideoXTransformer3DModel", _ADDED_REASON),
    PipelineSupport("CogVideoXVCtrlImageToVideoPipeline", False, "", *_ADDED_CONTROL),
    PipelineSupport("CogVideoXVCtrlPipeline", False, "", *_ADDED_CONTROL),
)
_ADDED_PAGE = """## Added after ppdiffusers 0.29.0

These classes are in PaddleMIX's development branch of 2025-02-11 (commit e1fbd062 of co63oc/PaddleMIX). There, with
Paddle 3.3.1, tiny models of its own classes ran plain, merged and with merging removed: Stable Diffusion 3.5's
transformer and SD3's ControlNet. The complete pipelines below were not run. On 0.29.0 only a double of Stable
Diffusion 3.5's blocks runs.
All blocks of Stable Diffusion 3.5 (`StableDiffusion3Pipeline`) merge, in both attention layers where they have two.
FLUX, Wan and HunyuanVideo are not in that branch and were not run, with real classes or doubles.
Test another version by `make test-newer STACK=paddle3 SOURCE=PaddleMIX/ppdiffusers`.
"""


def pipeline_classes() -> list[str]:
    """Names of all pipeline classes of the installed ppdiffusers, including those that this Paddle cannot import."""
    names = set()
    for module in (ppdiffusers, ppdiffusers.pipelines):
        for name in (name for name in dir(module) if "Pipeline" in name):
            try:
                member = getattr(module, name)
            except AttributeError:  # listed, but does not exist
                continue
            except RuntimeError:  # exists, but an import fails: LDMTextToImageLargeDiTPipeline on Paddle 3.3
                names.add(name)
                continue
            if isinstance(member, type) and issubclass(member, ppdiffusers.DiffusionPipeline):
                names.add(member.__name__)
    return sorted(names - {"DiffusionPipeline"})


def pipeline_support() -> list[PipelineSupport]:
    """Support of every pipeline class; those that merge come first.

    Raises:
        UnsupportedVersionError: ppdiffusers has pipeline classes that are missing in the table.
    """
    pipelines = pipeline_classes()
    if unknown := set(pipelines) - set(PIPELINES):
        raise UnsupportedVersionError(
            f"the table is for ppdiffusers 0.29.0 and its branch of 2025-02-11, but {ppdiffusers.__version__} "
            f"also has {', '.join(sorted(unknown))}: call apply_tome() on such a pipeline to see whether it merges."
        )
    by_model: dict[str, tuple[str, str]] = {}
    table = []
    for pipeline in pipelines:
        merging, refusals = [], []
        for component, model in PIPELINES[pipeline].items():
            key = model if isinstance(model, str) else model.name
            blocks, reason = by_model[key] = by_model.get(key) or _blocks_or_reason(model)
            if blocks:
                merging.append(f"{component}: {blocks}")
            else:
                refusals.append(f"{component}: {reason}")
        models = [model.name if isinstance(model, Layout) else model for model in PIPELINES[pipeline].values()]
        support = PipelineSupport(pipeline, bool(merging), "; ".join(merging), ", ".join(models), "; ".join(refusals))
        table.append(support)
    return sorted(table, key=lambda support: not support.merges)


def _blocks_or_reason(model: Layout | str) -> tuple[str, str]:
    """Which blocks of a model merge, or why none does; one of the two is empty."""
    if isinstance(model, str):
        return "", REASONS[model]
    denoiser = model.build()
    try:
        apply_tome(denoiser)
    except NoMergeableLayerError:
        return "", no_merge_reason(denoiser) or "no reason is known"
    blocks, total = tome_summary(denoiser, model.latent, model.latent).blocks, len(find_blocks(denoiser))
    return f"{len(blocks)} of {total} at level {blocks[0].level}, {blocks[0].grid.h}×{blocks[0].grid.w} tokens", ""


def format_text(table: list[PipelineSupport]) -> str:
    """The table for the terminal."""
    width = max(len(row.pipeline) for row in table)
    lines = [f"{row.pipeline:<{width}}  {_yes_or_no(row):<5}  {_details(row)}" for row in table]
    merging = sum(row.merges for row in table)
    lines.append(f"{merging} of {len(table)} pipeline classes of ppdiffusers {ppdiffusers.__version__} merge.")
    return "\n".join(lines)


def format_markdown(table: list[PipelineSupport]) -> str:
    """The page docs/families.md."""
    return "\n".join(_markdown_lines(table)) + "\n"


def _markdown_lines(table: list[PipelineSupport]) -> Iterator[str]:
    yield "# Supported pipelines"
    yield ""
    yield "Generated by `python -m ppdiffusers_tome families --markdown`; do not edit."
    yield ""
    merging = sum(row.merges for row in table)
    yield (
        f"{merging} of the {len(table)} pipeline classes of ppdiffusers {ppdiffusers.__version__} merge. The table "
        "shows the blocks that `apply_tome()` merges by default in the published models, at their default sizes."
    )
    yield ""
    yield from _rows(table)
    yield ""
    yield _ADDED_PAGE
    yield from _rows([*ADDED])


def _rows(table: list[PipelineSupport]) -> Iterator[str]:
    yield "| pipeline | merges | blocks that merge by default, or why none do | published model |"
    yield "|---|---|---|---|"
    for row in table:
        yield f"| `{row.pipeline}` | {_yes_or_no(row)} | {_details(row)} | {row.models} |"


def _yes_or_no(row: PipelineSupport) -> str:
    return "yes" if row.merges else "no"


def _details(row: PipelineSupport) -> str:
    return "; ".join(text for text in (row.blocks, row.reason) if text)
