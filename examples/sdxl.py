"""Generate prompts with SDXL, plain and with merged tokens, from the same noise: one PNG and one table.

python examples/sdxl.py --tiny
python examples/sdxl.py "a photo of an owl on a branch" --model stabilityai/stable-diffusion-xl-base-1.0
python examples/sdxl.py "a photo of an owl on a branch" --model ./sdxl --size 1024 1536 --ratio 0.3 0.6 --xformers

SDXL has no attention at level 1, so it merges at level 2: 4,096 tokens at 1024 px. `--tiny` has the same layout.
"""

from functools import partial

import comparison
import options

PROMPTS = ["a photo of an owl on a branch", "a harbour in the morning, oil on canvas"]


def main(argv=None) -> None:
    parser = options.make_parser(__doc__, tiny="sdxl", bundled=False)
    args = options.parse(parser, argv)
    pipe = options.load(parser, args, "StableDiffusionXLPipeline")
    if pipe.text_encoder_2 is None:  # ppdiffusers also loads Stable Diffusion 1.5 as SDXL
        parser.error(f"--model {args.model} is not SDXL: it has only one text encoder.")
    for size in args.size:
        draw = partial(pipe, height=size, width=size, guidance_scale=args.guidance_scale)
        comparison.compare(pipe, args, "sdxl", size, args.prompts or PROMPTS, draw)


if __name__ == "__main__":
    options.run(main)
