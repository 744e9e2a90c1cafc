"""Train scenes_sd on a GPU for minutes, in stages: three levels at 64 and 128 px, then four at 256 px.

    python train_gpu.py THINGS OUT --stages 256:170 --workers 15
    python train_gpu.py THINGS OUT --stages 64:90 128:90 256:170 --source OUT/64 --workers 15

A stage is a size and its seconds. A first stage of 256 px goes on from the weights of examples/scenes_sd, another from
--source, a folder that `train_unet.py` wrote for 64 or 128 px; each other stage starts from the one before. Worker
processes compose fresh scenes of 256 px all the time; each is encoded at all sizes, as it is and mirrored, and stays
in the GPU's memory, from which batches are drawn. OUT/SIZE is a pipeline in diffusers' format, with averaged weights
in float16, and a sheet of images.
"""

import argparse
import multiprocessing
import queue
import time
from pathlib import Path

import cv2
import numpy as np
import scenes
import torch
import torch.nn.functional as F
import train_unet as base
from train_vae import load as load_vae

FREQUENT_SHARE = 0.35  # of things; on a CPU's short training it is larger
EMA, WARM_UP, DECAY_FROM = 0.999, 100, 0.55
BATCH, RATE = {64: 512, 128: 256, 256: 64}, {64: 1e-3, 128: 8e-4, 256: 5e-4}
LATE = {64: 0.1, 128: 0.15, 256: 0.25}
CHUNK = 16  # scenes that a worker sends at once
CAPACITY, FIRST = 250_000, 4_000  # entries of the pool, two for each scene: at most, and before training starts


def compose(things, first, results):
    """The process of a worker: send scenes from number `first` on."""
    cv2.setNumThreads(1)
    is_frequent = np.array([thing in scenes.FREQUENT for thing in scenes.THINGS])
    chances = np.where(is_frequent, FREQUENT_SHARE / is_frequent.sum(), (1 - FREQUENT_SHARE) / (~is_frequent).sum())
    scenes.CHANCES = chances / chances.sum()
    make = scenes.Scenes(things)
    while True:
        pairs = [make(first + k, 256) for k in range(CHUNK)]
        first += CHUNK
        results.put((np.stack([image for image, _ in pairs]), [caption for _, caption in pairs]))


def start_workers(options):
    """The queue of what worker processes compose. They are forked, so CUDA must not have started."""
    context = multiprocessing.get_context("fork")
    results = context.Queue(maxsize=8 * options.workers)
    start = scenes.FIRST_TRAINING_SEED + time.time_ns() % (1 << 38)
    for k in range(options.workers):
        arguments = (options.things, start + k * 10_000_000, results)
        context.Process(target=compose, args=arguments, daemon=True).start()
    return results


