"""Train emoji_sd's text encoder and UNet, resuming from ck.pt.

    python train_unet.py PIXELS:BATCH:SHARE,... MINUTES PEAK_LR FINAL_LR

Images of 64 and 128 px show one object; those of 256 px four, each as large as at 128 px and randomly mirrored, so
that objects have the same scale at both sizes.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

torch.manual_seed(0)
torch.set_num_threads(2)
WORK = os.environ.get("EMOJI_WORK", "work")
OUT = WORK + "/model"
SIZES = [(int(a), int(b), float(c)) for a, b, c in (s.split(":") for s in sys.argv[1].split(","))]
MIN, LR0, LR1 = map(float, sys.argv[2:5])
RES = max(s[0] for s in SIZES)
CONCEPTS = Path(__file__).with_name("concepts.txt").read_text().split()
EMA = float(os.environ.get("EMOJI_EMA", 0.999))  # .99 for stages of fewer than 1,000 steps
SF = 0.7948505603536659  # 1 / std of the latents, as train_vae printed it
J = json.loads(Path(WORK, "captions.json").read_text())
keep = [i for i, r in enumerate(J) if r["concept"] in CONCEPTS and not r["caption"].startswith("a cartoon")]
caps = [J[i]["caption"] for i in keep]
vae = AutoencoderKL.from_pretrained(WORK + "/vae").eval()
vae.register_to_config(scaling_factor=SF)
x = torch.from_numpy(np.load(WORK + "/data_256.npz")["x"][keep]).permute(0, 3, 1, 2).float() / 127.5 - 1


def training_images(size):
    if size < 256:
        return F.interpolate(x, size=(size, size), mode="area")
    one = F.interpolate(x, size=(128, 128), mode="area")
    flips = torch.rand(2, len(x), 4, generator=torch.Generator().manual_seed(0)) < 0.3
    cells = [[torch.where(f[:, c, None, None, None], one.flip(-1), one) for c in range(4)] for f in flips]
    return torch.cat([torch.cat([torch.cat(c[:2], 3), torch.cat(c[2:], 3)], 2) for c in cells])


with torch.no_grad():
    Z = {r: torch.cat([vae.encode(b).latent_dist.mean for b in training_images(r).split(8)]) * SF for r, _, _ in SIZES}
print(len(caps), "images", {r: (tuple(z.shape), round(z.std().item(), 3)) for r, z in Z.items()}, flush=True)

tok = CLIPTokenizer.from_pretrained(OUT, subfolder="tokenizer")
V = len(tok)
te = CLIPTextModel(
    CLIPTextConfig(
        vocab_size=V,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=24,
        projection_dim=192,
        bos_token_id=V - 2,
        eos_token_id=V - 1,
        pad_token_id=V - 1,
    )
)
unet = UNet2DConditionModel(
    sample_size=32,
    in_channels=4,
    out_channels=4,
    layers_per_block=1,
    block_out_channels=(64, 128, 192),
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=192,
    attention_head_dim=2,
)
params = list(unet.parameters()) + list(te.parameters())
ids = tok(caps, padding="max_length", max_length=24, truncation=True, return_tensors="pt").input_ids
unc = tok([""], padding="max_length", max_length=24, return_tensors="pt").input_ids
ac = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear").alphas_cumprod
snr = ac / (1 - ac)
opt = torch.optim.AdamW(params, lr=LR0, betas=(0.9, 0.99), weight_decay=1e-2)
CK = WORK + "/ck.pt"
it = 0
ema = [p.detach().clone() for p in params]
if os.path.exists(CK):  # fp16 state dicts suffice
    ck = torch.load(CK)
    unet.load_state_dict(ck["u"])
    te.load_state_dict(ck["t"])
    it = ck["it"]
    ema = [e.clone() for e in ck["e"]] if "e" in ck else [p.detach().clone() for p in params]
    if "o" in ck:
        opt.load_state_dict(ck["o"])
    print("resume at step", it, flush=True)
if RES < 128:
    unet.set_attn_processor(AttnProcessor())  # faster than SDPA's backward at 256 tokens


def save():
    state = {"u": unet.state_dict(), "t": te.state_dict(), "e": ema, "o": opt.state_dict(), "it": it, "res": RES}
    torch.save(state, CK + ".tmp")
    os.replace(CK + ".tmp", CK)


PROMPTS = [
    "a 3d render of red apple",
    "a flat drawing of fox",
    "a 3d render of wolf",
    "a 3d render of tiger face",
    "a flat drawing of penguin",
    "a 3d render of strawberry",
    "a 3d render of hamburger",
    "a flat drawing of tulip",
]


def sample(tag):
    bak = [p.detach().clone() for p in params]
    for p, e in zip(params, ema, strict=True):
        p.data.copy_(e)
    unet.eval()
    te.eval()
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=te,
        tokenizer=tok,
        unet=unet,
        scheduler=DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(OUT)
    for size, _, _ in SIZES:
        ims = pipe(
            PROMPTS,
            num_inference_steps=20,
            guidance_scale=2.0,
            height=size,
            width=size,
            generator=torch.Generator().manual_seed(0),
        ).images
        Image.fromarray(np.concatenate([np.asarray(i) for i in ims], 1)).save(f"{WORK}/s_{tag}_{size}.png")
    unet.train()
    te.train()
    for p, b in zip(params, bak, strict=True):
        p.data.copy_(b)


g = torch.Generator().manual_seed(it + 1)
unet.train()
te.train()
t0 = ts = time.time()
last = t0
log = []
first = it
while (el := (time.time() - t0) / 60) < MIN:
    lr = (LR1 + (LR0 - LR1) * (0.5 + 0.5 * math.cos(math.pi * el / MIN))) * min(1, (it - first + 10) / 200)
    for p in opt.param_groups:
        p["lr"] = lr
    r, B, _ = SIZES[torch.multinomial(torch.tensor([s[2] for s in SIZES]), 1, generator=g)]
    i = torch.randint(0, len(Z[r]), (B,), generator=g)
    z = Z[r][i]
    tx = ids[i % len(caps)].clone()
    tx[torch.rand(B, generator=g) < 0.1] = unc
    t = torch.randint(0, 1000, (B,), generator=g)
    n = torch.randn(z.shape, generator=g)
    a = ac[t].view(-1, 1, 1, 1)
    xt = a.sqrt() * z + (1 - a).sqrt() * n
    v = a.sqrt() * n - (1 - a).sqrt() * z
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = unet(xt, t, encoder_hidden_states=te(tx)[0]).sample
    w = torch.minimum(snr[t], torch.tensor(5.0)) / (snr[t] + 1)  # min-SNR-5 on v
    loss = (w * (o.float() - v).square().mean((1, 2, 3))).mean() / w.mean()
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    opt.step()
    it += 1
    d = min(EMA, (1 + it) / (10 + it))
    torch._foreach_mul_(ema, d)
    torch._foreach_add_(ema, [p.detach() for p in params], alpha=1 - d)
    log.append((r, loss.item()))
    if it % 100 == 0:
        print(
            f"step {it} {el:.1f} min",
            " ".join(f"{r}px {np.mean([value for q, value in log[-100:] if q == r]):.4f}" for r, _, _ in SIZES),
            f"{100 / (time.time() - ts):.2f} it/s",
            flush=True,
        )
        ts = time.time()
    if time.time() - last > 480:
        save()
        sample(f"{RES}_{it}")
        last = ts = time.time()
save()
sample(f"{RES}_last")
print("done", it)
