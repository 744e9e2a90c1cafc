"""Train the UNet of emoji_sd_256: four levels, built around the three-level UNet that was trained at 128 px.

    python train_unet_256.py OUT MINUTES PEAK_LR FINAL_LR [--resume FOLDER] [--freeze-attention]

OUT/model.safetensors and OUT/log.txt are written. Text encoder and VAE are those of $EMOJI_WORK/model and do not
change. --freeze-attention passes no gradient to the self-attention of the new level, which makes steps 1.7 times as
fast.

Without --resume, the inner three levels start from $EMOJI_WORK/model/unet. The first level starts from the first level
of $EMOJI_WORK/unet_at_256, a three-level UNet that was fine-tuned at 256 px for a while. Two parts are fitted first:

- time embedding: the inner levels see pooled latents, in which noise has half its standard deviation, so step t is
  given the embedding of the step at which 128 px images have that ratio of signal to noise;
- the first level's downsampler: its output approximates what the inner UNet's first convolution makes of them.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTokenizer

WORK = Path(os.environ.get("EMOJI_WORK", "work"))
CONCEPTS = Path(__file__).with_name("concepts.txt").read_text().split()
SCALING_FACTOR = 0.7948505603536659  # 1 / std of the latents, as train_vae.py printed it
BATCH, EMA = 4, 0.998
NEW = ("conv_in", "down_blocks.0", "up_blocks.3", "up_blocks.2.upsamplers", "conv_norm_out", "conv_out")
INNER_SHARE = 0.5  # of the learning rate, for the weights that are not NEW

alphas = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear").alphas_cumprod
snr = alphas / (1 - alphas)


@torch.no_grad()
def load_data():
    """Latents [N, 4, 64, 64], text embeddings [N, 24, 192] and the embedding of the empty prompt [1, 24, 192]."""
    rows = json.loads((WORK / "captions.json").read_text())
    kept = [
        i for i, row in enumerate(rows) if row["concept"] in CONCEPTS and not row["caption"].startswith("a cartoon")
    ]
    vae = AutoencoderKL.from_pretrained(WORK / "model" / "vae").float().eval()
    images = torch.from_numpy(np.load(WORK / "data_256.npz")["x"][kept]).permute(0, 3, 1, 2).float() / 127.5 - 1
    latents = torch.cat([vae.encode(some).latent_dist.mean for some in images.split(8)]) * SCALING_FACTOR
    tokenizer = CLIPTokenizer.from_pretrained(WORK / "model", subfolder="tokenizer")
    encoder = CLIPTextModel.from_pretrained(WORK / "model" / "text_encoder").float().eval()
    settings = {"padding": "max_length", "max_length": 24, "truncation": True, "return_tensors": "pt"}
    texts = [rows[i]["caption"] for i in kept]
    embeddings, empty = (encoder(tokenizer(some, **settings).input_ids)[0] for some in (texts, [""]))
    return latents, embeddings, empty


def load_unet(folder, **changes):
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    return UNet2DConditionModel.from_config(config).float()


def weights_of(folder):
    return {name: x.float() for name, x in load_file(folder / "diffusion_pytorch_model.safetensors").items()}


def four_levels():
    return load_unet(
        WORK / "model" / "unet",
        sample_size=64,
        block_out_channels=[64, 64, 128, 192],
        down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    )


def build():
    """The four-level UNet with weights of both three-level ones."""
    inner, outer = weights_of(WORK / "model" / "unet"), weights_of(WORK / "unet_at_256")
    unet = four_levels()
    state = unet.state_dict()
    for name, fresh in state.items():
        part, number, rest = [*name.split(".", 2), ""][:3]  # or "conv_in", "weight" and nothing
        if part == "down_blocks":
            weight = outer.get(name) if number == "0" else inner.get(f"down_blocks.{int(number) - 1}.{rest}")
        elif part == "up_blocks":
            weight = outer.get(f"up_blocks.2.{rest}") if number == "3" else inner.get(name)
        else:
            weight = outer[name] if part in ("conv_in", "conv_norm_out", "conv_out") else inner[name]
        if weight is not None and weight.shape == fresh.shape:
            state[name] = weight
        elif name == "up_blocks.3.resnets.0.conv1.weight":  # inputs: the level below (64 channels, not 128), skip
            state[name] = torch.cat([0.5 * fresh[:, :64], weight[:, 128:]], 1)
        elif name == "up_blocks.3.resnets.0.conv_shortcut.weight":
            state[name] = torch.cat([0.5 * torch.eye(64)[:, :, None, None], weight[:, 128:]], 1)
        elif name == "up_blocks.2.upsamplers.0.conv.weight":  # as it is, enlarged
            state[name] = F.pad(torch.eye(64)[:, :, None, None], (1, 1, 1, 1))
        elif name == "up_blocks.2.upsamplers.0.conv.bias":
            state[name] = torch.zeros_like(fresh)
    unet.load_state_dict(state)
    return unet


def fit_time_embedding(unet, inner, steps=1500):
    pooled = torch.tensor([(snr - 4 * one).abs().argmin() for one in snr])
    with torch.no_grad():
        target = inner.time_embedding(inner.time_proj(pooled).float())
        source = unet.time_proj(torch.arange(1000)).float()
    minimize(unet.time_embedding.parameters(), 1e-3, steps, lambda: F.mse_loss(unet.time_embedding(source), target))


def fit_downsampler(unet, inner, latents, embeddings, steps=250):
    block = unet.down_blocks[0]

    def loss():
        i, t = torch.randint(0, len(latents), (8,)), torch.randint(0, 1000, (8,))
        a = alphas[t].view(-1, 1, 1, 1)
        x = (a.sqrt() * latents[i] + (1 - a).sqrt() * torch.randn_like(latents[i]))[:, :, :32]
        with torch.no_grad():
            h = block.resnets[0](unet.conv_in(x), unet.time_embedding(unet.time_proj(t).float()))
            h = block.attentions[0](h, encoder_hidden_states=embeddings[i]).sample
            target = inner.conv_in(F.avg_pool2d(x, 2) / (a + (1 - a) / 4).sqrt())
        return F.mse_loss(block.downsamplers[0](h), target)

    minimize(block.downsamplers[0].parameters(), 2e-3, steps, loss)


def minimize(parameters, peak, steps, loss):
    optimizer = torch.optim.Adam(parameters, peak)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * (1 - step / steps)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def freeze_attention(unet):
    for block in (unet.down_blocks[0], unet.up_blocks[3]):
        for transformer in block.attentions:
            layer = transformer.transformer_blocks[0].attn1
            layer.forward = torch.no_grad()(layer.forward)


def save(unet, averages, path):
    """Write the averaged weights."""
    state = {**unet.state_dict(), **dict(zip((name for name, _ in unet.named_parameters()), averages, strict=True))}
    save_file({name: x.contiguous() for name, x in state.items()}, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def train(unet, latents, embeddings, empty, options):
    named = list(unet.named_parameters())
    parameters = [parameter for _, parameter in named]
    averages = [parameter.detach().clone() for parameter in parameters]
    groups = [
        {"params": [p for name, p in named if name.startswith(NEW) == is_new], "share": 1 if is_new else INNER_SHARE}
        for is_new in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=1e-2)
    log = (options.out / "log.txt").open("a")
    start, saved, step, losses = time.time(), time.time(), 0, []
    while (minutes := (time.time() - start) / 60) < options.minutes:
        cosine = 0.5 + 0.5 * math.cos(math.pi * minutes / options.minutes)
        rate = (options.final_lr + (options.peak_lr - options.final_lr) * cosine) * min(1, (step + 10) / 100)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["share"]
        i = torch.randint(0, len(latents), (BATCH,))
        text = torch.where((torch.rand(BATCH) < 0.1).view(-1, 1, 1), empty, embeddings[i])
        t = torch.randint(0, 1000, (BATCH,))
        t = torch.where(torch.rand(BATCH) < 0.4, torch.randint(450, 1000, (BATCH,)), t)  # they decide the layout
        a, noise = alphas[t].view(-1, 1, 1, 1), torch.randn_like(latents[i])
        velocity = a.sqrt() * noise - (1 - a).sqrt() * latents[i]
        output = unet(a.sqrt() * latents[i] + (1 - a).sqrt() * noise, t, encoder_hidden_states=text).sample
        weight = snr[t].clamp(max=5) / (snr[t] + 1)  # min-SNR-5 on the velocity
        loss = (weight * (output - velocity).square().mean((1, 2, 3))).mean() / weight.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 1.0)
        optimizer.step()
        step += 1
        decay = min(EMA, (1 + step) / (10 + step))
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, [p.detach() for p in parameters], alpha=1 - decay)
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}, {minutes:.1f} min, loss {np.mean(losses[-200:]):.4f}", file=log, flush=True)
        if time.time() - saved > 600:
            saved = time.time()
            save(unet, averages, options.out / "model.safetensors")
    save(unet, averages, options.out / "model.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name in ("minutes", "peak_lr", "final_lr"):
        parser.add_argument(name, type=float)
    parser.add_argument("--resume", type=Path, help="OUT of an earlier run")
    parser.add_argument("--freeze-attention", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = load_data()
    if options.resume:
        unet = four_levels()
        unet.load_state_dict(load_file(options.resume / "model.safetensors"))
    else:
        unet, inner = build(), load_unet(WORK / "model" / "unet")
        inner.load_state_dict(weights_of(WORK / "model" / "unet"))
        fit_time_embedding(unet, inner)
        fit_downsampler(unet, inner, *data[:2])
    if options.freeze_attention:
        freeze_attention(unet)
    train(unet, *data, options)


if __name__ == "__main__":
    main()
