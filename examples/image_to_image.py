"""Change an image by prompts, plain and with merged tokens, from the same noise.

python examples/image_to_image.py
python examples/image_to_image.py "a 3d render of bear" "a 3d render of cat" --strength 0.7 --size 128
python examples/image_to_image.py "a watercolour of a harbour" --image harbour.jpg --size 512 \\
    --model stable-diffusion-v1-5/stable-diffusion-v1-5

By default a fox that the bundled model generated becomes a wolf. Images that are not square are cropped.
"""

import math
from functools import partial
from pathlib import Path

import comparison
import options
from PIL import ImageOps

PROMPTS = ["a 3d render of wolf"]


def main(argv=None) -> None:
    parser = options.make_parser(__doc__)
    parser.add_argument("--image", type=Path, default=options.BUNDLED / "fox.png", help="default: a fox")
    parser.add_argument("--strength", type=float, default=0.6, help="0 keeps the image, 1 ignores it (default: 0.6)")
    args = options.parse(parser, argv)
    image = options.open_image(parser, args)
    if not 0 < args.strength <= 1:
        parser.error(f"--strength {args.strength} is not allowed: it must be above 0 and at most 1.")
    pipe = options.load(parser, args, "AutoPipelineForImage2Image")
    for size in args.size:
        if int(options.steps_for(args, size) * args.strength) < 1:
            parser.error(f"--strength {args.strength} leaves no steps: raise it or --steps.")
    for size in args.size:
        source = ImageOps.fit(image, (size, size))
        draw = partial(pipe, image=source, strength=args.strength, guidance_scale=args.guidance_scale)
        details = {"image": options.repository_path(args.image), "strength": args.strength}
        warm_up = math.ceil(2 / args.strength)  # of these, two steps run
        comparison.compare(
            pipe, args, "image_to_image", size, args.prompts or PROMPTS, draw, source, warm_up, **details
        )


if __name__ == "__main__":
    options.run(main)
