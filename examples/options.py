"""The command line that the examples share, and loading of its model."""

import argparse
import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
from pathlib import Path

from PIL import Image

BUNDLED = Path(__file__).resolve().parent / "emoji_sd"
BUNDLED_256 = BUNDLED.with_name("emoji_sd_256")  # the same with another UNet, trained at 256 px
TRAINED_AT = 128  # px, for BUNDLED


def make_parser(doc: str, tiny: str | None = None, bundled: bool = True) -> argparse.ArgumentParser:
    """The options. `tiny` is the function in tiny.py for --tiny; without `bundled` there is no default model."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompts", nargs="*", help="one column each; put them before the options")
    which = parser.add_mutually_exclusive_group(required=not bundled)
    default = " (default: the bundled model)" if bundled else ""
    model = BUNDLED if bundled else None
    which.add_argument("--model", default=model, help=f"ppdiffusers folder or hub name{default}")
    if tiny:
        noise = "a tiny random model: no download, the images are noise"
        which.add_argument("--tiny", action="store_const", const=tiny, help=noise)
    parser.set_defaults(tiny=None)
    add("--ratio", type=float, nargs="+", help="one row each (default: 0.25 0.5 0.75, or --config's)")
    add("--config", type=Path, help="settings file, which ToMeConfig.save writes (default: the default settings)")
    add("--seed", type=int, default=0, help="of the noise, the same for every image (default: 0)")
    add("--steps", type=int, help="default: 20; 10 for the bundled model above 128 px, 4 for a tiny one")
    add("--size", type=int, nargs="+", help="px; a table and a PNG each (default: 128 256, or the model's own size)")
    add("--guidance-scale", type=float, help="default: 2 for the bundled model, otherwise the pipeline's default")
    add("--threads", type=int, help="CPU threads (default: OMP_NUM_THREADS, or the number of cores)")
    add("--xformers", action="store_true", help="memory-efficient attention; needs a GPU")
    add("--output", type=Path, default=Path("outputs"), help="folder to write to (default: outputs)")
    add("--save-images", action="store_true", help="also write every image as its own PNG")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options, and as `arguments` the command line itself, for the result file."""
    return argparse.Namespace(**vars(parser.parse_args(argv)), arguments=sys.argv[1:] if argv is None else argv)


def load(parser: argparse.ArgumentParser, args: argparse.Namespace, class_name: str):
    """Load `args.model` as ppdiffusers' class `class_name`, or build the --tiny model.

    Invalid options end the program with one sentence and exit code 2.
    """
    args.model = f"tiny random {args.tiny}" if args.tiny else str(args.model)
    args.bundled = Path(args.model).resolve() == BUNDLED
    if not args.tiny:
        check_source(parser, "--model", args.model)
    for name, minimum in (("steps", 1), ("threads", 1), ("seed", 0)):
        if getattr(args, name) is not None and getattr(args, name) < minimum:
            parser.error(f"--{name} {getattr(args, name)} is not allowed: it must be {minimum} or more.")
    for size in args.size or ():
        if size < 8 or size % 8:
            parser.error(f"--size {size} is not allowed: it must be a multiple of 8 px.")
    set_threads(args)
    with contextlib.redirect_stderr(io.StringIO()):
        import paddle
        import ppdiffusers
        from paddlenlp.utils.log import logger

        from ppdiffusers_tome import ToMeConfig, ToMeError
    logger.set_level("WARNING")
    ppdiffusers.utils.logging.set_verbosity_error()
    if args.xformers and not ppdiffusers.utils.import_utils.is_ppxformers_available():
        parser.error("--xformers needs a GPU and a CUDA build of Paddle: leave it out.")
    half = not args.bundled and paddle.device.get_device() != "cpu"
    try:
        config = ToMeConfig() if args.config is None else ToMeConfig.load(args.config)
        args.ratio = args.ratio or ([0.25, 0.5, 0.75] if args.config is None else [config.ratio])
        others = [field for field in dataclasses.fields(config) if field.name != "ratio"]
        args.merging = {f.name: value for f in others if (value := getattr(config, f.name)) != f.default}
        for ratio in args.ratio:
            ToMeConfig(ratio=ratio, **args.merging)
        if args.tiny:
            import tiny

            pipe = getattr(tiny, args.tiny)()
            print("random weights: the images are noise")
        else:
            dtype = paddle.float16 if half else paddle.float32
            pipe = getattr(ppdiffusers, class_name).from_pretrained(args.model, paddle_dtype=dtype)
        pipe.apply_tome(ratio=args.ratio[0], **args.merging).remove_tome()  # raises if the model has nothing to merge
        args.output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, ToMeError) as error:
        parser.error(" ".join(str(error).split()))
    if args.xformers:
        pipe.enable_xformers_memory_efficient_attention()
    denoiser = pipe.unet if "unet" in pipe.components else pipe.transformer
    args.size = args.size or ([128, 256] if args.bundled else [denoiser.config.sample_size * pipe.vae_scale_factor])
    if args.guidance_scale is None:
        default = inspect.signature(pipe.__call__).parameters["guidance_scale"].default
        args.guidance_scale = 2.0 if args.bundled else default
    return pipe


