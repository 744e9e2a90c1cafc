"""Train UNet and text encoder of scenes_sd on endless scenes: three levels at 64 and 128 px, then four at 256 px.

    python train_unet.py THINGS OUT MINUTES --size 64 --source EMOJI_SD
    python train_unet.py THINGS OUT MINUTES --size 128
    python train_unet.py THINGS OUT MINUTES --size 256

OUT/SIZE is a pipeline in diffusers' format (averaged weights, float16) with a sheet of images, sheet.png, and all that
is needed to go on, state.pt. It is written every twenty minutes of CPU time and at the end; the same command goes on
from there, and without state.pt from the weights. Where OUT/SIZE and the size before it are missing, 256 px goes on
from the weights of examples/scenes_sd. Otherwise:

- 64 px, where an image costs a quarter of one at 128 px, starts from emoji_sd, with positions for 40 tokens, not 24;
- 128 px starts from 64 px;
- 256 px starts from 128 px, with the outer level of examples/scenes_sd (the first time of a model for 256 px that was
  part of version 2.1). The inner levels see pooled latents, whose noise has half its standard deviation, so the time
  embedding is fitted to that first.

Runs on one thread of a CPU, in bfloat16 by autocast.
"""

import argparse
import copy
import os
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file
from scenes import FIRST_TRAINING_SEED, ROOT, Scenes, sheet
from train_vae import complete
from train_vae import load as load_vae
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

EXAMPLE = ROOT / "examples" / "scenes_sd"
TOKENS = 40  # the longest caption has 36
EMA, USES, BUFFER, WARM_UP = 0.998, 4, 512, 200
BATCH, RATE = {64: 64, 128: 16, 256: 4}, {64: 6e-4, 128: 4e-4, 256: 2.5e-4}
LATE = {64: 0.1, 128: 0.2, 256: 0.4}  # share of steps that are drawn from 450 to 999, since they decide the layout
THREE_LEVELS = {
    "sample_size": 32,
    "block_out_channels": (64, 128, 192),
    "down_block_types": ("CrossAttnDownBlock2D",) * 2 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 2,
}
LEVELS = {
    64: THREE_LEVELS,
    128: THREE_LEVELS,
    256: {
        "sample_size": 64,
        "block_out_channels": (64, 64, 128, 192),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    },
}
PROMPTS = [
    "a 3d render of fox on red bricks",
    "a flat drawing of tulip on green grass",
    "a 3d render of pizza on blue waves",
    "a flat drawing of duck on purple night sky",
    "brown wood",
    "blue clouds",
    "a 3d render of owl and a flat drawing of cactus on gray gravel",
    "a 3d render of avocado on pink dots",
]

scheduler = DDIMScheduler(
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    prediction_type="v_prediction",
    clip_sample=False,
    set_alpha_to_one=False,
    steps_offset=1,
)
alphas = scheduler.alphas_cumprod
snr = alphas / (1 - alphas)


def new_unet(size):
    return UNet2DConditionModel(
        **LEVELS[size], layers_per_block=1, cross_attention_dim=192, attention_head_dim=2, norm_num_groups=32
    )


def new_text_encoder():
    config = CLIPTextConfig.from_json_file(ROOT / "examples" / "emoji_sd" / "text_encoder" / "config.json")
    config.max_position_embeddings = TOKENS
    return CLIPTextModel(config)


def weights_in(folder):
    """Weights in diffusers' format as float32."""
    return {name: x.float() for name, x in load_file(next(folder.glob("*.safetensors"))).items()}


def paddle_weights_in(folder):
    """Weights in Paddle's layout, whose linear layers are transposed, as float32."""
    state = {name: torch.from_numpy(x).float() for name, x in load_numpy(next(folder.glob("*.safetensors"))).items()}
    return {name: x.T if x.ndim == 2 and "embedding.weight" not in name else x for name, x in state.items()}


