"""What text_to_image.py and image_to_image.py share: options, loading, drawing plain and merged, table and picture."""

import argparse
import contextlib
import io
import json
import os
import re
import textwrap
import time
from pathlib import Path

import numpy as np

# Pillow has to come before Paddle: Paddle 2.6 brings a zlib along that breaks a later Pillow's PNGs.
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

BUNDLED = Path(__file__).resolve().parent / "emoji_sd"
TRAINED_AT = 128  # px: the bundled model; 256 px takes several times as long


def make_parser(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompts", nargs="*", help="one column each; put them before the options")
    add("--model", default=str(BUNDLED), help="ppdiffusers folder or hub name (default: the bundled model)")
    add("--ratio", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="one row each (default: 0.25 0.5 0.75)")
    add("--seed", type=int, default=0, help="of the noise, the same for every picture (default: 0)")
    add("--steps", type=int, help="default: 20; 6 for the bundled model beyond 128 px")
    add("--size", type=int, nargs="+", help="px; a table and a PNG each (default: 128 256, or the model's own)")
    add("--guidance", type=float, help="default: 2 for the bundled model, 7.5 for others")
    add("--threads", type=int, help="default: OMP_NUM_THREADS, or the number of cores")
    add("--xformers", action="store_true", help="memory-efficient attention; needs a GPU")
    add("--output", type=Path, default=Path("outputs"), help="folder to write to (default: outputs)")
    add("--save-each", action="store_true", help="also write every picture on its own")
    return parser


def load(parser: argparse.ArgumentParser, args: argparse.Namespace, kind: str):
    """Load `args.model` as ppdiffusers' class `kind`. What cannot work ends the program: one sentence, exit code 2."""
    args.bundled = Path(args.model).resolve() == BUNDLED
    if not Path(args.model).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", args.model):
        parser.error(f"--model {args.model}: there is no such folder, and a hub name looks like owner/name.")
    for name, least in (("steps", 1), ("threads", 1), ("seed", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} is not allowed: it must be {least} or more.")
    for size in args.size or ():
        if size < 8 or size % 8:
            parser.error(f"--size {size} is not allowed: it must be a multiple of 8 px.")
    # Paddle reads it when it is imported, takes one thread where it is not set, and prints a warning at more than one.
    os.environ["OMP_NUM_THREADS"] = str(args.threads or os.environ.get("OMP_NUM_THREADS") or os.cpu_count())
    with contextlib.redirect_stderr(io.StringIO()):
        import paddle
        import ppdiffusers
        from paddlenlp.utils.log import logger

        from ppdiffusers_tome import ToMeConfig, ToMeError
    logger.set_level("WARNING")
    ppdiffusers.utils.logging.set_verbosity_error()
    half = not args.bundled and paddle.device.get_device() != "cpu"
    try:
        for ratio in args.ratio:
            ToMeConfig(ratio=ratio)
        dtype = paddle.float16 if half else paddle.float32
        pipe = getattr(ppdiffusers, kind).from_pretrained(args.model, paddle_dtype=dtype)
        pipe.apply_tome(ratio=args.ratio[0]).remove_tome()  # raises where the model has nothing to merge
        args.output.mkdir(parents=True, exist_ok=True)
    except (OSError, ToMeError) as error:
        parser.error(" ".join(str(error).split()))
    if args.xformers:
        pipe.enable_xformers_memory_efficient_attention()
    args.size = args.size or ([128, 256] if args.bundled else [pipe.unet.config.sample_size * pipe.vae_scale_factor])
    args.guidance = (2.0 if args.bundled else 7.5) if args.guidance is None else args.guidance
    return pipe


def steps_for(args: argparse.Namespace, size: int) -> int:
    return args.steps or (6 if args.bundled and size > TRAINED_AT else 20)


def compare(pipe, args, name, size, prompts, draw, source=None, warm_up=2, **more) -> None:
    """Draw the prompts plain and at each ratio, each from the seed's noise; print the table and write the PNGs."""
    import paddle

    from ppdiffusers_tome import ToMeConfig, __version__

    steps = steps_for(args, size)
    about = {"model": "examples/emoji_sd" if args.bundled else args.model, "seed": args.seed, "steps": steps}
    about |= {"size": size, "guidance": args.guidance, "xformers": args.xformers}
    about |= {**more, "ppdiffusers_tome": __version__}
    print(f"\n{size} px, prompts: {len(prompts)}, steps: {steps}, seed: {args.seed}")
    print(f"Seconds are single measurements on this machine, {os.environ['OMP_NUM_THREADS']} thread(s): expect noise.")
    print("       tokens       MACs saved  s/image  speed-up  PSNR dB   SSIM")
    pipe.set_progress_bar_config(desc="warm-up", leave=False)
    draw(prompts[0], num_inference_steps=warm_up)
    rows, plain = [], None
    for ratio in (None, *args.ratio):
        arm, tome = ("plain", "off") if ratio is None else (f"{ratio:g}", str(ToMeConfig(ratio=ratio)))
        with pipe.tome(ratio=ratio or 0.0):
            summary = pipe.tome_summary(height=size, width=size)
        block, images, begin = summary.blocks[0], [], time.perf_counter()
        with contextlib.nullcontext() if ratio is None else pipe.tome(ratio=ratio):
            for n, prompt in enumerate(prompts, 1):
                pipe.set_progress_bar_config(desc=f"{arm}, picture {n} of {len(prompts)}", leave=False)
                paddle.seed(args.seed)
                images.append(draw(prompt, num_inference_steps=steps).images[0])
        seconds = (time.perf_counter() - begin) / len(prompts)
        plain = plain or (seconds, images)
        tokens = f"{block.grid.tokens}" if ratio is None else f"{block.grid.tokens} → {block.kept}"
        saved = "" if ratio is None or summary.saved_share is None else f"{summary.saved_share:.1%}"
        line = f"{arm:<6} {tokens:<12} {saved:>10} {seconds:>8.2f} {plain[0] / seconds:>8.2f}×"
        print(line + ("" if ratio is None else "{:>9.1f} {:>6.3f}".format(*likeness(plain[1], images))))
        rows.append((arm, f"{seconds:.1f} s", images))
        for n, (prompt, image) in enumerate(zip(prompts, images, strict=True), 1):
            if args.save_each:
                each = args.output / f"{name}_{size}_{arm}_{n}.png"
                image.save(each, pnginfo=metadata(prompt=prompt, ratio=ratio or 0, tome=tome, **about))
    if args.bundled and size > TRAINED_AT:
        print(f"The bundled model was trained at {TRAINED_AT} px: here it repeats pieces of the thing.")
    path = args.output / f"{name}_{size}.png"
    settings = [str(ToMeConfig(ratio=ratio)) for ratio in args.ratio]
    rows = [("input", "", [source] * len(prompts)), *rows] if source else rows
    sheet(rows, prompts, size).save(path, pnginfo=metadata(prompts=prompts, ratios=args.ratio, tome=settings, **about))
    print(f"Rows {', '.join(row[0] for row in rows)}: {path}")


def likeness(plain, merged) -> tuple[float, float]:
    """PSNR in dB, infinite for equal pictures, and SSIM; means over the pairs."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(plain, merged, strict=True)]
    with np.errstate(divide="ignore"):
        psnr = [peak_signal_noise_ratio(a, b, data_range=255) for a, b in pairs]
    ssim = [structural_similarity(a, b, data_range=255, channel_axis=-1) for a, b in pairs]
    return float(np.mean(psnr)), float(np.mean(ssim))


def sheet(rows, prompts, size) -> Image.Image:
    """One row for each (label, caption, images), one column for each prompt."""
    font, left, gap = ImageFont.load_default(13), 56, 4
    titles = ["\n".join(textwrap.wrap(prompt, max(size // 7, 8))) for prompt in prompts]
    top = 8 + 16 * max(title.count("\n") + 1 for title in titles)
    picture = Image.new("RGB", (left + len(prompts) * (size + gap), top + len(rows) * (size + gap)), "white")
    pen = ImageDraw.Draw(picture)
    for x, title in enumerate(titles):
        pen.text((left + x * (size + gap), 4), title, "black", font)
    for y, (label, caption, images) in enumerate(rows):
        pen.text((4, top + y * (size + gap)), f"{label}\n{caption}", "black", font)
        for x, image in enumerate(images):
            picture.paste(image, (left + x * (size + gap), top + y * (size + gap)))
    return picture


def metadata(**fields) -> PngImagePlugin.PngInfo:
    """The fields as a PNG's text; what is not text as JSON."""
    info = PngImagePlugin.PngInfo()
    for key, value in fields.items():
        info.add_text(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return info
