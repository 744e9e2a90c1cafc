"""Regenerate a part of an image by prompts, plain and with merged tokens, from the same noise.

python examples/inpaint.py
python examples/inpaint.py "a 3d render of wolf" --mask ears.png --ratio 0.3 0.6 --seed 3
python examples/inpaint.py "a boat" --image harbour.jpg --mask water.png --size 512 \\
    --model stabilityai/stable-diffusion-2-inpainting
python examples/inpaint.py --tiny

The mask is white where the image is regenerated, by default in its lower half. Inpainting models (9 channels) get the
rest of the image as an input; with other models, such as the bundled one, it is pasted back at every step. Images and
masks that are not square are cropped.
"""

from functools import partial
from pathlib import Path

import comparison
import options
from PIL import Image, ImageOps

PROMPTS = ["a 3d render of fox", "a 3d render of panda"]


def lower_half(size) -> Image.Image:
    mask = Image.new("L", (size, size), 0)
    mask.paste(255, (0, size // 2, size, size))
    return mask


def main(argv=None) -> None:
    parser = options.make_parser(__doc__, tiny="inpaint")
    parser.add_argument("--image", type=Path, default=options.BUNDLED / "fox.png", help="default: a fox")
    parser.add_argument("--mask", type=Path, help="white where to regenerate (default: the lower half)")
    args = options.parse(parser, argv)
    sizes = args.size
    image = options.open_image(parser, args)
    mask = options.open_image(parser, args, "mask").convert("L") if args.mask else None
    if mask and mask.getextrema()[1] < 128:
        parser.error(f"--mask {args.mask} has no white pixels, so nothing would be regenerated.")
    pipe = options.load(parser, args, "AutoPipelineForInpainting")
    for size in sizes or args.size[:1]:
        source = ImageOps.fit(image, (size, size))
        region = ImageOps.fit(mask, (size, size)) if mask else lower_half(size)
        call = {"image": source, "mask_image": region, "guidance_scale": args.guidance_scale}
        draw = partial(pipe, **call, height=size, width=size)
        prompts = args.prompts or PROMPTS
        rows = [("mask", [region.convert("RGB")] * len(prompts))]
        details = {"image": options.repository_path(args.image), "mask": str(args.mask or "lower half")}
        comparison.compare(pipe, args, "inpaint", size, prompts, draw, source, rows=rows, **details)


if __name__ == "__main__":
    options.run(main)
