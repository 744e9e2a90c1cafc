"""Draw prompts along a picture's Canny edges, plain and with merged tokens, from the same noise, all on one sheet.

python examples/controlnet_canny.py
python examples/controlnet_canny.py "a 3d render of owl" --image owl.jpg --ratio 0.3 0.6 --plain-controlnet
python examples/controlnet_canny.py "a house in the snow" --image house.jpg --size 512 \\
    --model stable-diffusion-v1-5/stable-diffusion-v1-5 --controlnet lllyasviel/sd-controlnet-canny

By default the bundled ControlNet gets a drawing that it never saw. A picture of another shape is cropped to a square.
Merging reaches UNet and ControlNet; `--plain-controlnet` leaves the ControlNet out. The second table says how far, in
px, the drawn edges lie from the given ones; the row "without" is the same prompt and noise without a ControlNet.
"""

from functools import partial
from pathlib import Path

import comparison
import edges
import options
from PIL import ImageOps

PROMPTS = ["a flat drawing of penguin", "a 3d render of penguin"]
CONTROLNET = options.BUNDLED / "controlnet"


def load(parser, args):
    """The model's pipelines without and with the ControlNet, over the same weights."""
    options.check_source(parser, "--controlnet", str(args.controlnet))
    without = options.load(parser, args, "StableDiffusionPipeline")
    from ppdiffusers import ControlNetModel, StableDiffusionControlNetPipeline

    try:
        controlnet = ControlNetModel.from_pretrained(str(args.controlnet), paddle_dtype=without.unet.dtype)
    except OSError as error:
        parser.error(f"--controlnet {args.controlnet}: {' '.join(str(error).split())}")
    controlnet.eval()
    pipe = StableDiffusionControlNetPipeline(
        **without.components, controlnet=controlnet, requires_safety_checker=False
    )
    if args.xformers:
        pipe.enable_xformers_memory_efficient_attention()
    return without, pipe


def draw_without(pipe, args, size, prompt):
    import paddle

    paddle.seed(args.seed)
    steps = options.steps_for(args, size)
    return pipe(prompt, height=size, width=size, num_inference_steps=steps, guidance_scale=args.guidance).images[0]


def edge_distances(given, free, arms) -> dict:
    """Print and return how far the edges of the free pictures and of each arm's lie from the given ones."""
    drawn = {"without": free, **{arm.label: arm.images for arm in arms}}
    table = {label: edges.mean_distances(given, images) for label, images in drawn.items()}
    print("\nMean distance of edges, px   given to drawn   drawn to given")
    for label, ways in table.items():
        print("{:<26} {:>16.2f} {:>16.2f}".format(label, *ways.values()))
    return {"edge distances, px": table}


def main(argv=None) -> None:
    parser = options.make_parser(__doc__)
    add = parser.add_argument
    add("--image", type=Path, default=CONTROLNET / "penguin.png", help="whose edges to follow (default: a penguin)")
    add("--controlnet", default=CONTROLNET, help="ppdiffusers folder or hub name (default: the bundled one)")
    add("--plain-controlnet", action="store_true", help="merge in the UNet only")
    args = options.parse(parser, argv)
    image = options.open_image(parser, args.image)
    sizes, prompts = args.size, args.prompts or PROMPTS
    without, pipe = load(parser, args)
    for size in sizes or args.size[:1]:
        source = ImageOps.fit(image, (size, size))
        given = edges.canny(source)
        if not given.any():
            parser.error(f"--image {args.image}: there are no edges at {size} px.")
        condition, free = edges.as_picture(given), [draw_without(without, args, size, prompt) for prompt in prompts]
        draw = partial(pipe, image=condition, guidance_scale=args.guidance)
        merging = {"controlnet": False} if args.plain_controlnet else {}
        rows = [("edges", "", [condition] * len(prompts)), ("without", "", free)]
        more = {"image": options.recorded(args.image), "controlnet": options.recorded(args.controlnet)}
        more["merging"] = merging
        more["measure"] = partial(edge_distances, given, free)
        comparison.compare(pipe, args, "controlnet_canny", size, prompts, draw, source, rows=rows, **more)


if __name__ == "__main__":
    main()
