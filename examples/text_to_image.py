"""Generate prompts plain and with merged tokens, from the same noise: one PNG and one table for each size.

python examples/text_to_image.py
python examples/text_to_image.py "a 3d render of owl" "a flat drawing of owl" --ratio 0.3 0.6 --seed 3 --size 128
python examples/text_to_image.py "a photo of an owl" --model stable-diffusion-v1-5/stable-diffusion-v1-5 --xformers

The bundled model knows "a 3d render of X" and "a flat drawing of X", X from examples/emoji_sd/training/concepts.txt.
At 128 px (1,024 tokens) attention is a small part of the work, so merging saves little. Above that the UNet of
examples/emoji_sd_256 is used: at 256 px there are 4,096 tokens, as many as in Stable Diffusion 1.5 at 512 px.
"""

from functools import partial

import comparison
import options

PROMPTS = ["a 3d render of fox", "a flat drawing of fox"]
LARGE_PROMPTS = ["a 3d render of cookie"]  # one prompt, because larger sizes take longer


def main(argv=None) -> None:
    parser = options.make_parser(__doc__)
    args = options.parse(parser, argv)
    pipe = options.load(parser, args, "DiffusionPipeline")
    for size in args.size:
        prompts = args.prompts or (PROMPTS if size <= options.TRAINED_AT else LARGE_PROMPTS)
        draw = partial(pipe, height=size, width=size, guidance_scale=args.guidance_scale)
        comparison.compare(pipe, args, "text_to_image", size, prompts, draw)


if __name__ == "__main__":
    options.run(main)
