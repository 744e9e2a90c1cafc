"""`merge-onnx` on UNets that PyTorch has exported equals merging in ppdiffusers: run by `make test-optimum`.

PyTorch is in an environment of its own, whose interpreter is OPTIMUM_PYTHON; without it these tests are skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import paddle
import pytest
from zoo.parts import SDXL, unet

PYTHON = os.environ.get("OPTIMUM_PYTHON")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs PyTorch in an environment of its own: make test-optimum"),
    pytest.mark.timeout(1200),
]
TIMESTEPS = (951, 501, 481, 51, 1)  # the first and the one before the last keep all tokens
LATENTS = [16, 24]
OTHERS = [[20, 12], [12, 28]]  # sizes of models whose height and width are free
ADDED = {"text_embeds": 32, "time_ids": 6}  # of the tiny SDXL
OPTIONS = ["--ratio", "0.75", "--max-downsample", "2"]


def model(exporter, free, **others):
    return {"exporter": exporter, "free": free, "latents": LATENTS, **others}


MODELS = {
    "stable_diffusion": {
        "legacy": model("legacy", False, int8=True),
        "legacy_free": model("legacy", True),
        "legacy_step_by_step": model("legacy", False, processor="step by step"),
        "legacy_half": model("legacy", True, dtype="float16"),
        "dynamo": model("dynamo", False),
        "dynamo_free": model("dynamo", True),
    },
    "sdxl": {"legacy_free": model("legacy", True), "dynamo": model("dynamo", False)},
}


def layer_of(family):
    paddle.seed(0)
    return unet(**(SDXL if family == "sdxl" else {}))


@pytest.fixture(scope="module", params=MODELS)
def outputs(request, tmp_path_factory):
    """A family, and the outputs of its merged models by name, height, width, timestep and runtime."""
    family, root = request.param, tmp_path_factory.mktemp(request.param)
    layer_of(family).save_pretrained(str(root / "unet"), to_diffusers=True)
    calls = [[*size, timestep] for size in (LATENTS, *OTHERS) for timestep in TIMESTEPS]
    added = ADDED if family == "sdxl" else {}
    content = {"models": MODELS[family], "options": OPTIONS, "calls": calls, "added": added}
    (root / "job.json").write_text(json.dumps(content))
    script = Path(__file__).with_name("pytorch_unet.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [PYTHON, script, root / "unet", root / "job.json", root], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    with np.load(root / "outputs.npz") as arrays:
        return family, dict(arrays)


def eager(family, height, width, timestep):
    """What our own export computes, which is compared with eager mode when it is made."""
    layer = layer_of(family)
    layer.apply_tome(ratio=0.75, max_downsample=2)
    random = np.random.RandomState(timestep)
    shapes = {"sample": (2, 4, height, width), "encoder_hidden_states": (2, 7, layer.config.cross_attention_dim)}
    shapes |= {name: (2, size) for name, size in (ADDED if family == "sdxl" else {}).items()}
    inputs = {
        name: paddle.to_tensor(random.standard_normal(shape).astype("float32")) for name, shape in shapes.items()
    }
    added = {name: inputs.pop(name) for name in ADDED if name in inputs} or None
    with paddle.no_grad():
        return layer(**inputs, timestep=timestep, added_cond_kwargs=added, return_dict=False)[0].numpy()


def test_merged_models_equal_merging_in_ppdiffusers(outputs):
    """In each exporter, at fixed and free sizes, in both runtimes."""
    family, arrays = outputs
    expected, sizes = {}, set()
    for name, actual in arrays.items():
        model_name, *numbers, runtime = name.split()
        place = tuple(map(int, numbers))
        if place not in expected:
            expected[place] = eager(family, *place)
        scale = np.abs(expected[place]).max()
        difference = np.abs(actual - expected[place]).max() / scale
        half, is_int8 = "half" in model_name, runtime == "int8"
        assert difference < (0.2 if is_int8 else 2e-2 if half else 1e-5), (name, difference)
        sizes.add((model_name, place[:2]))
    assert len(sizes) == sum(3 if one["free"] else 1 for one in MODELS[family].values())
