"""Fewer image keys beside text, in a trained transformer: turns, and the constant for what is left out.

    python benchmarks/joint_attention.py measure --model build/joint
    python benchmarks/joint_attention.py time
    python benchmarks/joint_attention.py report

`measure` generates scenes of `lab.shapes` with the transformer that `benchmarks/train_joint.py` has trained, in
ppdiffusers: plain, and with fewer image keys, and writes the distances and a sheet of images. `time` compares two ways
to add the constant, a mask of one row and a further channel of queries and keys, at the shapes of Stable Diffusion 3
and FLUX at 1024 px. `report` prints the tables of the result.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import paddle
from lab.markdown import table
from lab.result_files import make_result, read_json
from lab.shapes import Scenes, in_words, make_scenes
from PIL import Image, ImageDraw
from ppdiffusers import SD3Transformer2DModel

from ppdiffusers_tome import ToMeConfig, apply_tome, remove_tome
from ppdiffusers_tome.attach import computed, outer
from ppdiffusers_tome.comparison.results import write_result

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "joint_attention.json"
SHEET = ROOT / "benchmarks" / "joint_attention_sheet.jpg"
SEED, COUNT = 5, 12  # of the scenes, which training has not seen
SCALE, SHOWN = 4, 8  # px of the sheet for a px, and how many scenes are on it
SHAPES = {  # heads, channels of a head, image tokens, text tokens
    "Stable Diffusion 3": (24, 64, 4096, 77 + 256),
    "FLUX": (24, 128, 4096, 512),
}
KEPT = 1024  # image tokens that remain
FURTHER = 8  # channels


# ppdiffusers adds this function where it finds a GPU; Stable Diffusion 3's plain attention calls it anywhere.
if not hasattr(paddle.nn.functional, "scaled_dot_product_attention_"):
    paddle.nn.functional.scaled_dot_product_attention_ = paddle.nn.functional.scaled_dot_product_attention


class Way(NamedTuple):
    """A way to generate the scenes.

    Args:
        config: None: plain.
        has_constant: whether log(N / K) is added to the scores of image keys.
        takes_turns: whether steps keep other tokens.
        steps: share of the steps, of a plain way.
    """

    name: str
    config: ToMeConfig | None = None
    has_constant: bool = True
    takes_turns: bool = True
    steps: float = 1.0


def ways() -> list[Way]:
    """All ways that are compared; the first is plain."""
    found = [Way("plain")]
    for ratio in (0.5, 0.75, 0.875):
        every = ToMeConfig(ratio, merge_steps="all")
        found += [
            Way(f"interlace {ratio}, all steps", every),
            Way(f"interlace {ratio}, all steps, without the constant", every, has_constant=False),
            Way(f"the same keys in each step, {ratio}", every, takes_turns=False),
            Way(f"the same keys in each step, {ratio}, without the constant", every, False, False),
            Way(f"interlace {ratio}", ToMeConfig(ratio)),
        ]
    todo = ToMeConfig(0.75, method="todo")
    found += [Way("todo 0.75", todo), Way("todo 0.75, without the constant", todo, has_constant=False)]
    return [*found, Way("0.7 of the steps", steps=0.7)]


@contextmanager
def switched(model: Any, way: Way) -> Iterator[None]:
    """In this context a model merges in this way."""
    with ExitStack() as stack:
        if not way.has_constant:
            stack.enter_context(patch.object(computed, "_scores_of_keys", lambda *_: None))
        if not way.takes_turns:
            stack.enter_context(patch.object(outer, "turn_at", lambda *_: paddle.zeros([1], "int64")))
        if way.config is not None:
            apply_tome(model, config=way.config)
            stack.callback(remove_tome, model)
        yield


class Sampler:
    """Generates scenes of captions by Euler's method.

    Args:
        folder: what `train_joint.py` has written.
    """

    def __init__(self, folder: Path) -> None:
        self.model = SD3Transformer2DModel.from_pretrained(str(folder / "transformer"), from_diffusers=True)
        self.model.eval()
        with np.load(folder / "text.npz") as arrays:
            self._words, self._places = (paddle.to_tensor(arrays[name]) for name in ("words", "places"))

    @paddle.no_grad()
    def generate(self, captions: np.ndarray, steps: int, guidance: float) -> np.ndarray:
        """Images [B, 3, H, W] from 0 to 1, always from the same noise."""
        count = len(captions)
        size, channels = self.model.config.sample_size, self.model.config.in_channels
        noise = np.random.RandomState(SEED).standard_normal([count, channels, size, size])
        x = paddle.to_tensor(noise.astype("float32"))
        is_guided = guidance != 1
        numbers = np.concatenate([captions, np.zeros_like(captions)]) if is_guided else captions
        text = paddle.nn.functional.embedding(paddle.to_tensor(numbers), self._words)
        shares = np.linspace(1, 0, steps + 1)
        for share, after in pairwise(shares):
            velocity = self.model(
                paddle.concat([x, x]) if is_guided else x,
                encoder_hidden_states=text + self._places,
                pooled_projections=text.mean(axis=1),
                timestep=paddle.full([len(numbers)], 1000 * share, dtype="float32"),
                return_dict=False,
            )[0]
            if is_guided:
                with_caption, without = velocity.chunk(2)
                velocity = without + guidance * (with_caption - without)
            x = x + velocity * float(after - share)
        images: np.ndarray = x.clip(-1, 1).numpy() / 2 + 0.5
        return images


def decibels(images: np.ndarray, plain: np.ndarray) -> list[float]:
    """The PSNR of each image."""
    errors = np.square(images - plain).mean(axis=(1, 2, 3))
    return [float(-10 * math.log10(max(error, 1e-12))) for error in errors]


def measure(folder: Path) -> dict[str, Any]:
    """The distances of all ways, and the sheet."""
    sampler, scenes = Sampler(folder), make_scenes(np.random.default_rng(SEED), COUNT)
    settings, shown = [], {}
    for steps in (20, 10):
        for guidance in (3.0, 1.0):
            rows, plain = [], None
            for way in ways():
                with switched(sampler.model, way):
                    images = sampler.generate(scenes.captions, round(way.steps * steps), guidance)
                plain = images if plain is None else plain
                rows.append({"name": way.name, "psnr": None if way.name == "plain" else decibels(images, plain)})
                if (steps, guidance) == (20, 3.0):
                    shown[way.name] = images
            of_truth = statistics.mean(decibels(plain, scenes.images / 2 + 0.5))
            settings.append({"steps": steps, "guidance": guidance, "ways": rows, "plain_to_scene": of_truth})
            print(f"{steps} steps, guidance {guidance:g}: plain is {of_truth:.1f} dB from the scenes", flush=True)
    write_sheet(scenes, shown)
    return {"settings": settings, "captions": [in_words(caption) for caption in scenes.captions]}


def write_sheet(scenes: Scenes, shown: dict[str, np.ndarray]) -> None:
    """The scenes of the captions, and the images of some ways, a row each."""
    names = ["plain", "interlace 0.5", "interlace 0.75", "interlace 0.75, all steps"]
    names += ["interlace 0.75, all steps, without the constant", "the same keys in each step, 0.75"]
    rows = {"the scene of the caption": scenes.images / 2 + 0.5, **{name: shown[name] for name in names}}
    side, title = SCALE * scenes.images.shape[-1], 18
    sheet = Image.new("RGB", (SHOWN * (side + 4), len(rows) * (side + title + 4)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (name, images) in enumerate(rows.items()):
        top = row * (side + title + 4)
        draw.text((2, top + 3), name, fill="black")
        for column, image in enumerate(images[:SHOWN]):
            pixels = (255 * image.transpose(1, 2, 0) + 0.5).astype("uint8")
            picture = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
            sheet.paste(picture, (column * (side + 4), top + title))
    sheet.save(SHEET, quality=88)


def time_ways(rounds: int = 7) -> dict[str, Any]:
    """Seconds of attention with fewer keys: without the constant, by a mask of one row, by a further channel."""
    found = {}
    for name, (heads, width, image, text) in SHAPES.items():
        paddle.seed(0)
        query = paddle.randn([1, image + text, heads, width])
        key, value = paddle.randn([1, KEPT + text, heads, width]), paddle.randn([1, KEPT + text, heads, width])
        scores = np.concatenate([np.zeros(text), np.full(KEPT, math.log(image / KEPT))]).astype("float32")
        of_way = {
            "without": (query, key, None),
            "mask": (query, key, paddle.to_tensor(scores[None, None, None])),
            "channel": (query, key, paddle.to_tensor(scores[None, :, None, None])),
        }
        seconds: dict[str, list[float]] = {way: [] for way in of_way}
        with paddle.no_grad():
            outputs = {way: _attend(way, *arguments, value).numpy() for way, arguments in of_way.items()}
            np.testing.assert_allclose(outputs["mask"], outputs["channel"], atol=1e-4)
            for _ in range(rounds):
                for way, arguments in of_way.items():
                    start = time.perf_counter()
                    _attend(way, *arguments, value)
                    seconds[way].append(time.perf_counter() - start)
        found[name] = {way: statistics.median(times) for way, times in seconds.items()}
        print(name, found[name], flush=True)
    return found


def _attend(way: str, query: Any, key: Any, scores: Any, value: Any) -> Any:
    """Attention with a number added to the scores of each key, in one of the ways of `time_ways`."""
    if way == "channel":  # and seven of zeros, because kernels want a multiple of eight
        width = query.shape[-1]
        scale = math.sqrt((width + FURTHER) / width)  # the kernel divides by the root of the width
        first = paddle.nn.functional.one_hot(paddle.zeros([1], dtype="int64"), FURTHER)
        ones = first * paddle.ones([*query.shape[:3], 1])
        further = scores * math.sqrt(width + FURTHER) * first * paddle.ones([*key.shape[:3], 1])
        query, key = paddle.concat([query * scale, ones], axis=-1), paddle.concat([key, further], axis=-1)
        value = paddle.concat([value, paddle.zeros_like(value[..., :FURTHER])], axis=-1)  # kernels want equal widths
        return paddle.nn.functional.scaled_dot_product_attention(query, key, value)[..., :width]
    return paddle.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=scores)


def report(result: dict[str, Any]) -> str:
    """The tables of a result."""
    settings = result["settings"]
    head = ["way", *(f"{one['steps']} steps, guidance {one['guidance']:g}" for one in settings)]
    rows = []
    for number, row in enumerate(settings[0]["ways"]):
        of_way = [one["ways"][number]["psnr"] for one in settings]
        if row["psnr"] is not None:
            rows.append([row["name"], *(f"{statistics.mean(one):.1f} ({min(one):.0f})" for one in of_way)])
    times = [
        [name, *(f"{seconds[way] / seconds['without']:.2f}×" for way in ("mask", "channel"))]
        for name, seconds in result["timing"].items()
    ]
    parts = ["\n".join(table(head, rows)), "\n".join(table(["attention at 1024 px", "mask", "channel"], times))]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("measure").add_argument("--model", type=Path, default=ROOT / "build" / "joint")
    modes.add_parser("time")
    modes.add_parser("report")
    options = parser.parse_args()
    earlier = read_json(RESULT) if RESULT.is_file() else {}
    if options.mode == "report":
        return print(report(earlier))
    content = {name: earlier[name] for name in ("settings", "captions", "timing") if name in earlier}
    content |= measure(options.model) if options.mode == "measure" else {"timing": time_ways()}
    command = f"python benchmarks/joint_attention.py {options.mode}"
    write_result(RESULT, make_result("joint_attention", command, **content))


if __name__ == "__main__":
    main()
