"""Turn the trained model from diffusers' layout into ppdiffusers' layout, in fp16, and check every weight.

    python convert_to_ppdiffusers.py SOURCE TARGET [--controlnet]

SOURCE is what train_unet.py leaves in $EMOJI_WORK/model (model_index.json, unet/, vae/, text_encoder/, scheduler/,
tokenizer/); TARGET is the folder to fill, for instance examples/emoji_sd. Needs ppdiffusers 0.29 and no PyTorch.
A folder controlnet/ beside SOURCE or in it, as train_controlnet.py leaves it, is converted too;
`--controlnet` converts nothing else.

The work is ppdiffusers' own (`from_pretrained(from_diffusers=True)`, then `save_pretrained`). On top of that the
script removes from the JSON files what only held on the machine that converted (paths) and the one key ppdiffusers
would warn about, and then reads both sets of files again: a weight must equal its source bit for bit, a Linear's
weight transposed, because Paddle stores it as [in, out] and PyTorch as [out, in].
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

# part -> (file in diffusers' layout, file in ppdiffusers' layout)
WEIGHTS = {
    "unet": ("diffusion_pytorch_model.safetensors", "diffusion_paddle_model.safetensors"),
    "vae": ("diffusion_pytorch_model.safetensors", "diffusion_paddle_model.safetensors"),
    "text_encoder": ("model.safetensors", "model.safetensors"),
}
CONTROLNET = ("diffusion_pytorch_model.safetensors", "diffusion_paddle_model.safetensors")
# file -> keys to drop; ppdiffusers 0.29's AutoencoderKL always has that attention and warns about the key
DROPPED = {
    "model_index.json": ["_name_or_path"],
    "unet/config.json": ["_name_or_path"],
    "vae/config.json": ["_name_or_path", "mid_block_add_attention"],
    "tokenizer/tokenizer_config.json": ["special_tokens_map_file", "name_or_path", "max_len"],
}


def convert(source: Path, target: Path) -> None:
    """Write `source` to `target` in ppdiffusers' layout."""
    with tempfile.TemporaryDirectory() as scratch:  # loading leaves a converted text encoder next to the original
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
    """Write the ControlNet of folder `source` to folder `target` in ppdiffusers' layout.

    Its weights come in fp32. NumPy rounds them to the nearest fp16, which Paddle's cast on a CPU does not.
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
    for part, (theirs, ours) in WEIGHTS.items():
        compare(part, getattr(pipe, part), source / part / theirs, target / part / ours)


def check_controlnet(source: Path, target: Path) -> None:
    model = ControlNetModel.from_pretrained(str(target), paddle_dtype=paddle.float32)
    compare("controlnet", model, source / CONTROLNET[0], target / CONTROLNET[1])


def compare(part: str, model, theirs: Path, ours: Path) -> None:
    """Each weight of file `theirs`, as fp16, with file `ours` and with the model loaded from it."""
    layers = model.named_sublayers()
    linear = {f"{name}.weight" for name, layer in layers if isinstance(layer, paddle.nn.Linear)}
    a, b, live = load_file(str(theirs)), load_file(str(ours)), model.state_dict()
    if a.keys() != b.keys():
        raise SystemExit(f"{part}: other names: {sorted(a.keys() ^ b.keys())}")
    for name, weight in a.items():
        want = (weight.T if name in linear else weight).astype(np.float16)
        if want.dtype != b[name].dtype or not np.array_equal(want, b[name]):
            raise SystemExit(f"{part}: {name} differs")
        if not np.array_equal(want.astype(np.float32), live[name].numpy()):
            raise SystemExit(f"{part}: {name} differs after loading")
    count = sum(w.size for w in a.values())
    print(f"{part}: {len(a)} tensors, {count:,} numbers, {len(linear)} transposed, all equal")


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
