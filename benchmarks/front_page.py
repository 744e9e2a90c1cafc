"""Draw the image of the first page: three prompts, each plain and merged by default, with the seconds of an image.

    python benchmarks/front_page.py build/alternatives_scenes_sd_256/…/images

`alternatives.py --model examples/scenes_sd --size 256 --count 24` writes that folder. The prompts are evenly spaced in
the list. The seconds are medians of the committed result, in ONNX Runtime.
"""

import argparse
from pathlib import Path
from statistics import median

from alternatives import RESULTS, image_seconds
from lab.arm import Arm
from lab.quality.sheets import evenly_spaced
from lab.result_files import read_json
from PIL import Image, ImageDraw, ImageFont

from ppdiffusers_tome import ToMeConfig

OUTPUT = Path(__file__).parents[1] / "docs" / "pairs.jpg"
ARMS = (Arm(), Arm(ToMeConfig(0.75)))
PAIRS, SIDE, GAP, WIDE_GAP, LABEL = 3, 256, 4, 22, 40  # px


def main() -> None:
    """Write the image."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path, help="folder with a folder of images for each arm")
    folder = parser.parse_args().images
    result = read_json(RESULTS / "alternatives_scenes_sd_256.json")
    timed = result["timing"]["seconds"]["onnxruntime"]
    seconds = [median(image_seconds(arm, result["steps"], timed)) for arm in ARMS]
    width = PAIRS * (2 * SIDE + GAP) + (PAIRS - 1) * WIDE_GAP
    page = Image.new("RGB", (width, SIDE + LABEL), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(26)
    for pair, number in enumerate(list(evenly_spaced(result))[::2]):
        for place, (arm, needed) in enumerate(zip(ARMS, seconds, strict=True)):
            x = pair * (2 * SIDE + GAP + WIDE_GAP) + place * (SIDE + GAP)
            page.paste(Image.open(folder / arm.name / f"{number:04}.png"), (x, 0))
            label = f"{'merged' if arm.config else 'plain'}, {needed:.1f} s"
            draw.text((x + SIDE / 2, SIDE + LABEL / 2), label, fill="black", font=font, anchor="mm")
    page.save(OUTPUT, quality=90, subsampling=0, optimize=True)


if __name__ == "__main__":
    main()
