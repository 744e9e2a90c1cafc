"""Train a small Stable Diffusion 3 transformer on scenes of coloured shapes with captions, in PyTorch on a CPU.

    build/optimum-venv/bin/python benchmarks/train_joint.py --minutes 60 --output build/joint

It is diffusers' `SD3Transformer2DModel`, with 6 blocks of width 128, 256 image tokens and 16 of text, trained as a
rectified flow; captions are embedded by a table of words. `benchmarks/joint_attention.py` loads what it writes in
ppdiffusers. With --output of an earlier run it goes on from there.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from lab.shapes import LENGTH, SIDE, WORDS, make_scenes
from torch import nn

CONFIG = {
    "sample_size": SIDE,
    "patch_size": 2,
    "in_channels": 3,
    "out_channels": 3,
    "num_layers": 6,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "joint_attention_dim": 128,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 128,
    "pos_embed_max_size": 16,
}
BATCH = 64
WITHOUT_CAPTION = 0.1  # share of images, for guidance
LEARNING_RATE, WARM_UP = 1e-3, 200  # steps


class Model(nn.Module):
    """The transformer with its table of words."""

    def __init__(self):
        super().__init__()
        self.transformer = SD3Transformer2DModel(**CONFIG)
        self.words = nn.Embedding(len(WORDS), CONFIG["joint_attention_dim"])
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, CONFIG["joint_attention_dim"]))

    def forward(self, noisy, share, captions):
        """The velocity, noise - image [B, 3, H, W], at a share of noise [B]."""
        text = self.words(captions)
        return self.transformer(
            noisy, text + self.places, pooled_projections=text.mean(1), timestep=1000 * share, return_dict=False
        )[0]


def save(weights, folder):
    """Write the transformer as diffusers does, and the table of words."""
    model = Model()
    model.load_state_dict(weights)
    model.transformer.save_pretrained(folder / "transformer")
    text = {"words": model.words.weight, "places": model.places}
    np.savez(folder / "text.npz", **{name: value.detach().numpy() for name, value in text.items()})
    torch.save(weights, folder / "average.pt")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("build/joint"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, random = Model(), np.random.default_rng(0)
    if (options.output / "average.pt").is_file():
        model.load_state_dict(torch.load(options.output / "average.pt"))
        random = np.random.default_rng(int(time.time()))
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.99))
    start, losses, step = time.monotonic(), [], 0
    while (share_of_time := (time.monotonic() - start) / (60 * options.minutes)) < 1:
        scenes = make_scenes(random, BATCH)
        images, captions = torch.from_numpy(scenes.images), torch.from_numpy(scenes.captions)
        captions[torch.rand(BATCH) < WITHOUT_CAPTION] = 0
        share, noise = torch.sigmoid(torch.randn(BATCH)), torch.randn_like(images)
        part = share[:, None, None, None]
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model((1 - part) * images + part * noise, share, captions)
        loss = nn.functional.mse_loss(velocity.float(), noise - images)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        decay = max(0.02, math.cos(math.pi / 2 * share_of_time))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP) * decay
        optimizer.step()
        step += 1
        losses.append(loss.item())
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, max(0.002, 10 / (step + 10)))
        if step % 200 == 0:
            minutes = (time.monotonic() - start) / 60
            print(f"{step * BATCH} images, {minutes:.1f} min, loss {np.mean(losses[-200:]):.4f}", flush=True)
            save(average, options.output)
    save(average, options.output)


if __name__ == "__main__":
    main()
