"""`merge-onnx`: merge in the UNet of a model that another tool has exported as ONNX. It needs no Paddle."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..methods import ToMeConfig
from ..wording import merging_in_words
from .image_options import add_command, naming_options
from .merge_options import parse_settings

if TYPE_CHECKING:
    from ..graph.model_files import MergedModel

EXAMPLE = """\
  optimum-cli export onnx --model stable-diffusion-v1-5/stable-diffusion-v1-5 sd15
  python -m ppdiffusers_tome merge-onnx --model sd15 --output sd15_merged --ratio 0.75"""
ABOUT = "merge in a UNet that another tool has exported as ONNX"
NO_IMAGE = "No image was generated: compare images of both models with your prompts before you use the merged one."


def add(commands: argparse._SubParsersAction) -> None:
    """Add `merge-onnx` to the command line."""
    description = (
        "Merge in a UNet that another tool has exported as ONNX: Stable Diffusion 1.x, 2.x or SDXL, fp32 or fp16, of "
        "one size or of any. Paddle need not be installed."
    )
    command = add_command(commands, "merge-onnx", ABOUT, EXAMPLE, description)
    option = command.add_argument
    option("--model", type=Path, required=True, help="folder with unet/model.onnx, or an .onnx file of a UNet")
    option("--output", type=Path, required=True, help="folder to write")
    option("--ratio", type=float, help="share of keys that are left out (default: 0.75)")
    option("--max-downsample", type=int, help="deepest level that merges (default: that of the largest feature maps)")
    option("--merging", metavar="SETTINGS", default="", help="other settings of ToMeConfig, such as merge_steps=all")
    option("--no-check", action="store_true", help="do not compare outputs in ONNX Runtime")
    option("--overwrite", action="store_true", help="replace an earlier result")
    command.set_defaults(run=_merge, needs_paddle=False)


def _merge(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from ..graph.model_files import merge_model  # it imports onnx

    own = {"ratio": options.ratio, "max_downsample": options.max_downsample}
    settings = parse_settings(options.merging) if options.merging else {}
    settings |= {name: value for name, value in own.items() if value is not None}
    with naming_options():
        config = ToMeConfig(**settings)
        merged = merge_model(options.model, options.output, config, options.overwrite, not options.no_check)
    print(_describe(merged, config))
    return 0


def _describe(merged: "MergedModel", config: ToMeConfig) -> str:
    merging, differences = merged.merging, merged.differences
    rows = [("block", "level", "keys that remain")]
    for block in merging.blocks:
        rows.append((block.attention.name, str(block.level), merging.kept.get(block.attention.name, "all")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{name:<{widths[0]}}  {level:>{widths[1]}}  {kept}" for name, level, kept in rows]
    if merging.unread:
        lines.append(f"attention that could not be read, and stays as it is: {', '.join(merging.unread)}")
    if differences is None:
        lines.append("outputs were not compared")
    else:
        lines.append(
            f"compared in ONNX Runtime: with all keys, outputs differ from the model's by "
            f"{differences.with_all_keys:.1e} of the largest; merged, by {differences.merged:.1e}"
        )
    of = f"{len(merging.merging)} of {len(merging.blocks)} blocks merge"
    lines.append(f"wrote {merged.program}: {merging_in_words(config)}, {of}")
    return "\n".join([*lines, NO_IMAGE])
