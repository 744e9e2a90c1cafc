"""Record a UNet with tomesd 0.1.3 and write unet.npz. Needs PyTorch, diffusers and tomesd, but not Paddle.

    python tests/golden/make_unet_golden.py MODEL            (writes unet.npz beside this file)

MODEL is the bundled model in diffusers' format (see examples/emoji_sd/training/); its UNet runs in fp32 on one CPU
thread. Latents and text are random numbers from the case's seed. use_rand is always off.
README.md beside this file describes the format.

tomesd replaces the class of every BasicTransformerBlock by one whose forward is a copy of an old diffusers forward.
diffusers 0.35 sets all attributes that the copy reads (`use_ada_layer_norm`, `use_ada_layer_norm_zero`,
`only_cross_attention`); for other versions this script sets the missing ones. It checks that every block runs through
tomesd, and that ratio 0 gives the unpatched output. As in make_golden.py, cases too close to a tie are rejected.
"""

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tomesd
import torch
from diffusers import UNet2DConditionModel
from make_golden import margins

CHANNELS, POSITIONS, TEXT = 4, 24, 192
MARGIN = 1e-5  # in cosine; larger than in make_golden.py because the layers before a block also round
EXACT = 1e-5  # allowed difference between patched at ratio 0 and not patched


def case(name, b, h, w, seed, timestep=500, **tome):
    return {"name": name, "B": b, "h": h, "w": w, "seed": seed, "timestep": timestep, "tome": tome}


CASES = [
    case("ratio_50", 2, 32, 32, 115, ratio=0.5),
    case("ratio_75", 2, 32, 32, 116, ratio=0.75),
    case("downsample_2", 2, 32, 32, 238, timestep=801, ratio=0.5, max_downsample=2),
    case("downsample_4", 2, 16, 16, 104, ratio=0.5, max_downsample=4),
    case("wide_16x24", 2, 16, 24, 139, ratio=0.5),
    case("tall_24x16_downsample_2", 2, 24, 16, 157, ratio=0.4, max_downsample=2),
    case("odd_17x19", 2, 17, 19, 107, ratio=0.5),
    case("sx4_sy2", 2, 16, 24, 108, ratio=0.6, sx=4, sy=2),
    case("crossattn", 2, 16, 16, 109, ratio=0.5, merge_crossattn=True),
    case("mlp", 2, 16, 16, 110, ratio=0.5, merge_mlp=True),
    case("crossattn_only", 2, 16, 16, 111, ratio=0.5, merge_attn=False, merge_crossattn=True),
    case("all_three", 2, 16, 16, 112, ratio=0.3, max_downsample=2, merge_crossattn=True, merge_mlp=True),
    case("batch_1", 1, 16, 24, 113, timestep=1, ratio=0.5),
    case("batch_3", 3, 16, 16, 114, timestep=981, ratio=0.5),
]


def draw(c):
    """(sample [B, 4, h, w], encoder_hidden_states [B, 24, 192]), float32, in this order from one generator."""
    rng = np.random.RandomState(c["seed"])
    sample = rng.standard_normal((c["B"], CHANNELS, c["h"], c["w"])).astype(np.float32)
    text = rng.standard_normal((c["B"], POSITIONS, TEXT)).astype(np.float32)
    return sample, text


def run(unet, c):
    sample, text = map(torch.from_numpy, draw(c))
    with torch.no_grad():
        return unet(sample, torch.tensor([c["timestep"]]), text).sample.numpy()  # tomesd's hook needs positions


class Watch:
    """Wraps tomesd's matching: records its calls and the smallest margin."""

    def __init__(self):
        self.calls, self.margin = [], np.inf
        self.matching = tomesd.merge.bipartite_soft_matching_random2d

    def __call__(self, x, w, h, sx, sy, r, **kwargs):
        if r > 0:
            self.margin = min(self.margin, *margins(x.numpy(), {"w": w, "h": h, "sx": sx, "sy": sy, "r": r}))
        self.calls.append((h, w, r))
        return self.matching(x, w, h, sx, sy, r, **kwargs)


def patched(unet, c, **change):
    """The UNet's output with tomesd, and the record of its matching."""
    tomesd.apply_patch(unet, **{**c["tome"], **change, "use_rand": False})
    blocks = [m for m in unet.modules() if type(m).__name__ == "ToMeBlock"]
    assert len(blocks) == 7, len(blocks)  # 3 at the first level, 3 at the second, 1 in the middle
    for block in blocks:
        for name in ("use_ada_layer_norm", "use_ada_layer_norm_zero", "only_cross_attention"):
            if not hasattr(block, name):
                setattr(block, name, False)
    watch = tomesd.merge.bipartite_soft_matching_random2d = Watch()
    try:
        out = run(unet, c)
    finally:
        tomesd.merge.bipartite_soft_matching_random2d = watch.matching
        tomesd.remove_patch(unet)
    return out, watch


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the bundled model in diffusers' format")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("unet.npz"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    unet = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet", torch_dtype=torch.float32).eval()
    index, arrays = [], {}
    for c in CASES:
        plain = run(unet, c)
        zero, _ = patched(unet, c, ratio=0.0)
        assert np.abs(zero - plain).max() <= EXACT, f"{c['name']}: the patched forward computes something else"
        merged, watch = patched(unet, c)
        assert np.array_equal(run(unet, c), plain), f"{c['name']}: removing the patch did not restore the UNet"
        if watch.margin < MARGIN:
            raise SystemExit(f"{c['name']}: too close to a tie ({watch.margin:.1e}); choose another seed")
        effect = float(np.abs(merged - plain).max())
        assert watch.calls and effect > 1e-3, f"{c['name']}: merging had no effect"
        print(f"{c['name']:24} effect {effect:.3f}, margin {watch.margin:.1e}, blocks (h, w, r) {watch.calls}")
        index.append({**c, "effect": effect, "matched": watch.calls})
        arrays.update({f"{c['name']}/plain": plain, f"{c['name']}/merged": merged})
    made_with = {p: version(p) for p in ("tomesd", "torch", "diffusers", "numpy")}
    made_with["python"] = platform.python_version()
    np.savez_compressed(args.output, cases=json.dumps(index), made_with=json.dumps(made_with), **arrays)
    print(f"{len(index)} cases, {args.output.stat().st_size / 1e3:.0f} kB, {made_with}")


if __name__ == "__main__":
    main()
