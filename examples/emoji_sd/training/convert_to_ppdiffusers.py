"""Convert the trained model from diffusers' format to ppdiffusers' format, in fp16, and check every weight.

    python convert_to_ppdiffusers.py SOURCE TARGET [--controlnet]

SOURCE is $EMOJI_WORK/model, written by train_unet.py (model_index.json, unet/, vae/, text_encoder/, scheduler/,
tokenizer/). TARGET is the folder to write, such as examples/emoji_sd. Needs ppdiffusers 0.29, but not PyTorch.
A folder controlnet/ in SOURCE or beside it, written by train_controlnet.py, is converted too; with `--controlnet`
nothing else is.

ppdiffusers converts the weights (`from_pretrained(from_diffusers=True)`, then `save_pretrained`). The script then
removes local paths, and one key that ppdiffusers warns about, from the JSON files. Finally it reads both sets of files
again: each weight must equal its source bit for bit; the weights of Linear layers are transposed, because Paddle
stores them as [in, out] and PyTorch as [out, in].
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import paddle
from ppdiffusers import ControlNetModel, StableDiffusionPipeline
from safetensors.numpy import load_file, save_file

# model -> (file in diffusers' format, file in ppdiffusers' format)
WEIGHTS = {
    "unet": ("diffusion_pytorch_model.safetensors", "diffusion_paddle_model.safetensors"),
    "vae": ("diffusion_pytorch_model.safetensors", "diffusion_paddle_model.safetensors"),
    "text_encoder": ("model.safetensors", "model.safetensors"),
}
CONTROLNET = ("diffusion_pytorch_model.safetensors", "diffusion_paddle_model.safetensors")
# file -> keys to remove; ppdiffusers 0.29's AutoencoderKL always has mid-block attention and warns about the key
DROPPED = {
    "model_index.json": ["_name_or_path"],
    "unet/config.json": ["_name_or_path"],
    "vae/config.json": ["_name_or_path", "mid_block_add_attention"],
    "tokenizer/tokenizer_config.json": ["special_tokens_map_file", "name_or_path", "max_len"],
}


def convert(source: Path, target: Path) -> None:
    """Write `source` to `target` in ppdiffusers' format."""
    with tempfile.TemporaryDirectory() as scratch:  # loading writes a converted text encoder next to the original
        copy = Path(scratch) / "model"
        copy.mkdir()
        shutil.copy(source / "model_index.json", copy)
        for part in ("scheduler", "tokenizer", *WEIGHTS):
            shutil.copytree(source / part, copy / part, ignore=shutil.ignore_patterns("*.pdparams"))
        pipe = StableDiffusionPipeline.from_pretrained(
            str(copy),
            from_diffusers=True,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
            paddle_dtype=paddle.float32,
        )
        pipe.to(dtype=paddle.float16)
        pipe.save_pretrained(str(target), safe_serialization=True, to_diffusers=False)
    for name, keys in DROPPED.items():
        drop(target / name, keys)


def convert_controlnet(source: Path, target: Path) -> None:
    """Write the ControlNet of folder `source` to folder `target` in ppdiffusers' format.

    Its weights are in fp32. NumPy rounds them to the nearest fp16; Paddle's cast on a CPU does not.
    """
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(source, Path(scratch) / "controlnet")
        weights = {name: weight.astype(np.float16) for name, weight in load_file(str(copy / CONTROLNET[0])).items()}
        save_file(weights, str(copy / CONTROLNET[0]), {"format": "pt"})
        model = ControlNetModel.from_pretrained(str(copy), from_diffusers=True, paddle_dtype=paddle.float32)
        model.to(dtype=paddle.float16)
        model.save_pretrained(str(target), safe_serialization=True, to_diffusers=False)
    drop(target / "config.json", ["_name_or_path"])


def drop(path: Path, keys: list) -> None:
    config = json.loads(path.read_text())
    config = {k: v for k, v in config.items() if k not in keys}
    path.write_text(json.dumps(config, indent=2) + "\n")


def check(source: Path, target: Path) -> None:
    """Compare the weights of `source` and `target`; raise SystemExit at the first that differs."""
    pipe = StableDiffusionPipeline.from_pretrained(str(target), paddle_dtype=paddle.float32)
    for name, (source_file, target_file) in WEIGHTS.items():
        compare(name, getattr(pipe, name), source / name / source_file, target / name / target_file)


def check_controlnet(source: Path, target: Path) -> None:
    model = ControlNetModel.from_pretrained(str(target), paddle_dtype=paddle.float32)
    compare("controlnet", model, source / CONTROLNET[0], target / CONTROLNET[1])


def compare(model_name: str, model, source_file: Path, target_file: Path) -> None:
    """Compare each weight of `source_file`, as fp16, with `target_file` and with the model loaded from that."""
    layers = model.named_sublayers()
    linear = {f"{name}.weight" for name, layer in layers if isinstance(layer, paddle.nn.Linear)}
    source, target, loaded = load_file(str(source_file)), load_file(str(target_file)), model.state_dict()
    if source.keys() != target.keys():
        raise SystemExit(f"{model_name}: names differ: {sorted(source.keys() ^ target.keys())}")
    for name, weight in source.items():
        expected = (weight.T if name in linear else weight).astype(np.float16)
        if expected.dtype != target[name].dtype or not np.array_equal(expected, target[name]):
            raise SystemExit(f"{model_name}: {name} differs")
        if not np.array_equal(expected.astype(np.float32), loaded[name].numpy()):
            raise SystemExit(f"{model_name}: {name} differs after loading")
    count = sum(weight.size for weight in source.values())
    print(f"{model_name}: {len(source)} tensors, {count:,} numbers, {len(linear)} transposed, all equal")


def find_controlnet(source: Path) -> Path | None:
    """The folder of a trained ControlNet, in `source` or beside it."""
    folders = (source / "controlnet", source.parent / "controlnet")
    return next((folder for folder in folders if (folder / CONTROLNET[0]).exists()), None)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["--controlnet"]):
        raise SystemExit(__doc__)
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    if len(sys.argv) == 3:
        convert(source, target)
        check(source, target)
    if folder := find_controlnet(source):
        convert_controlnet(folder, target / "controlnet")
        check_controlnet(folder, target / "controlnet")