def start_from_emoji_sd(source):
    """UNet and text encoder of emoji_sd in diffusers' format at `source`."""
    unet, encoder = new_unet(128), new_text_encoder()
    unet.load_state_dict(weights_in(source / "unet"))
    state = weights_in(source / "text_encoder")
    name = next(name for name in state if name.endswith("position_embedding.weight"))
    old = state[name]
    state[name] = torch.cat([old, old[-1:].expand(TOKENS - len(old), -1)])
    encoder.load_state_dict({name: x for name, x in state.items() if "position_ids" not in name})
    return unet, encoder


@torch.no_grad()
def build_256(inner):
    """The four-level UNet: outer level from the example's, inner levels from the three-level UNet `inner`."""
    unet = new_unet(256)
    outer = paddle_weights_in(EXAMPLE / "unet")
    inner = inner.state_dict()
    new = ("conv_in", "down_blocks.0", "up_blocks.3", "up_blocks.2.upsamplers", "conv_norm_out", "conv_out")
    state = {}
    for name in unet.state_dict():
        part, number, rest = [*name.split(".", 2), ""][:3]
        if name.startswith(new):
            state[name] = outer[name]
        elif part == "down_blocks":
            state[name] = inner[f"down_blocks.{int(number) - 1}.{rest}"]
        else:
            state[name] = inner[name]
    unet.load_state_dict(state)
    return unet


def minimize(parameters, peak, steps, loss):
    optimizer = torch.optim.Adam(parameters, peak)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * (1 - step / steps)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def fit_to_inner(unet, inner, latents, texts):
    """Fit the time embedding and the first downsampler to what the inner levels saw when they were trained alone."""
    pooled = torch.tensor([(snr - 4 * one).abs().argmin() for one in snr])
    with torch.no_grad():
        target = inner.time_embedding(inner.time_proj(pooled).float())
        source = unet.time_proj(torch.arange(1000)).float()
    minimize(unet.time_embedding.parameters(), 1e-3, 1500, lambda: F.mse_loss(unet.time_embedding(source), target))
    block = unet.down_blocks[0]

    def loss():
        i, t = torch.randint(0, len(latents), (8,)), torch.randint(0, 1000, (8,))
        a = alphas[t].view(-1, 1, 1, 1)
        x = (a.sqrt() * latents[i] + (1 - a).sqrt() * torch.randn_like(latents[i]))[:, :, :32]
        with torch.no_grad():
            h = block.resnets[0](unet.conv_in(x), unet.time_embedding(unet.time_proj(t).float()))
            h = block.attentions[0](h, encoder_hidden_states=texts[i]).sample
            goal = inner.conv_in(F.avg_pool2d(x, 2) / (a + (1 - a) / 4).sqrt())
        return F.mse_loss(block.downsamplers[0](h), goal)

    minimize(block.downsamplers[0].parameters(), 2e-3, 250, loss)


