"""Generate an image with a folder that was exported as ONNX, in ONNX Runtime alone: no Paddle, no ppdiffusers.

python -m ppdiffusers_tome export --model examples/emoji_sd --output build/onnx --ratio 0.5 0 --format onnx
pip install onnxruntime numpy pillow tokenizers                      # on the machine without Paddle
python examples/onnx_without_paddle.py build/onnx "a 3d render of fox"

For Stable Diffusion with a DDIM scheduler; to use another scheduler, replace `ddim` by one of diffusers.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"  # CLIP's


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="written by `python -m ppdiffusers_tome export --format onnx`")
    add("prompt")
    add("--negative-prompt", default="")
    add("--ratio", type=float, help="one of the exported ratios (default: the first)")
    add("--steps", type=int, default=20)
    add("--guidance-scale", type=float, default=2.0)
    add("--seed", type=int, default=0, help="of the noise")
    add("--threads", type=int, default=0, help="CPU threads (default: all cores)")
    add("--output", type=Path, default=Path("outputs/onnx_without_paddle.png"), help="PNG file, or a folder")
    args = parser.parse_args(argv)
    if args.output.is_dir():
        args.output /= "onnx_without_paddle.png"
    elif args.output.suffix != ".png":
        parser.error(f"--output {args.output} is not allowed: it must be a folder that exists, or end in .png.")
    if not (args.folder / "onnx").is_dir():
        parser.error(f"{args.folder} has no ONNX programs: export them with --format onnx.")
    tome = read_json(args.folder / "tome.json")
    height, width = tome["sizes"][0]
    ratio = tome["ratios"][0] if args.ratio is None else args.ratio
    if ratio not in tome["ratios"]:
        parser.error(f"--ratio {ratio} was not exported, only {tome['ratios']}")
    channels = read_json(args.folder / "vae_decoder" / "config.json")["latent_channels"]
    size = (1, channels, height // tome["vae_factor"], width // tome["vae_factor"])
    noise = np.random.RandomState(args.seed).standard_normal(size).astype("float32")
    pixels = generate(
        args.folder, args.prompt, args.negative_prompt, noise, ratio, args.steps, args.guidance_scale, args.threads
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((255 * pixels).round().astype("uint8")).save(args.output)
    print(f"wrote {args.output}: {width}x{height}, ratio {ratio:g}, {args.steps} steps")


def generate(
    folder: Path,
    prompt: str,
    negative_prompt: str,
    noise: np.ndarray,  # [1, C, h, w]
    ratio: float,
    steps: int,
    guidance_scale: float,
    threads: int = 0,
) -> np.ndarray:  # [H, W, 3], from 0 to 1
    """One image, as `StableDiffusionPipeline` computes it from these latents."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads  # 0: all cores

    def load(model: str, ratio: float | None = None) -> onnxruntime.InferenceSession:
        for file in read_json(folder / "tome.json")["programs"]:  # the first exported size comes first
            if (file["model"], file["ratio"]) == (model, ratio):
                path = str(folder / file["onnx"])
                return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        raise SystemExit(f"{folder} has no {model} at ratio {ratio}")

    ids = tokenize(folder / "tokenizer", [negative_prompt, prompt])
    text = load("text_encoder").run(None, {"input_ids": ids})[0]
    unet, latents = load("unet", ratio), noise
    for timestep, step in ddim(read_json(folder / "scheduler" / "scheduler_config.json"), steps):
        inputs = {"sample": np.repeat(latents, 2, axis=0), "timestep": np.array([timestep], "float32")}
        without, with_prompt = np.split(unet.run(None, {**inputs, "encoder_hidden_states": text})[0], 2)
        latents = step(without + guidance_scale * (with_prompt - without), latents)
    scale = read_json(folder / "vae_decoder" / "config.json")["scaling_factor"]
    image = load("vae_decoder").run(None, {"latent_sample": (latents / scale).astype("float32")})[0]
    return (image[0] / 2 + 0.5).clip(0, 1).transpose(1, 2, 0)


def tokenize(folder: Path, texts: list[str]) -> np.ndarray:  # [B, T] int64
    """The token numbers of texts, padded to the text encoder's length, by CLIP's byte pair encoding."""
    config = read_json(folder / "tokenizer_config.json")
    vocabulary, length = read_json(folder / "vocab.json"), config["model_max_length"]
    merges = [tuple(line.split()) for line in (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>", unk_token=config["unk_token"]))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    split = pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    begin, end, pad = (vocabulary[config[name]] for name in ("bos_token", "eos_token", "pad_token"))
    rows = [[begin, *tokenizer.encode(text).ids[: length - 2], end] for text in texts]
    return np.array([row + [pad] * (length - len(row)) for row in rows], "int64")


def ddim(config: dict, steps: int) -> Iterator:
    """The timesteps of DDIM (arXiv:2010.02502, without noise), each with a function from prediction to latents."""
    if config["_class_name"] != "DDIMScheduler" or config["beta_schedule"] != "scaled_linear":
        raise SystemExit(f"{config['_class_name']} with {config['beta_schedule']} betas is not part of this example")
    betas = np.linspace(config["beta_start"] ** 0.5, config["beta_end"] ** 0.5, config["num_train_timesteps"]) ** 2
    alphas = np.cumprod(1 - betas)
    stride = config["num_train_timesteps"] // steps
    for timestep in (np.arange(steps)[::-1] * stride + config["steps_offset"]).tolist():
        earlier = timestep - stride
        last = 1.0 if config["set_alpha_to_one"] else alphas[0]
        now, then = alphas[timestep], alphas[earlier] if earlier >= 0 else last

        def step(prediction, latents, now=now, then=then):
            if config["prediction_type"] == "v_prediction":
                image = now**0.5 * latents - (1 - now) ** 0.5 * prediction
                noise = now**0.5 * prediction + (1 - now) ** 0.5 * latents
            else:
                image, noise = (latents - (1 - now) ** 0.5 * prediction) / now**0.5, prediction
            if config["clip_sample"]:
                image = image.clip(-config["clip_sample_range"], config["clip_sample_range"])
                noise = (latents - now**0.5 * image) / (1 - now) ** 0.5
            return (then**0.5 * image + (1 - then) ** 0.5 * noise).astype("float32")

        yield timestep, step


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
