"""Generate plain and merged images in turn and compare them."""

import contextlib
import os
import shlex
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

# Imports Pillow, which must come before Paddle: otherwise Paddle 2.6's bundled zlib breaks Pillow's PNGs.
from options import fit_to_size, steps_for


@dataclass
class Arm:
    """One row: images generated plain (ratio None) or merged."""

    ratio: float | None
    summary: object  # pipe.tome_summary() at this ratio; at ratio 0 for plain
    images: list = field(default_factory=list)
    seconds: list = field(default_factory=list)

    @property
    def label(self) -> str:
        return "plain" if self.ratio is None else f"{self.ratio:g}"

    def figures(self, plain: "Arm") -> dict:
        """The row's figures; those that compare with plain are None for plain itself."""
        block, share = self.summary.blocks[0], self.summary.saved_share
        psnr, ssim = (None, None) if self is plain else image_similarity(plain.images, self.images)
        return {
            "arm": self.label,
            "tokens": block.grid.tokens,
            "kept": block.kept,
            "macs_saved": None if self is plain else share,
            "seconds": statistics.median(self.seconds),
            "speed_up": statistics.median(plain.seconds) / statistics.median(self.seconds),
            "psnr": psnr,
            "ssim": ssim,
        }


def compare(
    pipe,
    args,
    name,
    size,
    prompts,
    draw,
    source=None,
    warm_up=2,
    merging=None,
    rows=(),
    measure=None,
    steps=None,
    **details,
) -> None:
    """Generate each prompt plain and at each ratio from the same noise; print the table, write PNGs and JSON.

    `merging` has further settings for `pipe.tome`, `rows` further rows of the sheet as (label, images), and
    `measure` is a function that returns further figures of the arms for the JSON. `steps` is by default as in
    `options.steps_for`. `details` go into PNG and JSON.
    """
    import paddle

    from ppdiffusers_tome import ToMeConfig, __version__
    from ppdiffusers_tome.evaluation.quality.sheets import make_sheet, save_png
    from ppdiffusers_tome.evaluation.results import make_result, write_result

    steps, merging = steps or steps_for(args, size), {**args.merging, **(merging or {})}
    settings = {"model": fit_to_size(pipe, args, size), "seed": args.seed, "steps": steps}
    settings |= {"size": size, "guidance_scale": args.guidance_scale, "xformers": args.xformers}
    settings |= {**details, **({"merging": merging} if merging else {})}
    about = {**settings, "ppdiffusers_tome": __version__}
    configs = [str(ToMeConfig(ratio=ratio, **args.merging)) for ratio in args.ratio]
    print(f"\n{size} px, prompts: {len(prompts)}, steps: {steps}, seed: {args.seed}")
    pipe.set_progress_bar_config(desc="warm-up", leave=False)
    draw(prompts[0], num_inference_steps=warm_up)
    arms = []
    for ratio in (None, *args.ratio):
        with pipe.tome(ratio=ratio or 0.0, **merging):
            arms.append(Arm(ratio, pipe.tome_summary(height=size, width=size)))
    for n, prompt in enumerate(prompts, 1):
        for arm, config in zip(arms, ["off", *configs], strict=True):
            pipe.set_progress_bar_config(desc=f"image {n} of {len(prompts)}, {arm.label}", leave=False)
            paddle.seed(args.seed)
            start = time.perf_counter()
            with contextlib.nullcontext() if arm.ratio is None else pipe.tome(ratio=arm.ratio, **merging):
                image = draw(prompt, num_inference_steps=steps).images[0]
            arm.seconds.append(time.perf_counter() - start)
            arm.images.append(image)
            if args.save_images:
                path = args.output / f"{name}_{size}_{arm.label}_{n}.png"
                save_png(image, path, prompt=prompt, ratio=arm.ratio or 0, tome=config, **about)
    figures = [arm.figures(arms[0]) for arm in arms]
    print_table(figures)
    path = args.output / f"{name}_{size}.png"
    rows = [*([("input", [source] * len(prompts))] if source else []), *rows]
    rows += [(f"{arm.label}\n{row['seconds']:.1f} s", arm.images) for arm, row in zip(arms, figures, strict=True)]
    save_png(make_sheet(rows, prompts, size), path, prompts=prompts, ratios=args.ratio, tome=configs, **about)
    print(f"Rows {', '.join(label.splitlines()[0] for label, _ in rows)}: {path}")
    command = shlex.join(["python", f"examples/{name}.py", *args.arguments])
    result = make_result("comparison", command, prompts=prompts, **settings, arms=figures)
    result |= measure(arms) if measure else {}
    write_result(path.with_suffix(".json"), result)


def image_similarity(plain, merged) -> tuple[float, float]:
    """PSNR in dB, infinite for equal images, and SSIM; means over the pairs."""
    from ppdiffusers_tome.evaluation.quality.metrics import psnr, ssim

    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(plain, merged, strict=True)]
    return float(np.mean([psnr(*pair) for pair in pairs])), float(np.mean([ssim(*pair) for pair in pairs]))


def print_table(figures: list[dict]) -> None:
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"Seconds per image, median over the prompts, on this machine with {threads} thread(s): expect noise.")
    print("       tokens       MACs saved  s/image  speed-up  PSNR dB   SSIM")
    for row in figures:
        tokens = f"{row['tokens']}" if row["arm"] == "plain" else f"{row['tokens']} → {row['kept']}"
        saved = "" if row["macs_saved"] is None else f"{row['macs_saved']:.1%}"
        line = f"{row['arm']:<6} {tokens:<12} {saved:>10} {row['seconds']:>8.2f} {row['speed_up']:>8.2f}×"
        print(line if row["psnr"] is None else f"{line}{row['psnr']:>9.1f} {row['ssim']:>6.3f}")
    if all(row["macs_saved"] is None for row in figures):
        print("MACs cannot be counted for this kind of model.")
