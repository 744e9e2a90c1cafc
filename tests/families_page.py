"""The table of docs/families.md, from the zoo. As a script, `python tests/families_page.py`, it writes that table."""

import re
from pathlib import Path

import ppdiffusers
from zoo import REFUSED, ZOO

from ppdiffusers_tome.models import layer_components
from ppdiffusers_tome.unsupported import REASONS, no_merge_reason

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- table: written by tests/families_page.py -->", "<!-- end of the table -->"
# Classes without a builder: the models that merge, or those that do not, by component.
WITHOUT_BUILDER: dict[str, str | dict[str, str]] = {
    "BlipDiffusionControlNetPipeline": "unet, controlnet",
    "BlipDiffusionPipeline": "unet",
    "StableDiffusionParadigmsPipeline": "unet",
    "StableDiffusionPix2PixZeroPipeline": "unet",
    "VersatileDiffusionPipeline": "image_unet",
    **{name: {"unet": "Kandinsky3UNet"} for name in ("Kandinsky3Pipeline", "Kandinsky3Img2ImgPipeline")},
    "LDMTextToImageLargeDiTPipeline": {"transformer": "DiTLLaMAT2IModel"},
    "VideoToVideoModelscopePipeline": {"unet": "Vid2VidSTUNet"},
    **{
        f"PaddleInfer{name}": {"unet": "PaddleInferRuntimeModel"}
        for name in (
            "CycleDiffusionPipeline",
            "StableDiffusionControlNetPipeline",
            "StableDiffusionImg2ImgPipeline",
            "StableDiffusionInpaintPipeline",
            "StableDiffusionInpaintPipelineLegacy",
            "StableDiffusionMegaPipeline",
            "StableDiffusionPipeline",
            "StableDiffusionXLImg2ImgPipeline",
            "StableDiffusionXLInpaintPipeline",
            "StableDiffusionXLInstructPix2PixPipeline",
            "StableDiffusionXLMegaPipeline",
            "StableDiffusionXLPipeline",
            "StableVideoDiffusionPipeline",
        )
    },
}


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


def row(name: str, pipe: ppdiffusers.DiffusionPipeline | None = None, merges: tuple[str, ...] = ()) -> str:
    """The line of one class: from its tiny pipeline and the models that merge there, or from WITHOUT_BUILDER."""
    models = WITHOUT_BUILDER[name] if pipe is None else ", ".join(dict.fromkeys(m.split(".")[0] for m in merges))
    reasons = {}
    if isinstance(models, dict):
        models, reasons = "", {component: REASONS[model] for component, model in models.items()}
    elif pipe is not None:
        named = {component: no_merge_reason(model) for component, model in layer_components(pipe).items()}
        reasons = {component: reason for component, reason in named.items() if reason}
    texts = [models] * bool(models) + [f"{component}: {reason}" for component, reason in reasons.items()]
    return f"| `{name}` | {'yes' if models else 'no'} | {'; '.join(texts)} |"


def line_of(name: str) -> str:
    """The line of one class, whose tiny pipeline is built if there is one."""
    if name in ZOO:
        tiny = ZOO[name]()
        return row(name, tiny.pipe, tiny.merges)
    return row(name, REFUSED[name]() if name in REFUSED else None)


def table() -> str:
    """The whole table; pipelines that merge come first."""
    rows = [line_of(name) for name in pipeline_classes()]
    rows.sort(key=lambda line: "| no |" in line)
    merging = sum("| yes |" in line for line in rows)
    lines = [
        f"{merging} of the {len(rows)} pipeline classes of ppdiffusers {ppdiffusers.__version__} merge.",
        "",
        "| pipeline | merges | models that merge by default, and why others do not |",
        "|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def rows_of(page: str) -> dict[str, str]:
    """The lines of a page's tables, by class."""
    return {name: line for line in page.splitlines() for name in re.findall(r"^\| `(\w+)`", line)}


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