def set_threads(args: argparse.Namespace) -> None:
    """Paddle reads it on import, uses one thread if it is not set, and prints a warning for more than one."""
    cores = len(os.sched_getaffinity(0))  # not usable_cores: this package imports Paddle
    os.environ["OMP_NUM_THREADS"] = str(args.threads or os.environ.get("OMP_NUM_THREADS") or cores)


def open_image(parser: argparse.ArgumentParser, args: argparse.Namespace, option: str = "image") -> Image.Image:
    """The RGB image of --image or another option, as `serve` reads images; ends the program if it cannot be read."""
    path = getattr(args, option)
    try:
        with Image.open(path) as image:
            set_threads(args)
            with contextlib.redirect_stderr(io.StringIO()):
                from ppdiffusers_tome.generation.png import upright_rgb
            return upright_rgb(image)
    except Exception as error:  # Pillow's decoders raise nearly anything on broken files
        parser.error(f"--{option} {path}: {error}.")


def run(main) -> None:
    """Run a script's `main` and end the process; after Ctrl-C with one line and exit code 130."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: run the script again from the start", file=sys.stderr)
        sys.exit(130)


def check_source(parser: argparse.ArgumentParser, option: str, source: str) -> None:
    """End the program if a source is neither a folder nor a hub name: ppdiffusers would create that folder."""
    if not Path(source).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
        parser.error(f"{option} {source} is neither a folder nor a hub name (owner/name).")


def repository_path(path) -> str:
    """A path for result files: relative to the root of this repository if it is inside."""
    return str(path).removeprefix(f"{BUNDLED.parents[1]}{os.sep}")


def steps_for(args: argparse.Namespace, size: int) -> int:
    return args.steps or (4 if args.tiny else 10 if args.bundled and size > TRAINED_AT else 20)


def fit_to_size(pipe, args: argparse.Namespace, size: int) -> str:
    """Give the bundled pipeline the UNet that was trained at this size; returns the model's name."""
    if not args.bundled:
        return args.model
    from ppdiffusers import UNet2DConditionModel

    folder, trained_at = (BUNDLED_256, 256) if size > TRAINED_AT else (BUNDLED, 128)
    if pipe.unet.config.sample_size * pipe.vae_scale_factor == trained_at:  # it has that UNet already
        return repository_path(folder)
    unet = UNet2DConditionModel.from_pretrained(str(folder / "unet"), paddle_dtype=pipe.unet.dtype)
    unet.eval()
    if args.xformers:
        unet.enable_xformers_memory_efficient_attention()
    pipe.register_modules(unet=unet)
    return repository_path(folder)
