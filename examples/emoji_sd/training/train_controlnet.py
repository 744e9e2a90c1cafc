"""Train emoji_sd's Canny ControlNet; UNet and text encoder are frozen.

    python train_controlnet.py MINUTES PEAK_LR FINAL_LR BATCH

Starts from $EMOJI_WORK/controlnet if that exists, otherwise from the UNet's weights, resumes from controlnet.pt after
an interruption, and writes the averaged weights to $EMOJI_WORK/controlnet. Needs $EMOJI_WORK/model (diffusers'
format), and data_128.npz and captions.json from `make_dataset.py 128`.

Two processes with one thread each share every batch: on two cores this is 1.4 times as fast as one process with two
threads, and less sensitive to other programs.

So that the model follows edges instead of recalling images:
- each image is randomly moved, scaled, stretched, sheared, rotated, mirrored and bent; each variation is used at most
  twice, with different noise;
- a third of the images show concepts that the UNet was not trained on, and many come without their caption;
- noisy steps, which decide the layout, are more frequent, and the loss near an edge has a higher weight.

Excluded: the concepts of held_out.txt in any style, and Noto's drawings ("a cartoon of ...") of all concepts.
"""

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import cv2
import edges as edge
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    StableDiffusionControlNetPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from transformers import CLIPTextModel, CLIPTokenizer

HERE, WORK = Path(__file__).resolve().parent, Path(os.environ.get("EMOJI_WORK", "work"))

MODEL, OUT, CHECKPOINT = WORK / "model", WORK / "controlnet", WORK / "controlnet.pt"
DROPPED = 0.4  # share of captions replaced by ""
UNTRAINED = 0.35  # share of images of concepts that the UNet was not trained on
NOISY = 0.6  # share of steps drawn from the noisier 600 of the 1,000; the others are drawn from all
EDGE_WEIGHT = 1.0  # added weight of the loss of latents near an edge
ROUND, PASSES = 256, 2  # variations are made ROUND at a time; each is used PASSES times, with different noise
EMA = 0.998
SAVE_EVERY, SAMPLE_EVERY = 240, 1200  # seconds
PROCESSES = 2


def read_images():
    """Indices of images with concepts that the UNet knows, with others, of samples; all images; all captions."""
    rows = json.loads((WORK / "captions.json").read_text())
    trained, held_out = ((HERE / name).read_text().split() for name in ("concepts.txt", "held_out.txt"))
    flat = [i for i, row in enumerate(rows) if not row["caption"].startswith("a cartoon")]
    known = [i for i in flat if rows[i]["concept"] in trained]
    other = [i for i in flat if rows[i]["concept"] not in trained + held_out]
    unseen = [i for i in flat if rows[i]["concept"] in held_out][::16]
    unseen += [i for i, row in enumerate(rows) if i not in flat and row["concept"] in trained][::22]
    return known, other, unseen, np.load(WORK / "data_128.npz")["x"], [row["caption"] for row in rows]


def vary(image, rng):
    """The image under a random affine map and a slight bend, on white."""
    size = len(image)
    turn, shear = rng.normal(0, 0.15), rng.normal(0, 0.1)
    scale = rng.uniform(0.55, 1.1) * np.exp(rng.normal(0, 0.12, 2))
    turned = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    affine = turned @ np.array([[1, shear], [0, 1]]) @ np.diag(scale * [rng.choice([-1, 1]), 1])
    y, x = np.mgrid[:size, :size].astype(np.float32) - (size - 1) / 2
    bend = [cv2.resize(rng.normal(0, 4, (4, 4)).astype(np.float32), (size, size), interpolation=cv2.INTER_CUBIC)]
    bend += [cv2.resize(rng.normal(0, 4, (4, 4)).astype(np.float32), (size, size), interpolation=cv2.INTER_CUBIC)]
    dx, dy = rng.uniform(-14, 14, 2)
    back = np.linalg.inv(affine)
    maps = [back[i, 0] * (x - dx) + back[i, 1] * (y - dy) + bend[i] + (size - 1) / 2 for i in (0, 1)]
    maps = [m.astype(np.float32) for m in maps]
    return cv2.remap(image, *maps, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT, borderValue=(255, 255, 255))


