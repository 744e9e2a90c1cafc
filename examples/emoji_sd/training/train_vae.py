"""Train emoji_sd's VAE on crops of the 128 px images, then store it with an identity mid-block attention.

    python train_vae.py MINUTES

Writes vae/ under $EMOJI_WORK.
"""

import math
import os
import sys
import time

import numpy as np
import torch
from diffusers import AutoencoderKL

torch.manual_seed(0)
torch.set_num_threads(2)
WORK, MIN, B = os.environ.get("EMOJI_WORK", "work"), float(sys.argv[1]), 16
X = torch.from_numpy(np.load(WORK + "/data_128.npz")["x"]).permute(0, 3, 1, 2).contiguous()
config = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 1,
    "norm_num_groups": 16,
    "sample_size": 128,
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
}
vae = AutoencoderKL(**config, mid_block_add_attention=False).to(memory_format=torch.channels_last).train()
opt = torch.optim.AdamW(vae.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4)
g = torch.Generator().manual_seed(0)


def crop(x):
    out = []
    for im in x:
        i, j = torch.randint(0, 65, (2,), generator=g).tolist()
        c = im[:, i : i + 64, j : j + 64]
        out.append(c.flip(-1) if torch.rand(1, generator=g) < 0.5 else c)
    return torch.stack(out)


def edges(d):
    return (d[..., 1:] - d[..., :-1]).abs().mean() + (d[..., 1:, :] - d[..., :-1, :]).abs().mean()


t0 = time.time()
it = 0
log = []
while (el := (time.time() - t0) / 60) < MIN:
    for p in opt.param_groups:
        p["lr"] = 1e-3 * min(1, it / 200) * (0.5 + 0.5 * math.cos(math.pi * el / MIN)) + 1e-5
    x = (
        crop(X[torch.randint(0, len(X), (B,), generator=g)])
        .float()
        .div(127.5)
        .sub(1)
        .contiguous(memory_format=torch.channels_last)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        post = vae.encode(x).latent_dist
        y = vae.decode(post.sample()).sample
    d = y.float() - x
    rec = d.abs().mean() + d.square().mean() + 0.5 * edges(d)
    loss = rec + 1e-3 * post.kl().float().mean() / (16 * 16 * 4)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
    opt.step()
    it += 1
    log.append(rec.item())
    if it % 200 == 0:
        print(f"step {it} {el:.1f} min rec {np.mean(log[-200:]):.4f}", flush=True)

vae.eval()
full = AutoencoderKL(**config)
full.load_state_dict(vae.state_dict(), strict=False)
for side in (full.encoder, full.decoder):  # attention with a zero output, so an identity
    torch.nn.init.zeros_(side.mid_block.attentions[0].to_out[0].weight)
    torch.nn.init.zeros_(side.mid_block.attentions[0].to_out[0].bias)
with torch.no_grad():
    std = torch.cat([vae.encode(b.float().div(127.5).sub(1)).latent_dist.mean for b in X.split(32)]).std().item()
full.register_to_config(scaling_factor=1 / std)
full.save_pretrained(WORK + "/vae")
print("scaling factor", 1 / std)
