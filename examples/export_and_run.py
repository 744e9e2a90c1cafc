"""Draw with an exported folder by Paddle Inference, and beside it the same pictures in eager, from the same noise.

python -m ppdiffusers_tome export --model examples/emoji_sd --output build/emoji --ratio 0.5
python examples/export_and_run.py build/emoji
python examples/export_and_run.py build/sd15 "a photo of an owl" --eager stable-diffusion-v1-5/stable-diffusion-v1-5

Without --eager only the exported programs draw, unless the folder was exported from the bundled model.
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
    add("folder", type=Path, help="what `python -m ppdiffusers_tome export` wrote")
    add("prompts", nargs="*", default=PROMPTS, help="a picture each")
    add("--eager", help="model to draw the same pictures with in eager: ppdiffusers folder or hub name")
    add("--ratio", type=float, help="one of the exported (default: the first)")
    add("--steps", type=int, default=20)
    add("--guidance", type=float, default=2.0)
    add("--seed", type=int, default=0, help="of the noise")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads (default: all cores)")
    add("--output", type=Path, default=Path("outputs"), help="folder to write to")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # eager Paddle reads it when it is imported
    from ppdiffusers import DiffusionPipeline

    import ppdiffusers_tome  # noqa: F401 - gives pipelines their apply_tome
    from ppdiffusers_tome import ToMeError
    from ppdiffusers_tome.evaluation.quality.sheets import make_sheet, metadata
    from ppdiffusers_tome.inference import load_pipeline, read_manifest

    try:
        manifest = read_manifest(args.folder)
        exported = load_pipeline(args.folder, ratio=args.ratio, threads=args.threads)
    except ToMeError as error:
        parser.error(str(error))
    if not manifest.sizes:
        parser.error(f"{args.folder} was exported for any size; this example draws at one that is told.")
    size, ratio = manifest.sizes[0], exported.unet.ratio
    source = args.eager or (options.BUNDLED if manifest.name == options.BUNDLED.name else None)
    arms = {"exported": exported}
    if source is not None:
        import paddle

        arms["eager"] = DiffusionPipeline.from_pretrained(str(source), paddle_dtype=paddle.float32)
        with_settings = manifest.merging[f"{ratio:g}"][0]
        if with_settings is not None:
            arms["eager"].apply_tome(**vars(with_settings))
    pictures, seconds = draw(arms, args, size)
    rows = [(name, f"{statistics.median(seconds[name]):.2f} s", pictures[name]) for name in arms]
    args.output.mkdir(parents=True, exist_ok=True)
    sheet = args.output / f"export_and_run_{size}.png"
    about = {"model": manifest.name, "ratio": ratio, "steps": args.steps, "seed": args.seed}
    make_sheet(rows, args.prompts, size.width).save(sheet, pnginfo=metadata(**about))
    print(f"{manifest.name} at {size}, ratio {ratio:g}, {args.steps} steps, {args.threads} threads; wrote {sheet}")
    for name in arms:
        print(f"{name:<9} {statistics.median(seconds[name]):7.2f} s a picture")
    if "eager" in arms:
        faster = statistics.median(e / x for e, x in zip(seconds["eager"], seconds["exported"], strict=True))
        pairs = zip(pictures["exported"], pictures["eager"], strict=True)
        worst = max(int(abs(array(one) - array(other)).max()) for one, other in pairs)
        print(f"exported is {faster:.1f} times as fast; the largest difference of a pixel is {worst} of 255")


def draw(arms, args, size):
    """Each prompt with each pipeline in turn, after a warm-up."""
    import paddle

    pictures, seconds = {name: [] for name in arms}, {name: [] for name in arms}
    for pipe in arms.values():
        pipe.set_progress_bar_config(leave=False)
        pipe(args.prompts[0], height=size.height, width=size.width, num_inference_steps=2, output_type="latent")
    for prompt in args.prompts:
        for name, pipe in arms.items():
            given = {"num_inference_steps": args.steps, "guidance_scale": args.guidance}
            paddle.seed(args.seed)
            begin = time.perf_counter()
            pictures[name] += pipe(prompt, height=size.height, width=size.width, **given).images
            seconds[name].append(time.perf_counter() - begin)
    return pictures, seconds


def array(picture):
    """Pixels that can be subtracted."""
    import numpy as np

    return np.asarray(picture, dtype=int)


if __name__ == "__main__":
    main()
