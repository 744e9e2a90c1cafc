"""Fine-tune emoji_sd's VAE on scenes, so that textures come back.

    python train_vae.py THINGS OUT MINUTES

Crops of 64 px are cut from fresh scenes of 256 and 128 px. OUT/vae is written in diffusers' format, every five minutes
and at the end; where it exists, training goes on from it. Prints the PSNR of 64 scenes that are not trained on.
"""

import argparse
import json
import math
import time
from pathlib import Path

import cv2
import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from scenes import FIRST_TRAINING_SEED, ROOT, Scenes

CROP, SCENES, CROPS, PEAK, FINAL = 64, 4, 4, 6e-4, 2e-5
SOURCE = ROOT / "examples" / "emoji_sd" / "vae"
CONFIG = {
    "latent_channels": 4,
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 1,
    "norm_num_groups": 16,
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
}


def as_input(images):
    """uint8 [N, H, W, 3] to float [N, 3, H, W] in -1..1."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def load(folder):
    """The VAE in `folder`, of diffusers or ppdiffusers, without its mid-block attention, which is an identity."""
    factor = json.loads((folder / "config.json").read_text(encoding="utf-8"))["scaling_factor"]
    vae = AutoencoderKL(**CONFIG, scaling_factor=factor, mid_block_add_attention=False)
    state = load_file(next(folder.glob("*.safetensors")))
    vae.load_state_dict({name: x.float() for name, x in state.items() if "mid_block.attentions" not in name})
    return vae.to(memory_format=torch.channels_last)


def complete(vae, scaling_factor):
    """A copy with mid-block attention of zero output, an identity, since ppdiffusers 0.29 always builds one."""
    full = AutoencoderKL(**CONFIG, sample_size=256, scaling_factor=scaling_factor)
    full.load_state_dict(vae.state_dict(), strict=False)
    for side in (full.encoder, full.decoder):
        torch.nn.init.zeros_(side.mid_block.attentions[0].to_out[0].weight)
        torch.nn.init.zeros_(side.mid_block.attentions[0].to_out[0].bias)
    return full


@torch.no_grad()
def report(vae, scenes, size):
    """Median PSNR in dB of 64 held-out scenes, and 1 / std of their latents."""
    images = as_input([scenes(seed, size)[0] for seed in range(64)])
    means = [vae.encode(some).latent_dist.mean for some in images.split(8)]
    decoded = torch.cat([vae.decode(mean).sample.clamp(-1, 1) for mean in means])
    psnr = 10 * torch.log10(4 / (decoded - images).square().mean((1, 2, 3)))
    factor = 1 / torch.cat(means).std().item()
    print(
        f"{size} px: PSNR {psnr.median():.1f} dB ({psnr.min():.1f} to {psnr.max():.1f}), 1 / std {factor:.4f}",
        flush=True,
    )
    return factor


def edges(difference):
    """Mean absolute difference between neighbours."""
    return sum(difference.diff(dim=axis).abs().mean() for axis in (2, 3))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("things", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("minutes", type=float)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    folder = options.out / "vae"
    vae, scenes = load(folder if folder.exists() else SOURCE).train(), Scenes(options.things)
    optimizer = torch.optim.AdamW(vae.parameters(), PEAK, betas=(0.9, 0.99), weight_decay=1e-4)
    seed = FIRST_TRAINING_SEED + time.time_ns() % (1 << 39)  # a run that goes on sees other scenes
    rng = np.random.default_rng(seed)
    start = saved = time.process_time()
    step, losses = 0, []
    while (minutes := (time.process_time() - start) / 60) < options.minutes:
        cosine = 0.5 + 0.5 * math.cos(math.pi * minutes / options.minutes)
        optimizer.param_groups[0]["lr"] = (FINAL + (PEAK - FINAL) * cosine) * min(1, (step + 1) / 100)
        crops = []
        for _ in range(SCENES):
            image = scenes(seed, 256 if rng.random() < 0.75 else 128)[0]
            seed += 1
            for top, left in rng.integers(0, len(image) - CROP + 1, (CROPS, 2)):
                crops.append(image[top : top + CROP, left : left + CROP])
        x = as_input(crops).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(x).latent_dist
            y = vae.decode(posterior.sample()).sample
        difference = y.float() - x
        error = difference.abs().mean() + 2 * difference.square().mean() + 0.25 * edges(difference)
        loss = error + 5e-4 * posterior.kl().float().mean() / (16 * 16 * 4)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses.append(error.item())
        if step % 50 == 0:
            print(f"step {step}, {minutes:.1f} min of CPU time, error {np.mean(losses[-50:]):.4f}", flush=True)
        if time.process_time() - saved > 300:
            saved = time.process_time()
            complete(vae, report(vae.eval(), scenes, 256)).half().save_pretrained(folder)
            vae.train()
    complete(vae, report(vae.eval(), scenes, 256)).half().save_pretrained(folder)
    report(vae, scenes, 128)


if __name__ == "__main__":
    main()