class Stream:
    """Batches of (latents, token ids) of fresh scenes; each scene is used USES times, with other noise each time."""

    def __init__(self, things, vae, tokenizer, size, batch):
        self.scenes, self.vae, self.tokenizer = Scenes(things), vae, tokenizer
        self.size, self.batch = size, batch
        self.seed = FIRST_TRAINING_SEED + time.time_ns() % (1 << 39)  # a run that goes on sees other scenes
        self.latents, self.ids, self.used = None, None, 0
        for _ in range(BUFFER // batch):
            self.refill()

    @torch.no_grad()
    def refill(self):
        pairs = [self.scenes(self.seed + k, self.size) for k in range(self.batch)]
        self.seed += self.batch
        pixels = torch.from_numpy(np.stack([image for image, _ in pairs])).permute(0, 3, 1, 2)
        with torch.autocast("cpu", torch.bfloat16):
            means = self.vae.encode(pixels.float() / 127.5 - 1).latent_dist.mean
        latents, ids = means.float() * self.vae.config.scaling_factor, tokens(self.tokenizer, [c for _, c in pairs])
        if self.latents is None:
            self.latents, self.ids = latents, ids
        else:
            self.latents = torch.cat([self.latents, latents])[-BUFFER:]
            self.ids = torch.cat([self.ids, ids])[-BUFFER:]

    def __call__(self):
        self.used += 1
        if self.used % USES == 0:
            self.refill()
        i = torch.randint(0, len(self.latents), (self.batch,))
        return self.latents[i], self.ids[i]


def tokens(tokenizer, texts):
    return tokenizer(texts, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt").input_ids


def new_tokenizer():
    tokenizer = CLIPTokenizer.from_pretrained(ROOT / "examples" / "emoji_sd" / "tokenizer")
    tokenizer.model_max_length = TOKENS
    return tokenizer


@torch.no_grad()
def sample(unet, encoder, vae, tokenizer, size, prompts, steps=20, guidance=3.0):
    """One image for each prompt, uint8 [N, size, size, 3], by DDIM."""
    x = torch.randn(len(prompts), 4, size // 4, size // 4, generator=torch.Generator().manual_seed(0))
    text = encoder(tokens(tokenizer, [""] * len(prompts) + prompts))[0]
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        with torch.autocast("cpu", torch.bfloat16):
            empty, full = unet(torch.cat([x, x]), t, encoder_hidden_states=text).sample.float().chunk(2)
        x = scheduler.step(empty + guidance * (full - empty), t, x).prev_sample
    images = vae.decode(x / vae.config.scaling_factor).sample.clamp(-1, 1)
    return [(image.permute(1, 2, 0).numpy() * 127.5 + 128).clip(0, 255).astype(np.uint8) for image in images]


def write_pipeline(folder, unet, encoder, vae, tokenizer):
    """Write copies of the models in float16, in diffusers' format."""
    unet, encoder = (copy.deepcopy(model).cpu() for model in (unet, encoder))
    vae = complete(vae, vae.config.scaling_factor)
    pipe = StableDiffusionPipeline(vae, encoder, tokenizer, unet, scheduler, None, None, requires_safety_checker=False)
    pipe.to(dtype=torch.float16).save_pretrained(folder)


class Trainer:
    def __init__(self, options):
        self.size, self.folder = options.size, options.out / str(options.size)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.vae = load_vae(EXAMPLE / "vae").eval()
        self.tokenizer = new_tokenizer()
        self.stream = Stream(options.things, self.vae, self.tokenizer, self.size, BATCH[self.size])
        self.start(options)
        self.modules = torch.nn.ModuleList([self.unet, self.encoder])
        self.parameters = [p for p in self.modules.parameters() if p.requires_grad]
        self.averages = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, RATE[self.size], betas=(0.9, 0.99), weight_decay=1e-2)
        self.empty = tokens(self.tokenizer, [""])
        self.step, self.before = 0, 0.0
        if (state := self.folder / "state.pt").exists():
            kept = torch.load(state)
            self.modules.load_state_dict(kept["modules"])
            self.averages, self.step, self.before = kept["averages"], kept["step"], kept["minutes"]
            self.optimizer.load_state_dict(kept["optimizer"])

    def start(self, options):
        """Set `unet` and `encoder` from the first weights that are there, as the module says."""
        self.unet, self.encoder = new_unet(self.size), new_text_encoder()
        smaller = options.out / str(self.size // 2)
        if (self.folder / "unet").exists():
            self.unet.load_state_dict(weights_in(self.folder / "unet"))
            self.encoder.load_state_dict(weights_in(self.folder / "text_encoder"))
        elif self.size == 64:
            self.unet, self.encoder = start_from_emoji_sd(options.source)
        elif (smaller / "unet").exists():
            inner = new_unet(self.size // 2)
            inner.load_state_dict(weights_in(smaller / "unet"))
            self.encoder.load_state_dict(weights_in(smaller / "text_encoder"))
            self.unet = inner if self.size == 128 else self.grow(inner)
        elif self.size == 128:
            raise SystemExit(f"{smaller} has no UNet to start from: train with --size 64 first")
        else:
            self.encoder.load_state_dict(paddle_weights_in(EXAMPLE / "text_encoder"))
            self.unet.load_state_dict(paddle_weights_in(EXAMPLE / "unet"))

    def grow(self, inner):
        """The UNet for 256 px around the one for 128 px."""
        unet = build_256(inner)
        with torch.no_grad():
            texts = torch.cat([self.encoder(ids)[0] for ids in self.stream.ids.split(16)])
        fit_to_inner(unet, inner, self.stream.latents, texts)
        return unet

    def loss(self):
        latents, ids = self.stream()
        n = len(latents)
        ids = torch.where((torch.rand(n) < 0.1)[:, None], self.empty, ids)
        t = torch.randint(0, 1000, (n,))
        t = torch.where(torch.rand(n) < LATE[self.size], torch.randint(450, 1000, (n,)), t)
        a, noise = alphas[t].view(-1, 1, 1, 1), torch.randn_like(latents)
        velocity = a.sqrt() * noise - (1 - a).sqrt() * latents
        with torch.autocast("cpu", torch.bfloat16):
            text = self.encoder(ids)[0]
            output = self.unet(a.sqrt() * latents + (1 - a).sqrt() * noise, t, encoder_hidden_states=text).sample
        weight = snr[t].clamp(max=5) / (snr[t] + 1)  # min-SNR-5 on the velocity
        return (weight * (output.float() - velocity).square().mean((1, 2, 3))).mean() / weight.mean()

    def train(self, minutes, decay_from):
        begin = saved = time.process_time()
        losses = []
        while (passed := (time.process_time() - begin) / 60) < minutes:
            left = 1 - max(0.0, passed / minutes - decay_from) / (1 - decay_from) if decay_from < 1 else 1
            rate = RATE[self.size] * min(1, (self.step + 1) / WARM_UP) * max(left, 0.02)
            self.optimizer.param_groups[0]["lr"] = rate
            loss = self.loss()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.step += 1
            decay = min(EMA, (1 + self.step) / (10 + self.step))
            torch._foreach_mul_(self.averages, decay)
            torch._foreach_add_(self.averages, [p.detach() for p in self.parameters], alpha=1 - decay)
            losses.append(loss.item())
            if self.step % 50 == 0:
                total = self.before + passed
                print(f"step {self.step}, {total:.1f} min of CPU time, loss {np.mean(losses[-400:]):.4f}", flush=True)
            if time.process_time() - saved > 1200:
                saved = time.process_time()
                self.save(self.before + passed)
        self.save(self.before + passed)

    def save(self, minutes):
        """Write what is needed to go on, the averaged weights, and a sheet of images by them."""
        state = {"modules": self.modules.state_dict(), "averages": self.averages, "step": self.step}
        torch.save({**state, "minutes": minutes, "optimizer": self.optimizer.state_dict()}, self.folder / "state.new")
        os.replace(self.folder / "state.new", self.folder / "state.pt")
        current = [p.detach().clone() for p in self.parameters]
        self.put(self.averages)
        images = sample(self.unet, self.encoder, self.vae, self.tokenizer, self.size, PROMPTS)
        sheet(images, 4).save(self.folder / "sheet.png")
        write_pipeline(self.folder, self.unet, self.encoder, self.vae, self.tokenizer)
        self.put(current)

    @torch.no_grad()
    def put(self, values):
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("things", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("minutes", type=float, help="of CPU time")
    parser.add_argument("--size", type=int, choices=LEVELS, default=128)
    parser.add_argument("--source", type=Path, help="emoji_sd in diffusers' format, to start at 64 px")
    parser.add_argument(
        "--decay-from", type=float, default=1.0, help="share of the run after which the learning rate falls to zero"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    Trainer(options).train(options.minutes, options.decay_from)


if __name__ == "__main__":
    main()
