"""Generate small images, enlarge them and denoise them again at twice the size, plain and with merged tokens.

python examples/hires_fix.py
python examples/hires_fix.py "a 3d render of owl" --ratio 0.5 0.75 --strength 0.5
python examples/hires_fix.py "a photo of an owl" --size 1024 --model stable-diffusion-v1-5/stable-diffusion-v1-5

The second pass has four times as many tokens, so merging saves most there; the first pass is plain. --size is the
second pass's. The bundled model uses its UNet for 256 px in the second pass.
"""

import math
import statistics
import time
from functools import partial

import comparison
import options
from PIL import Image

PROMPTS = ["a 3d render of fox", "a flat drawing of penguin"]


def main(argv=None) -> None:
    parser = options.make_parser(__doc__)
    parser.add_argument("--strength", type=float, default=0.5, help="of the second pass, above 0 to 1 (default: 0.5)")
    args = options.parse(parser, argv)
    if not 0 < args.strength <= 1:
        parser.error(f"--strength {args.strength} is not allowed: it must be above 0 and at most 1.")
    if wrong := [size for size in args.size or () if size % 16]:
        parser.error(f"--size {wrong[0]} is not allowed: it must be a multiple of 16 px, twice the first pass's.")
    is_default = args.size is None
    pipe = options.load(parser, args, "DiffusionPipeline")
    from ppdiffusers import AutoPipelineForImage2Image

    sizes = [2 * args.size[0]] if is_default else args.size
    prompts, steps = args.prompts or PROMPTS, options.steps_for(args, options.TRAINED_AT)
    if int(steps * args.strength) < 1:
        parser.error(f"--strength {args.strength} leaves no steps: raise it or --steps.")
    for size in sizes:
        first_size = size // 2
        small, seconds = first_pass(pipe, args, prompts, first_size, steps)
        print(f"First pass, {first_size} px, plain: {seconds:.2f} s/image. Second pass:")
        enlarge = partial(Image.Image.resize, size=(size, size), resample=Image.Resampling.LANCZOS)
        enlarged = dict(zip(prompts, map(enlarge, small), strict=True))
        second = AutoPipelineForImage2Image.from_pipe(pipe)
        details = {"strength": args.strength, "first_size": first_size}
        comparison.compare(
            second,
            args,
            "hires_fix",
            size,
            prompts,
            partial(draw, second, enlarged, strength=args.strength, guidance_scale=args.guidance_scale),
            warm_up=math.ceil(2 / args.strength),
            rows=[(f"first\n{seconds:.1f} s", list(enlarged.values()))],
            measure=partial(total, seconds),
            steps=steps,
            **details,
        )


def first_pass(pipe, args, prompts, size, steps):
    """The plain images, and the median seconds per image."""
    import paddle

    options.fit_to_size(pipe, args, size)
    pipe.set_progress_bar_config(desc="first pass", leave=False)
    settings = {"height": size, "width": size, "guidance_scale": args.guidance_scale}
    pipe(prompts[0], num_inference_steps=2, **settings)  # warm-up
    images, seconds = [], []
    for prompt in prompts:
        paddle.seed(args.seed)
        start = time.perf_counter()
        images.append(pipe(prompt, num_inference_steps=steps, **settings).images[0])
        seconds.append(time.perf_counter() - start)
    return images, statistics.median(seconds)


def draw(pipe, enlarged, prompt, **settings):
    return pipe(prompt, image=enlarged[prompt], **settings)


def total(first_seconds, arms) -> dict:
    """Both passes of each arm, in seconds per image, for the result file; printed as well."""
    seconds = {arm.label: first_seconds + statistics.median(arm.seconds) for arm in arms}
    plain = seconds["plain"]
    print(
        "Both passes:", ", ".join(f"{label} {value:.2f} s ({plain / value:.2f}×)" for label, value in seconds.items())
    )
    return {"first_pass_seconds": first_seconds, "seconds_of_both_passes": seconds}


if __name__ == "__main__":
    options.run(main)