def variations(known, other, images, vae, rng):
    """Yield latents, edges and index of the caption, without end."""
    while True:
        index = np.where(rng.random(ROUND) < UNTRAINED, rng.choice(other, ROUND), rng.choice(known, ROUND))
        varied = np.stack([vary(images[i], rng) for i in index])
        edges = torch.from_numpy(np.stack([edge.canny(image) for image in varied]))[:, None].float()
        x = torch.from_numpy(varied).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            z = torch.cat([vae.encode(part).latent_dist.mean for part in x.split(32)]).float()
        for _ in range(PASSES):
            for i in rng.permutation(ROUND):
                yield z[i] * vae.config.scaling_factor, edges[i], index[i]


def make_controlnet(unet):
    """The ControlNet in OUT, or a new one with the UNet's encoder."""
    if (OUT / "config.json").exists():
        return ControlNetModel.from_pretrained(OUT, torch_dtype=torch.float32)
    controlnet = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32, 64))
    return controlnet.requires_grad_(True)


class Trainer:
    def __init__(self, minutes, peak, final, batch):
        self.minutes, self.peak, self.final, self.batch = minutes, peak, final, batch // PROCESSES
        self.first = dist.get_rank() == 0
        known, other, self.unseen, self.images, self.captions = read_images()
        self.log(f"{len(known)} images of concepts that the UNet knows, {len(other)} of others")
        self.tokenizer = CLIPTokenizer.from_pretrained(MODEL, subfolder="tokenizer")
        parts = {"text_encoder": CLIPTextModel, "unet": UNet2DConditionModel, "vae": AutoencoderKL}
        for name, kind in parts.items():
            part = kind.from_pretrained(MODEL, subfolder=name, torch_dtype=torch.float32)
            setattr(self, name, part.eval().requires_grad_(False))
        self.scheduler = DDIMScheduler.from_pretrained(MODEL, subfolder="scheduler")
        with torch.no_grad():
            ids = self.tokenizer(["", *self.captions], padding="max_length", max_length=24, truncation=True)
            self.text = self.text_encoder(torch.tensor(ids.input_ids))[0]  # row 0: no caption
        self.controlnet = make_controlnet(self.unet).train()
        self.params = list(self.controlnet.parameters())
        self.ema = [p.detach().clone() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=peak, betas=(0.9, 0.99), weight_decay=1e-2, fused=True)
        self.step = self.seconds = 0
        if CHECKPOINT.exists():
            state = torch.load(CHECKPOINT)
            self.controlnet.load_state_dict(state["controlnet"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.ema, self.step, self.seconds = state["ema"], state["step"], state["seconds"]
            self.log(f"resumes at step {self.step}")
        torch.manual_seed(PROCESSES * self.step + dist.get_rank())
        rng = np.random.default_rng((self.step, dist.get_rank()))
        self.source = variations(known, other, self.images, self.vae, rng)

    def log(self, line):
        if self.first:
            print(line, flush=True)

    def learning_rate(self):
        part = min(self.seconds / 60 / self.minutes, 1)
        return (self.final + (self.peak - self.final) * (1 + math.cos(math.pi * part)) / 2) * min(1, self.step / 100)

    def loss(self):
        z, edges, index = zip(*(next(self.source) for _ in range(self.batch)), strict=True)
        z, edges, index = torch.stack(z), torch.stack(edges), torch.tensor(np.array(index)) + 1
        text = self.text[torch.where(torch.rand(self.batch) < DROPPED, 0, index)]
        t = torch.where(torch.rand(self.batch) < NOISY, 400, 0)
        t = t + (torch.rand(self.batch) * (1000 - t)).long()
        noise = torch.randn_like(z)
        noisy = self.scheduler.add_noise(z, noise, t)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            down, mid = self.controlnet(noisy, t, text, edges.repeat(1, 3, 1, 1), return_dict=False)
            v = self.unet(
                noisy, t, text, down_block_additional_residuals=down, mid_block_additional_residual=mid
            ).sample
        near = 1 + EDGE_WEIGHT * F.max_pool2d(edges, 4)
        square = (v.float() - self.scheduler.get_velocity(z, noise, t)).square()
        return (near * square).sum() / (near.sum() * z.shape[1])

    def share(self, loss, seconds):
        """Average gradients and loss over the processes, and broadcast the clock of the first."""
        parts = [p.grad for p in self.params] + [loss.detach(), torch.tensor(seconds * self.first * PROCESSES)]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat)
        for part, mean in zip(parts, (flat / PROCESSES).split([part.numel() for part in parts]), strict=True):
            part.copy_(mean.view_as(part))
        return parts[-2].item(), parts[-1].item()

    def train(self):
        losses, begin, saved, sampled = [], time.time() - self.seconds, time.time(), time.time()
        while self.seconds < 60 * self.minutes:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            loss = self.loss()
            self.optimizer.zero_grad()
            loss.backward()
            mean, self.seconds = self.share(loss, time.time() - begin)
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
            self.optimizer.step()
            self.step += 1
            keep = min(EMA, (1 + self.step) / (10 + self.step))
            torch._foreach_mul_(self.ema, keep)
            torch._foreach_add_(self.ema, [p.detach() for p in self.params], alpha=1 - keep)
            losses.append(mean)
            if self.step % 100 == 0:
                mean, rate = np.mean(losses[-100:]), self.learning_rate()
                self.log(f"step {self.step} {self.seconds / 60:.1f} min loss {mean:.4f} lr {rate:.1e}")
            if self.first and time.time() - saved > SAVE_EVERY:
                self.save()
                saved = time.time()
            if self.first and time.time() - sampled > SAMPLE_EVERY:
                self.sample()
                sampled = time.time()
        if self.first:
            self.save()
            self.sample()
            print("done", self.step)

    def save(self):
        state = {"controlnet": self.controlnet.state_dict(), "optimizer": self.optimizer.state_dict(), "ema": self.ema}
        torch.save({**state, "step": self.step, "seconds": self.seconds}, CHECKPOINT.with_suffix(".tmp"))
        CHECKPOINT.with_suffix(".tmp").replace(CHECKPOINT)

    def sample(self):
        """Write the averaged weights to OUT and generate images from the edges of unseen ones."""
        current = [p.detach().clone() for p in self.params]
        for p, mean in zip(self.params, self.ema, strict=True):
            p.data.copy_(mean)
        self.controlnet.save_pretrained(OUT)
        pipe = StableDiffusionControlNetPipeline(
            vae=self.vae,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            unet=self.unet,
            controlnet=self.controlnet.eval(),
            scheduler=self.scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipe.set_progress_bar_config(disable=True)
        edges = [edge.as_image(edge.canny(self.images[i])) for i in self.unseen]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = pipe(
                [self.captions[i].replace("a cartoon of", "a flat drawing of") for i in self.unseen],
                image=edges,
                num_inference_steps=10,
                guidance_scale=2.0,
                generator=torch.Generator().manual_seed(0),
            ).images
        rows = [np.concatenate([np.asarray(image) for image in row], 1) for row in (edges, outputs)]
        Image.fromarray(np.concatenate(rows)).save(WORK / f"controlnet_{self.step}.png")
        for p, value in zip(self.params, current, strict=True):
            p.data.copy_(value)
        self.controlnet.train()


def work(rank, meeting, minutes, peak, final, batch):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=PROCESSES)
    Trainer(float(minutes), float(peak), float(final), int(batch)).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (f"{folder}/meeting", *sys.argv[1:]), nprocs=PROCESSES)
