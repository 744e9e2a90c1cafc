"""Draw plain and merged pictures in turn and tell how they differ."""

import contextlib
import json
import os
import shlex
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

# The first import of Pillow; it has to come before Paddle: Paddle 2.6 brings a zlib along that breaks its PNGs.
from options import TRAINED_AT, steps_for


@dataclass
class Arm:
    """One row: pictures drawn plain (ratio None) or merged."""

    ratio: float | None
    summary: object  # what pipe.tome_summary says of this ratio; of ratio 0 for plain
    images: list = field(default_factory=list)
    seconds: list = field(default_factory=list)

    @property
    def label(self) -> str:
        return "plain" if self.ratio is None else f"{self.ratio:g}"

    def measured_against(self, plain: "Arm") -> dict:
        """The row's figures; what compares with plain is None for plain itself."""
        block, share = self.summary.blocks[0], self.summary.saved_share
        psnr, ssim = (None, None) if self is plain else likeness(plain.images, self.images)
        return {
            "row": self.label,
            "tokens": block.grid.tokens,
            "kept": block.kept,
            "MACs saved": None if self is plain else share,
            "seconds": statistics.median(self.seconds),
            "speed-up": statistics.median(plain.seconds) / statistics.median(self.seconds),
            "PSNR": psnr,
            "SSIM": ssim,
        }


def compare(
    pipe, args, name, size, prompts, draw, source=None, warm_up=2, merging=None, rows=(), measure=None, **more
) -> None:
    """Draw each prompt plain and at each ratio, from the seed's noise; print the table, write PNGs and JSON.

    `merging` are further settings of `pipe.tome`, `rows` further rows of the sheet: (label, caption, images), and
    `measure` a function that tells further figures of the arms, for the JSON.
    """
    import paddle

    from ppdiffusers_tome import ToMeConfig, __version__
    from ppdiffusers_tome.evaluation.environment import describe_environment
    from ppdiffusers_tome.evaluation.quality.sheets import make_sheet, metadata

    steps, merging = steps_for(args, size), merging or {}
    about = {"model": "examples/emoji_sd" if args.bundled else args.model, "seed": args.seed, "steps": steps}
    about |= {"size": size, "guidance": args.guidance, "xformers": args.xformers}
    about |= {**more, **({"merging": merging} if merging else {}), "ppdiffusers_tome": __version__}
    settings = [str(ToMeConfig(ratio=ratio)) for ratio in args.ratio]
    print(f"\n{size} px, prompts: {len(prompts)}, steps: {steps}, seed: {args.seed}")
    pipe.set_progress_bar_config(desc="warm-up", leave=False)
    draw(prompts[0], num_inference_steps=warm_up)
    arms = []
    for ratio in (None, *args.ratio):
        with pipe.tome(ratio=ratio or 0.0, **merging):
            arms.append(Arm(ratio, pipe.tome_summary(height=size, width=size)))
    for n, prompt in enumerate(prompts, 1):
        for arm, tome in zip(arms, ["off", *settings], strict=True):
            pipe.set_progress_bar_config(desc=f"picture {n} of {len(prompts)}, {arm.label}", leave=False)
            paddle.seed(args.seed)
            begin = time.perf_counter()
            with contextlib.nullcontext() if arm.ratio is None else pipe.tome(ratio=arm.ratio, **merging):
                image = draw(prompt, num_inference_steps=steps).images[0]
            arm.seconds.append(time.perf_counter() - begin)
            arm.images.append(image)
            if args.save_each:
                each = args.output / f"{name}_{size}_{arm.label}_{n}.png"
                image.save(each, pnginfo=metadata(prompt=prompt, ratio=arm.ratio or 0, tome=tome, **about))
    figures = [arm.measured_against(arms[0]) for arm in arms]
    print_table(figures)
    if args.bundled and size > TRAINED_AT:
        print(f"The bundled model was trained at {TRAINED_AT} px: here it repeats pieces of the thing.")
    path = args.output / f"{name}_{size}.png"
    rows = [*([("input", "", [source] * len(prompts))] if source else []), *rows]
    rows += [(arm.label, f"{f['seconds']:.1f} s", arm.images) for arm, f in zip(arms, figures, strict=True)]
    text = metadata(prompts=prompts, ratios=args.ratio, tome=settings, **about)
    make_sheet(rows, prompts, size).save(path, pnginfo=text)
    command = shlex.join(["python", f"examples/{name}.py", *args.given])
    record = {"command": command, "prompts": prompts, **about, "rows": figures, "environment": describe_environment()}
    print(f"Rows {', '.join(row[0] for row in rows)}: {path}")
    record |= measure(arms) if measure else {}
    path.with_suffix(".json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def likeness(plain, merged) -> tuple[float, float]:
    """PSNR in dB, infinite for equal pictures, and SSIM; means over the pairs."""
    from ppdiffusers_tome.evaluation.quality.distances import psnr, ssim

    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(plain, merged, strict=True)]
    return float(np.mean([psnr(*pair) for pair in pairs])), float(np.mean([ssim(*pair) for pair in pairs]))


def print_table(figures: list[dict]) -> None:
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"Seconds per picture, medians over the prompts, on this machine with {threads} thread(s): expect noise.")
    print("       tokens       MACs saved  s/image  speed-up  PSNR dB   SSIM")
    for f in figures:
        tokens = f"{f['tokens']}" if f["row"] == "plain" else f"{f['tokens']} → {f['kept']}"
        saved = "" if f["MACs saved"] is None else f"{f['MACs saved']:.1%}"
        line = f"{f['row']:<6} {tokens:<12} {saved:>10} {f['seconds']:>8.2f} {f['speed-up']:>8.2f}×"
        print(line if f["PSNR"] is None else f"{line}{f['PSNR']:>9.1f} {f['SSIM']:>6.3f}")
    if all(f["MACs saved"] is None for f in figures):
        print("MACs are not counted for this kind of model.")
