"""Generate with exported programs in ONNX Runtime alone, without Paddle; writes onnx_without_paddle.png.

python -m ppdiffusers_tome export --model examples/emoji_sd --ratio 0.75 --format onnx --output build/onnx
pip install onnxruntime numpy pillow tokenizers                      # on the machine without Paddle
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

FOLDER, PROMPT, STEPS, GUIDANCE_SCALE = Path("build/onnx"), "a 3d render of fox", 20, 2.0

names = "tome", "vae_decoder/config", "tokenizer/tokenizer_config", "scheduler/scheduler_config"
tome, vae, clip, ddim = (json.loads((FOLDER / f"{name}.json").read_text()) for name in names)
# Of several programs of a model, the first one: of the first size and ratio.
files = {program["model"]: str(FOLDER / program["files"]["onnx"]["program"]) for program in reversed(tome["programs"])}
onnxruntime.set_default_logger_severity(3)  # errors alone
models_to_run = ("text_encoder", "unet", "vae_decoder")
text_encoder, unet, decoder = (onnxruntime.InferenceSession(files[model]) for model in models_to_run)

# CLIP's byte pair encoding of the empty prompt and of the prompt
bpe = models.BPE.from_file(*(str(FOLDER / "tokenizer" / name) for name in ("vocab.json", "merges.txt")))
bpe.end_of_word_suffix = "</w>"
words = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
split = pre_tokenizers.Split(words, behavior="removed", invert=True)
tokenizer = Tokenizer(bpe)
tokenizer.normalizer = normalizers.Lowercase()
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
begin, end, pad = (tokenizer.token_to_id(clip[name]) for name in ("bos_token", "eos_token", "pad_token"))
length = clip["model_max_length"]
rows = [[begin, *tokenizer.encode(text).ids[: length - 2], end] for text in ("", PROMPT)]
ids = np.array([row + [pad] * (length - len(row)) for row in rows])
text = text_encoder.run(None, {"input_ids": ids})[0]

# DDIM (arXiv:2010.02502) with v-prediction, as the bundled models have it
if (ddim["_class_name"], ddim["prediction_type"]) != ("DDIMScheduler", "v_prediction"):
    raise SystemExit(f"{FOLDER} needs another scheduler: {ddim['_class_name']} with {ddim['prediction_type']}")
betas = np.linspace(ddim["beta_start"] ** 0.5, ddim["beta_end"] ** 0.5, ddim["num_train_timesteps"]) ** 2
alphas, stride = np.cumprod(1 - betas), ddim["num_train_timesteps"] // STEPS
height, width = (side // tome["vae_factor"] for side in tome["sizes"][0])
latents = np.random.RandomState(0).standard_normal((1, vae["latent_channels"], height, width)).astype("float32")
for t in reversed(range(ddim["steps_offset"], ddim["num_train_timesteps"], stride)):
    inputs = {"sample": np.repeat(latents, 2, axis=0), "timestep": np.float32([t]), "encoder_hidden_states": text}
    without, with_prompt = np.split(unet.run(None, inputs)[0], 2)
    v, now, then = without + GUIDANCE_SCALE * (with_prompt - without), alphas[t], alphas[max(t - stride, 0)]
    image, noise = now**0.5 * latents - (1 - now) ** 0.5 * v, now**0.5 * v + (1 - now) ** 0.5 * latents
    latents = (then**0.5 * image + (1 - then) ** 0.5 * noise).astype("float32")

pixels = decoder.run(None, {"latent_sample": latents / np.float32(vae["scaling_factor"])})[0][0]
image = np.clip(127.5 * pixels + 127.5, 0, 255).round().astype("uint8").transpose(1, 2, 0)
Image.fromarray(image).save("onnx_without_paddle.png")
print("wrote onnx_without_paddle.png")
