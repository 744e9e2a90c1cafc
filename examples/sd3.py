"""Generate prompts with Stable Diffusion 3, plain and merged, from the same noise: one PNG and one table.

python examples/sd3.py --tiny
python examples/sd3.py "a photo of an owl on a branch" --model stabilityai/stable-diffusion-3-medium-diffusers

Its transformer attends to image and text tokens together. Only image tokens merge: 4,096 of them at 1024 px.
"""

from functools import partial

import comparison
import options

PROMPTS = ["a photo of an owl on a branch", "a sign that says hello"]


class JointAttention:
    """JointAttnProcessor2_5 with Paddle's own attention, for builds of Paddle without CUDA."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, **kwargs):
        import paddle

        def heads(image_projection, text_projection):  # [B, image tokens + text tokens, heads, channels of a head]
            both = paddle.concat([image_projection(hidden_states), text_projection(encoder_hidden_states)], axis=1)
            return both.reshape([*both.shape[:2], attn.heads, -1])

        query, key, value = (
            heads(attn.to_q, attn.add_q_proj),
            heads(attn.to_k, attn.add_k_proj),
            heads(attn.to_v, attn.add_v_proj),
        )
        out = paddle.nn.functional.scaled_dot_product_attention(query, key, value).flatten(2)
        image, text = out[:, : hidden_states.shape[1]], out[:, hidden_states.shape[1] :]
        return attn.to_out[0](image), text if attn.context_pre_only else attn.to_add_out(text)


def main(argv=None) -> None:
    parser = options.make_parser(__doc__, tiny="sd3", bundled=False)
    args = options.parse(parser, argv)
    pipe = options.load(parser, args, "StableDiffusion3Pipeline")
    from paddle.nn import functional

    # ppdiffusers 0.29 calls this function in SD3, but only defines it if its CUDA attention is available.
    if not hasattr(functional, "scaled_dot_product_attention_"):
        pipe.transformer.set_attn_processor(JointAttention())
    for size in args.size:
        draw = partial(pipe, height=size, width=size, guidance_scale=args.guidance_scale)
        comparison.compare(pipe, args, "sd3", size, args.prompts or PROMPTS, draw)


if __name__ == "__main__":
    options.run(main)
