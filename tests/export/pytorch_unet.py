"""Export a UNet by PyTorch, merge it by `merge-onnx`, and run both: run by `test_merge_onnx_pytorch.py`.

pytorch_unet.py UNET JOB OUTPUT runs in the environment of `make test-optimum`, which has no Paddle. UNET is a folder
of diffusers, JOB a JSON file (see `main`), OUTPUT a folder, which gets the models and `outputs.npz`.
"""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import openvino
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor

ROOT = Path(__file__).parents[2]
NAMES = ["sample", "timestep", "encoder_hidden_states"]
TEXT = 7  # tokens


class Sample(torch.nn.Module):
    """The UNet's output alone, with its inputs by position."""

    def __init__(self, unet, added):
        super().__init__()
        self.unet, self.added = unet, added

    def forward(self, sample, timestep, encoder_hidden_states, *added):
        named = dict(zip(self.added, added, strict=True)) or None
        return self.unet(sample, timestep, encoder_hidden_states, added_cond_kwargs=named, return_dict=False)[0]


def export(unet, path, *, exporter, latents, is_free, added):
    """Write a UNet as ONNX with fixed or free height and width; batch and text length are free."""
    dtype = unet.dtype
    inputs = [torch.randn(2, 4, *latents, dtype=dtype), torch.tensor(5)]
    inputs += [torch.randn(2, TEXT, unet.config.cross_attention_dim, dtype=dtype)]
    inputs += [torch.randn(2, size, dtype=dtype) for size in added.values()]
    names, module = [*NAMES, *added], Sample(unet, list(added))
    free = {0: "batch_size", **({2: "height", 3: "width"} if is_free else {})}
    axes = {"sample": free, "encoder_hidden_states": {0: "batch_size", 1: "sequence_length"}}
    axes |= {name: {0: "batch_size"} for name in added}
    options = {"input_names": names, "output_names": ["out_sample"]}
    if exporter == "dynamo":
        auto = torch.export.Dim.AUTO
        shapes = [None if name not in axes else dict.fromkeys(axes[name], auto) for name in names]
        dynamic = (*shapes[:3], *([tuple(shapes[3:])] if added else []))
        torch.onnx.export(module, tuple(inputs), str(path), dynamo=True, dynamic_shapes=dynamic, **options)
    else:
        torch.onnx.export(
            module, tuple(inputs), str(path), dynamo=False, dynamic_axes=axes, opset_version=17, **options
        )


def run_in_onnxruntime(path, inputs):
    return onnxruntime.InferenceSession(str(path)).run(None, inputs)[0]


def run_in_openvino(path, inputs):
    model = openvino.Core().read_model(str(path))
    return openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(inputs)[0]


RUNTIMES = {"onnxruntime": run_in_onnxruntime, "openvino": run_in_openvino}


def main(unet: str, job: str, output: str) -> None:
    """Export, merge and run the models of a job.

    A job has `models` (name → `exporter`, `latents`, `free`, `dtype`, `processor`, `int8`), `options` of merge-onnx,
    `calls` (lists of height, width and timestep) and `added` (name → size of SDXL's further inputs).
    """
    warnings.simplefilter("ignore")
    content, outputs = json.loads(Path(job).read_text()), {}
    for name, model in content["models"].items():
        layer = UNet2DConditionModel.from_pretrained(unet, torch_dtype=getattr(torch, model.get("dtype", "float32")))
        if model.get("processor") == "step by step":
            layer.set_attn_processor(AttnProcessor())
        folder = Path(output, name)
        folder.mkdir()
        export(
            layer.eval(),
            folder / "model.onnx",
            exporter=model["exporter"],
            latents=model["latents"],
            is_free=model["free"],
            added=content["added"],
        )
        merged = Path(output, f"{name}_merged")
        command = [
            sys.executable,
            "-m",
            "ppdiffusers_tome",
            "merge-onnx",
            "--model",
            str(folder),
            "--output",
            str(merged),
        ]
        subprocess.run([*command, *content["options"]], check=True, cwd=ROOT)
        if model.get("int8"):
            from onnxruntime.quantization import quantize_dynamic

            quantize_dynamic(str(merged / "model.onnx"), str(merged / "int8.onnx"))
        for height, width, timestep in content["calls"]:
            if not model["free"] and [height, width] != model["latents"]:
                continue
            random = np.random.RandomState(timestep)
            shapes = {"sample": (2, 4, height, width), NAMES[2]: (2, TEXT, layer.config.cross_attention_dim)}
            shapes |= {added: (2, size) for added, size in content["added"].items()}
            dtype = model.get("dtype", "float32")
            inputs = {key: random.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}
            inputs["timestep"] = np.array(timestep)
            place = f"{name} {height} {width} {timestep}"
            for runtime, run in RUNTIMES.items():
                outputs[f"{place} {runtime}"] = run(merged / "model.onnx", inputs)
            if model.get("int8"):
                outputs[f"{place} int8"] = run_in_onnxruntime(merged / "int8.onnx", inputs)
    np.savez(Path(output, "outputs.npz"), **outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