class Pool:
    """Latents of all sizes and token ids of all scenes so far, on the device."""

    def __init__(self, results, vae, tokenizer, device):
        self.results = results
        self.vae, self.tokenizer, self.device, self.count = vae, tokenizer, device, 0
        self.latents = {
            size: torch.zeros(CAPACITY, 4, size // 4, size // 4, dtype=torch.float16, device=device) for size in BATCH
        }
        self.ids = torch.zeros(CAPACITY, base.TOKENS, dtype=torch.long, device=device)

    @torch.no_grad()
    def add(self, chunks):
        """Add what workers have sent, at most so many chunks; how many there were."""
        added = 0
        for _ in range(chunks):
            try:
                images, captions = self.results.get_nowait()
            except queue.Empty:
                break
            added += 1
            if self.count + 2 * len(images) > len(self.ids):
                continue
            pixels = torch.from_numpy(images).to(self.device).permute(0, 3, 1, 2).float() / 127.5 - 1
            pixels = torch.cat([pixels, pixels.flip(3)])
            where = slice(self.count, self.count + len(pixels))
            for size, latents in self.latents.items():
                small = F.avg_pool2d(pixels, 256 // size) if size < 256 else pixels
                with torch.autocast(self.device.type, torch.bfloat16):
                    means = self.vae.encode(small).latent_dist.mean
                latents[where] = (means.float() * self.vae.config.scaling_factor).half()
            self.ids[where] = base.tokens(self.tokenizer, captions).to(self.device).repeat(2, 1)
            self.count += len(pixels)
        return added

    def fill(self, count):
        while self.count < count:
            if not self.add(64):
                time.sleep(0.05)


@torch.no_grad()
def sample(unet, encoder, vae, tokenizer, size, device, prompts, steps=20, guidance=3.0):
    """One image for each prompt, uint8 [size, size, 3], by DDIM."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(prompts), 4, size // 4, size // 4, generator=generator).to(device)
    base.scheduler.set_timesteps(steps)
    with torch.autocast(device.type, torch.bfloat16):
        text = encoder(base.tokens(tokenizer, [""] * len(prompts) + prompts).to(device))[0]
        for t in base.scheduler.timesteps:
            times = torch.full((2 * len(x),), int(t), device=device)
            empty, full = unet(torch.cat([x, x]), times, encoder_hidden_states=text).sample.float().chunk(2)
            x = base.scheduler.step((empty + guidance * (full - empty)).cpu(), t, x.cpu()).prev_sample.to(device)
    images = vae.decode(x / vae.config.scaling_factor).sample.clamp(-1, 1).cpu()
    return [(image.permute(1, 2, 0).numpy() * 127.5 + 128).clip(0, 255).astype(np.uint8) for image in images]


def train(size, seconds, unet, encoder, pool, device):
    """Train both models in place; they end with the averaged weights."""
    modules = torch.nn.ModuleList([unet, encoder])
    parameters = [p for p in modules.parameters() if p.requires_grad]
    averages = [p.detach().clone() for p in parameters]
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(parameters, RATE[size], betas=(0.9, 0.99), weight_decay=1e-2, **fused)
    alphas, snr = base.alphas.to(device), base.snr.to(device)
    empty = base.tokens(pool.tokenizer, [""]).to(device)
    latents, batch = pool.latents[size], BATCH[size]
    begin, step, total = time.monotonic(), 0, torch.zeros((), device=device)
    while (passed := time.monotonic() - begin) < seconds:
        pool.add(3)
        left = 1 - max(0.0, passed / seconds - DECAY_FROM) / (1 - DECAY_FROM)
        optimizer.param_groups[0]["lr"] = RATE[size] * min(1, (step + 1) / WARM_UP) * max(left, 0.01)
        i = torch.randint(0, pool.count, (batch,), device=device)
        x, ids = latents[i].float(), pool.ids[i]
        ids = torch.where((torch.rand(batch, device=device) < 0.1)[:, None], empty, ids)
        t = torch.randint(0, 1000, (batch,), device=device)
        late = torch.randint(450, 1000, (batch,), device=device)
        t = torch.where(torch.rand(batch, device=device) < LATE[size], late, t)
        a, noise = alphas[t].view(-1, 1, 1, 1), torch.randn_like(x)
        velocity = a.sqrt() * noise - (1 - a).sqrt() * x
        noisy = (a.sqrt() * x + (1 - a).sqrt() * noise).to(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            output = unet(noisy, t, encoder_hidden_states=encoder(ids)[0]).sample
        weight = snr[t].clamp(max=5) / (snr[t] + 1)  # min-SNR-5 on the velocity
        loss = (weight * (output.float() - velocity).square().mean((1, 2, 3))).mean() / weight.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        torch._foreach_lerp_(averages, [p.detach() for p in parameters], 1 - min(EMA, (1 + step) / (10 + step)))
        total += loss.detach()
        if step % 100 == 0:
            speed = step * batch / (time.monotonic() - begin)
            print(f"{size} px, step {step}, {passed:.0f} s, {speed:.0f} images/s, pool {pool.count}, ", end="")
            print(f"loss {total.item() / 100:.4f}", flush=True)
            total.zero_()
    with torch.no_grad():
        torch._foreach_copy_(parameters, averages)
    print(f"{size} px: {step} steps of {batch}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("things", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stages", nargs="+", default=["256:170"])
    parser.add_argument("--source", type=Path)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    stages = [tuple(map(int, stage.split(":"))) for stage in options.stages]
    first = stages[0][0]
    if first != 256 and options.source is None:
        parser.error(f"a first stage of {first} px needs --source: a folder that train_unet.py wrote for 64 or 128 px")
    begin, device = time.monotonic(), torch.device(options.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    results = start_workers(options)
    vae = load_vae(base.EXAMPLE / "vae").eval().to(device)
    tokenizer = base.new_tokenizer()
    pool = Pool(results, vae, tokenizer, device)
    unet, encoder = base.new_unet(first), base.new_text_encoder()
    read, source = (base.paddle_weights_in, base.EXAMPLE) if first == 256 else (base.weights_in, options.source)
    unet.load_state_dict(read(source / "unet"))
    encoder.load_state_dict(read(source / "text_encoder"))
    unet, encoder = unet.to(device, memory_format=torch.channels_last), encoder.to(device)
    pool.fill(FIRST)
    print(f"pool of {pool.count} after {time.monotonic() - begin:.0f} s", flush=True)
    for size, seconds in stages:
        if size == 256 and len(unet.config.block_out_channels) == 3:
            inner, unet = unet, base.build_256(unet.cpu()).to(device)
            inner = inner.to(device)
            base.alphas, base.snr = base.alphas.to(device), base.snr.to(device)
            with torch.device(device):
                ids, latents = pool.ids[: base.BUFFER], pool.latents[256][: base.BUFFER].float()
                with torch.no_grad():
                    texts = torch.cat([encoder(some)[0] for some in ids.split(64)])
                base.fit_to_inner(unet, inner, latents, texts)
            unet = unet.to(memory_format=torch.channels_last)
            for parameter in unet.parameters():
                parameter.grad = None
            print(f"grown after {time.monotonic() - begin:.0f} s", flush=True)
        train(size, seconds, unet, encoder, pool, device)
        folder = options.out / str(size)
        base.write_pipeline(folder, unet, encoder, vae, tokenizer)
        scenes.sheet(sample(unet, encoder, vae, tokenizer, size, device, base.PROMPTS), 4).save(folder / "sheet.png")
        print(f"saved {size} px after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
