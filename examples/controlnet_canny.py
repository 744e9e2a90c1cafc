"""Generate prompts along an image's Canny edges, plain and with merged tokens, from the same noise, on one sheet.

python examples/controlnet_canny.py
python examples/controlnet_canny.py "a 3d render of owl" --image owl.jpg --ratio 0.3 0.6 --plain-controlnet
python examples/controlnet_canny.py "a house in the snow" --image house.jpg --size 512 \\
    --model stable-diffusion-v1-5/stable-diffusion-v1-5 --controlnet lllyasviel/sd-controlnet-canny

The default is a drawing that the bundled ControlNet never saw in training. Other images are cropped to a square.
UNet and ControlNet merge; with `--plain-controlnet` only the UNet does. The second table shows the mean distance in px
between the edges of the input and those of the generated images; the row "without" has no ControlNet.
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
    """The model's pipelines without and with the ControlNet, sharing their weights."""
    options.check_source(parser, "--controlnet", str(args.controlnet))
    without = options.load(parser, args, "StableDiffusionPipeline")
    from ppdiffusers import ControlNetModel, StableDiffusionControlNetPipeline

    try:
        controlnet = ControlNetModel.from_pretrained(str(args.controlnet), paddle_dtype=without.unet.dtype)
    except OSError as error:
        parser.error(f"--controlnet {args.controlnet}: {' '.join(str(error).split())}")
    controlnet.eval()
    parts = {**without.components, "controlnet": controlnet}
    pipe = StableDiffusionControlNetPipeline(**parts, requires_safety_checker=False)
    if args.xformers:
        pipe.enable_xformers_memory_efficient_attention()
    return without, pipe


def draw_without_controlnet(pipe, args, size, prompt):
    import paddle

    paddle.seed(args.seed)
    settings = {"num_inference_steps": options.steps_for(args, size), "guidance_scale": args.guidance_scale}
    return pipe(prompt, height=size, width=size, **settings).images[0]


def edge_distances(input_edges, without, arms) -> dict:
    """Print and return the mean distances between the input edges and those of the generated images."""
    rows = {"without": without, **{arm.label: arm.images for arm in arms}}
    table = {label: edges.mean_distances(input_edges, images) for label, images in rows.items()}
    print("\nMean edge distance, px      input to output  output to input")
    for label, directions in table.items():
        print("{:<26} {:>16.2f} {:>16.2f}".format(label, *directions.values()))
    return {"edge_distances_px": table}


def main(argv=None) -> None:
    parser = options.make_parser(__doc__)
    add = parser.add_argument
    penguin = CONTROLNET / "penguin.png"
    add("--image", type=Path, default=penguin, help="image whose edges to follow (default: a penguin)")
    add("--controlnet", default=CONTROLNET, help="ppdiffusers folder or hub name (default: the bundled one)")
    add("--plain-controlnet", action="store_true", help="merge only in the UNet")
    args = options.parse(parser, argv)
    image = options.open_image(parser, args)
    sizes, prompts = args.size, args.prompts or PROMPTS
    plain_pipe, pipe = load(parser, args)
    for size in sizes or args.size[:1]:
        source = ImageOps.fit(image, (size, size))
        input_edges = edges.canny(source)
        if not input_edges.any():
            parser.error(f"--image {args.image} has no edges at {size} px.")
        condition = edges.as_image(input_edges)
        without = [draw_without_controlnet(plain_pipe, args, size, prompt) for prompt in prompts]
        comparison.compare(
            pipe,
            args,
            "controlnet_canny",
            size,
            prompts,
            draw=partial(pipe, image=condition, guidance_scale=args.guidance_scale),
            source=source,
            merging={"controlnet": False} if args.plain_controlnet else {},
            rows=[("edges", [condition] * len(prompts)), ("without", without)],
            measure=partial(edge_distances, input_edges, without),
            image=options.repository_path(args.image),
            controlnet=options.repository_path(args.controlnet),
        )


if __name__ == "__main__":
    options.run(main)
