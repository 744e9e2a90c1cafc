"""`export`: write a pipeline as a folder of programs for ONNX Runtime or Paddle Inference."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..cores import usable_cores
from ..errors import ParameterError
from ..export.layouts import EXPORT_FORMATS, LAYOUTS, RUNTIMES, DiffusersLayout, choose_layout
from ..methods import ToMeConfig
from ..run.manifest import Manifest, is_refiner
from ..run.ratios import ratio_name
from ..run.sizes import parse_size
from ..serving.prompt_file import PROMPTS
from ..wording import command_line
from .image_options import add_command, naming_options
from .merge_options import add_merge_options, merge_configs

if TYPE_CHECKING:
    from ..export.request import ExportRequest

EXAMPLE = """\
  python -m ppdiffusers_tome export --model examples/scenes_sd --ratio 0.5 0 \\
      --img2img --output build/scenes"""


def add(commands: argparse._SubParsersAction) -> None:
    """Add `export` to the command line."""
    export = add_command(commands, "export", "write a pipeline with token merging as programs", EXAMPLE)
    option = export.add_argument
    option("--model", required=True, help="folder of a pipeline, of ppdiffusers or diffusers, or hub name")
    option("--output", type=Path, required=True, help="folder to write")
    option("--ratio", type=float, nargs="+", help="one or several; 0 does not merge (default: the method's own)")
    option("--size", nargs="+", help="one or several, px or WIDTHxHEIGHT in px (default: the model's own)")
    option("--controlnet", metavar="DIR", help="a ControlNet to fuse with the UNet, folder or hub name")
    option("--controlnet-ratio", type=float, help="ratio of the ControlNet; 0 does not merge (default: the UNet's)")
    option("--img2img", action="store_true", help="export the VAE's encoder too, for image-to-image and inpainting")
    option("--no-safety-checker", action="store_true", help="omit a safety checker, which cannot be exported")
    option(
        "--format",
        choices=[*EXPORT_FORMATS, "openvino"],
        help="of the programs; openvino with --layout diffusers (default: onnx; paddle where Paddle is a GPU build)",
    )
    option(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="diffusers: for Optimum and OpenVINO GenAI, one size and ratio (default: %(default)s)",
    )
    option(
        "--for",
        dest="runtime",
        choices=RUNTIMES,
        help=f"with --layout diffusers, which runtime the ONNX models suit (default: {RUNTIMES[0]}, for both)",
    )
    option("--overwrite", action="store_true", help="replace an earlier export")
    option(
        "--threads",
        type=int,
        default=usable_cores(),
        help="CPU threads of what programs are compared with (default: %(default)s, all cores)",
    )
    option(
        "--no-image-check",
        dest="image_check",
        action="store_false",
        help="do not compare images of two steps with those of the model, which takes as long as it needs for them",
    )
    add_merge_options(export, "how to merge", is_single=True)
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    import ppdiffusers
    from paddle.base import core
    from paddlenlp.utils.log import logger

    from ..export.export import write_export
    from ..export.loading import load_eager_pipeline
    from ..run.runtime import MAX_THREADS

    configs = merge_configs(options)
    with naming_options(runtime="--for", controlnet="--controlnet-ratio", ratios="--ratio", sizes="--size"):
        request = _request(options, configs)
        if not 1 <= options.threads <= MAX_THREADS:
            raise ParameterError("threads", options.threads, f"it must be 1 to {MAX_THREADS}")
        core.set_num_threads(options.threads)
        logger.set_level("WARNING")
        ppdiffusers.utils.logging.disable_progress_bar()
        pipe = load_eager_pipeline(
            options.model,
            options.controlnet,
            safety_checker=not options.no_safety_checker,
            needs_controlnet=options.controlnet_ratio is not None,
        )
        manifest = write_export(pipe, request)
    is_layout = isinstance(request.layout, DiffusersLayout)
    print(_describe(manifest, options.output, is_layout))
    print(
        f"{options.output / 'README.md'} has the lines that load it" if is_layout else _next_steps(manifest, options)
    )
    return 0


def _request(options: argparse.Namespace, configs: Sequence[ToMeConfig]) -> "ExportRequest":
    from ..export.request import ExportRequest, list_merging, list_sizes

    controlnet = True if options.controlnet_ratio is None else options.controlnet_ratio
    return ExportRequest(
        folder=options.output,
        merging=list_merging(configs, controlnet),
        sizes=list_sizes(map(parse_size, options.size)) if options.size else None,
        layout=choose_layout(options.layout, options.format, options.runtime),
        image_to_image=options.img2img,
        overwrite=options.overwrite,
        image_check=options.image_check,
    )


def _describe(manifest: Manifest, folder: Path, is_layout: bool) -> str:
    lines = [f"{'program':<34} {'Paddle':>8} {'oneDNN':>8} {'ONNX':>8}   (largest relative difference to eager)"]
    for program in manifest.programs:
        paddle, onnx = program.files.get("paddle"), program.files.get("onnx")
        parities = (paddle and paddle.parity, paddle and paddle.onednn_parity, onnx and onnx.parity)
        cells = [f"{max(parity.values()):.1e}" if parity else "-" for parity in parities]
        name = program.model if is_layout else next(iter(program.files.values())).program
        lines.append(f"{name:<34} " + " ".join(f"{cell:>8}" for cell in cells))
    sizes = ", ".join(map(str, manifest.sizes))
    ratios = ", ".join(map(ratio_name, manifest.ratios))
    megabytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    methods = [f"merging: {method}" for method in dict.fromkeys(filter(None, manifest.methods.values()))]
    summary = f"wrote {folder}: {manifest.pipeline}, sizes {sizes}, ratios {ratios}, {megabytes:.0f} MB"
    return "\n".join([*lines, *methods, summary])


def _next_steps(manifest: Manifest, options: argparse.Namespace) -> str:
    """What a user can do with the exported folder."""
    import paddle

    device = ["--device", "gpu"] if manifest.formats == ("paddle",) and paddle.is_compiled_with_cuda() else []
    model, steps = ["--model", str(options.output), *device], []
    if _can_serve(manifest):
        own = Path(options.model) / PROMPTS
        files = ["--prompts", str(own if own.is_file() else PROMPTS), "--output", "outputs"]
        prompts = "" if own.is_file() else f"   # {PROMPTS}: a prompt per line"
        steps += [command_line(["serve", *model, "--open"]), command_line(["generate", *model, *files]) + prompts]
    arguments = [repr(str(options.output)), *(['device="gpu"'] if device else [])]
    steps.append(f"ppdiffusers_tome.inference.load_pipeline({', '.join(arguments)})   # in your own code")
    return "\n  ".join(["Next:", *steps])


def _can_serve(manifest: Manifest) -> bool:
    """Whether `serve` and `generate` take an export: those that need an image in each call are refused."""
    return not (manifest.controlnet or is_refiner(manifest) or "Inpaint" in manifest.pipeline)
