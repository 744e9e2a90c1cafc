"""Generate images with an exported folder, in its default runtime, and the same images in eager from the same noise.

python -m ppdiffusers_tome export --model examples/emoji_sd --output build/emoji --ratio 0.5
python examples/export_and_run.py build/emoji
python examples/export_and_run.py build/sd15 "a photo of an owl" --eager stable-diffusion-v1-5/stable-diffusion-v1-5

Without --eager only the exported programs run, unless the folder was exported from the bundled model.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import options

PROMPTS = ["a 3d render of fox", "a flat drawing of fox", "a 3d render of strawberry"]


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="written by `python -m ppdiffusers_tome export`")
    add("prompts", nargs="*", default=PROMPTS, help="one image each")
    add("--eager", help="model to generate the same images with in eager: ppdiffusers folder or hub name")
    add("--ratio", type=float, help="one of the exported ratios (default: the first)")
    add("--steps", type=int, default=20)
    add("--guidance-scale", type=float, default=2.0)
    add("--seed", type=int, default=0, help="of the noise")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads (default: all cores)")
    add("--output", type=Path, default=Path("outputs"), help="folder to write to")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # Paddle reads it on import
    from ppdiffusers import DiffusionPipeline

    import ppdiffusers_tome  # noqa: F401 - adds apply_tome to pipelines
    from ppdiffusers_tome import ToMeError
    from ppdiffusers_tome.evaluation.quality.sheets import make_sheet, save_png
    from ppdiffusers_tome.inference import load_pipeline, read_manifest

    try:
        manifest = read_manifest(args.folder)
        exported = load_pipeline(args.folder, ratio=args.ratio, threads=args.threads)
    except ToMeError as error:
        parser.error(str(error))
    if not manifest.sizes:
        parser.error(
            f"{args.folder} was exported for all sizes: this example needs an export with fixed sizes (--size)."
        )
    size, ratio = manifest.sizes[0], exported.unet.ratio
    source = args.eager or (options.BUNDLED if manifest.name == options.BUNDLED.name else None)
    arms = {"exported": exported}
    if source is not None:
        import paddle

        arms["eager"] = DiffusionPipeline.from_pretrained(str(source), paddle_dtype=paddle.float32)
        config = manifest.merging[f"{ratio:g}"][0]
        if config is not None:
            arms["eager"].apply_tome(**vars(config))
    images, seconds = draw(arms, args, size)
    rows = [(f"{name}\n{statistics.median(seconds[name]):.2f} s", images[name]) for name in arms]
    sheet = args.output / f"export_and_run_{size}.png"
    settings = {"model": manifest.name, "ratio": ratio, "steps": args.steps, "seed": args.seed}
    save_png(make_sheet(rows, args.prompts, size.width), sheet, **settings)
    print(f"{manifest.name} at {size}, ratio {ratio:g}, {args.steps} steps, {args.threads} threads: {sheet}")
    for name in arms:
        print(f"{name:<9} {statistics.median(seconds[name]):7.2f} s per image")
    if "eager" in arms:
        speed_up = statistics.median(e / x for e, x in zip(seconds["eager"], seconds["exported"], strict=True))
        pairs = zip(images["exported"], images["eager"], strict=True)
        largest = max(int(abs(as_integers(a) - as_integers(b)).max()) for a, b in pairs)
        print(f"exported is {speed_up:.1f}× as fast as eager; largest difference of a pixel: {largest} of 255")


def draw(arms, args, size):
    """Run every prompt with each pipeline in turn, after a warm-up; returns images and seconds by pipeline."""
    import paddle

    images, seconds = {name: [] for name in arms}, {name: [] for name in arms}
    for pipe in arms.values():
        pipe.set_progress_bar_config(leave=False)
        pipe(args.prompts[0], height=size.height, width=size.width, num_inference_steps=2, output_type="latent")
    for prompt in args.prompts:
        for name, pipe in arms.items():
            settings = {"num_inference_steps": args.steps, "guidance_scale": args.guidance_scale}
            paddle.seed(args.seed)
            start = time.perf_counter()
            images[name] += pipe(prompt, height=size.height, width=size.width, **settings).images
            seconds[name].append(time.perf_counter() - start)
    return images, seconds


def as_integers(image):
    """An image's pixels as signed integers, which can be subtracted."""
    import numpy as np

    return np.asarray(image, dtype=int)


if __name__ == "__main__":
    options.run(main)
