"""`export`: a pipeline becomes a folder of Paddle Inference programs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..errors import ToMeConfigError
from ..inference import Manifest, Size, export_pipeline, parse_size
from ..inference.loading import load_for_export


def add(commands: argparse._SubParsersAction) -> None:
    """Add `export` to the command line."""
    export = commands.add_parser("export", help="write a pipeline, with token merging inside, for Paddle Inference")
    option = export.add_argument
    option("--model", required=True, help="ppdiffusers folder, or hub name")
    option("--output", type=Path, required=True, help="folder to write")
    option("--ratio", type=float, nargs="+", default=[0.5], help="one or several, 0 for plain (default: 0.5)")
    option("--height", type=int, help="px (default: what the model was made for)")
    option("--width", type=int, help="px (default: what the model was made for)")
    option("--sizes", help="WIDTHxHEIGHT in px, several with commas between, in place of --height and --width")
    option("--dynamic", action="store_true", help="one program for all sizes; needs Paddle 2.6 and --no-rand")
    option("--controlnet", metavar="DIR", help="a ControlNet to fuse with the UNet")
    option("--controlnet-ratio", type=float, help="another ratio for the ControlNet, 0 for plain (default: the same)")
    option("--img2img", action="store_true", help="the VAE's encoder too, for image-to-image and inpainting")
    option("--max-downsample", type=int, help="deepest level that merges (default: shallowest with self-attention)")
    option("--seed", type=int, default=0, help="what random dst are drawn from, once (default: 0)")
    option("--no-rand", action="store_true", help="dst is the first token of each cell")
    option("--window", type=int, help="side, in tokens, of the windows to match in (default: the whole grid)")
    option(
        "--proportional", action="store_true", help="weight merged tokens by the number of tokens that they replace"
    )
    option("--merge-crossattn", action="store_true", help="merge around cross-attention too")
    option("--merge-mlp", action="store_true", help="merge around feed-forward layers too")
    option("--no-safety-checker", action="store_true", help="leave out a safety checker, which cannot be exported")
    option("--overwrite", action="store_true", help="replace an earlier export")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace, given: Sequence[str]) -> int:
    sizes = _sizes(options)
    manifest = export_pipeline(
        load_for_export(options.model, options.controlnet, not options.no_safety_checker),
        options.output,
        options.ratio,
        sizes,
        dynamic=options.dynamic,
        image_to_image=options.img2img,
        controlnet=True if options.controlnet_ratio is None else options.controlnet_ratio,
        overwrite=options.overwrite,
        max_downsample=options.max_downsample,
        use_rand=not options.no_rand,
        seed=options.seed,
        window=options.window,
        proportional=options.proportional,
        merge_crossattn=options.merge_crossattn,
        merge_mlp=options.merge_mlp,
    )
    print(_described(manifest, options.output))
    return 0


def _sizes(options: argparse.Namespace) -> list[Size] | None:
    if options.sizes is not None and (options.height or options.width):
        raise ToMeConfigError("--sizes and --height, --width are both given: one of them says the size.")
    if options.sizes is not None:
        return [parse_size(each) for each in options.sizes.split(",")]
    if (options.height is None) != (options.width is None):
        raise ToMeConfigError("--height and --width go together: give both, or neither.")
    return None if options.height is None else [Size(options.height, options.width)]


def _described(manifest: Manifest, folder: Path) -> str:
    lines = [f"{'program':<34} {'eager':>8} {'oneDNN':>8}   (largest difference, relative)"]
    for each in manifest.programs:
        parity = [f"{max(found.values()):.1e}" if found else "-" for found in (each.parity, each.onednn_parity)]
        lines.append(f"{each.program:<34} {parity[0]:>8} {parity[1]:>8}")
    sizes = ", ".join(map(str, manifest.sizes)) or "any"
    ratios = ", ".join(f"{ratio:g}" for ratio in manifest.ratios)
    megabytes = sum(each["bytes"] for each in manifest.files.values()) / 1e6
    return "\n".join(
        [*lines, f"wrote {folder}: {manifest.pipeline}, sizes {sizes}, ratios {ratios}, {megabytes:.0f} MB"]
    )
