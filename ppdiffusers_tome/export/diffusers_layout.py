"""The folder that Optimum, optimum-intel and OpenVINO GenAI load: an export that runs without this package and Paddle.

It is made from the ONNX programs of an export for one size and one ratio. Names of files, inputs, outputs and
dimensions are those of `optimum.exporters.onnx` (read in optimum-onnx 0.1.0, optimum-intel 1.27.0 and openvino.genai
2026.4.1, which `make test-optimum` runs).
"""

import importlib.util
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ppdiffusers import DiffusionPipeline

from .._version import __version__
from ..errors import ToMeExportError
from ..families.pipelines import vae_factor
from ..families.schedules import default_steps, timesteps_of
from ..run.manifest import Manifest
from ..run.ratios import ratio_name
from ..run.runtime import load_module
from ..run.sizes import Size
from .exportable import defaults_of, is_xl, text_encoders
from .layouts import MARK, DiffusersLayout

if TYPE_CHECKING:
    from .onnx_interface import Interface

# Pipelines that the loaders know, by their class in ppdiffusers, which has the same name there.
CLASSES = (
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusionXLImg2ImgPipeline",
)
TEXT_CLASSES = {"text_encoder": "CLIPTextModel", "text_encoder_2": "CLIPTextModelWithProjection"}  # in transformers
TEXT_OUTPUTS = {  # in SDXL `hidden_states.0`, `hidden_states.1`, … come after them
    "text_encoder": ("last_hidden_state", "pooler_output"),
    "text_encoder_2": ("text_embeds", "last_hidden_state"),
}
# Entries of configs that only ppdiffusers has.
FOREIGN = {"data_format", "down_block_out_channels", "up_block_out_channels", "_ppdiffusers_version", "_name_or_path"}
TEXT_CONFIG = (  # the entries of transformers' CLIPTextConfig
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "projection_dim",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
    "attention_dropout",
    "initializer_range",
    "initializer_factor",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
LARGEST_NOISE_LEVEL = 3  # of schedules whose timesteps are ¼·log σ, as in EDM; the first one of others is far above
PASSED = ("force_zeros_for_empty_prompt", "requires_aesthetics_score")  # arguments of SDXL's pipelines


def check_loadable(pipe: DiffusionPipeline, layout: DiffusersLayout) -> None:
    """Raise unless the loaders know this pipeline and its scheduler.

    Raises:
        ToMeExportError: they do not know the pipeline or the scheduler, or would round its timesteps.
    """
    class_name = type(pipe).__name__
    if class_name not in CLASSES:
        raise ToMeExportError(
            f"{class_name} cannot be exported in the layout 'diffusers': Optimum and OpenVINO GenAI load "
            f"{', '.join(CLASSES)}. Leave out the layout, and load the export with load_pipeline."
        )
    scheduler = type(pipe.scheduler).__name__
    if scheduler.startswith("Preconfig"):
        raise ToMeExportError(
            f"the scheduler is {scheduler}, which diffusers does not have: set another, such as "
            "pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)."
        )
    timesteps = timesteps_of(pipe.scheduler, default_steps(pipe) or 1) or ()
    has_noise_levels = bool(timesteps) and max(map(abs, timesteps)) <= LARGEST_NOISE_LEVEL
    if layout.runtime == "openvino" and has_noise_levels:
        raise ToMeExportError(
            f"the timesteps of {scheduler} are noise levels, from {min(timesteps):.2g} to {max(timesteps):.2g}, and "
            "OpenVINO GenAI makes whole numbers of them: export for ONNX Runtime (--for onnxruntime), or set another "
            "scheduler."
        )


def write_layout(
    layout: DiffusersLayout,
    export: Path,
    manifest: Manifest,
    pipe: DiffusionPipeline,
    folder: Path,
) -> None:
    """Write the folder from an export in ppdiffusers' layout, whose weights and further files are moved.

    Args:
        export: the folder of the export.
        manifest: its programs, each as ONNX; one UNet.
        pipe: the pipeline that was exported.
        folder: an existing folder on the same file system.

    Raises:
        OSError: the files cannot be written.
        ToMeExportError: OpenVINO cannot convert a model.
    """
    from .onnx_interface import write_model  # here, because onnx is optional

    (size, *_), (merging, *_) = manifest.sizes, manifest.merging
    files = {file.model: file.files["onnx"] for file in manifest.programs}
    for name, file in files.items():
        part = folder / name
        part.mkdir()
        write_model(export / file.program, part / "model.onnx", _interface(name, pipe, size), layout.runtime)
        _write_json(part / "config.json", _config(name, pipe, size, "vae_encoder" in files))
        if layout.format == "openvino":
            convert_model(part)
    for name in ("tokenizer", "tokenizer_2", "scheduler"):
        if (export / name).is_dir():
            shutil.move(export / name, folder / name)
    for path in folder.glob("tokenizer*/tokenizer_config.json"):
        _write_json(path, _tokenizer_config(path))
    path = folder / "scheduler" / "scheduler_config.json"
    _write_json(path, without_foreign(json.loads(path.read_text(encoding="utf-8"))))
    if layout.format == "openvino":
        _convert_tokenizers(folder)
    method = merging.words or "plain"
    about = {"version": __version__, "size": str(size), "ratio": merging.ratio, "method": method}
    _write_json(folder / "model_index.json", _model_index(pipe) | {MARK: about})
    (folder / "README.md").write_text(_readme(layout, pipe, about), encoding="utf-8")


def _interface(model: str, pipe: DiffusionPipeline, size: Size) -> "Interface":
    """What the loaders expect of a model's inputs and outputs."""
    from .onnx_interface import Interface

    if model in text_encoders(pipe):
        outputs = TEXT_OUTPUTS[model]
        layers = range(getattr(pipe, model).config.num_hidden_layers + 1) if is_xl(pipe) else ()
        return Interface((*outputs, *(f"hidden_states.{layer}" for layer in layers)))
    factor = vae_factor(pipe)
    latents = size.height // factor, size.width // factor
    if model == "unet":
        return Interface(("out_sample",), None, {"sample": latents, "out_sample": latents})
    if model == "vae_decoder":
        return Interface(("sample",), None, {"latent_sample": latents, "sample": size})
    return Interface(("mean", "logvar"), "latent_parameters", {"sample": size, "latent_parameters": latents})


def convert_model(part: Path) -> None:
    """Replace the ONNX model of a folder by OpenVINO's files."""
    openvino = load_module("openvino")
    source = part / "model.onnx"
    try:
        converted = openvino.convert_model(str(source))
    except Exception as error:
        raise ToMeExportError(f"OpenVINO {openvino.__version__} cannot convert the {part.name}: {error}") from error
    openvino.save_model(converted, str(part / "openvino_model.xml"), compress_to_fp16=False)
    source.unlink()
    (part / "model.onnx_data").unlink(missing_ok=True)


def _convert_tokenizers(folder: Path) -> None:
    """Write the tokenizers as OpenVINO models too, if the packages for that are installed."""
    if not all(importlib.util.find_spec(name) for name in ("transformers", "openvino_tokenizers")):
        return
    transformers, converter = (importlib.import_module(name) for name in ("transformers", "openvino_tokenizers"))
    for path in sorted(folder.glob("tokenizer*")):
        tokenizer = transformers.CLIPTokenizerFast.from_pretrained(str(path))
        model = converter.convert_tokenizer(tokenizer, with_detokenizer=False)
        load_module("openvino").save_model(model, str(path / "openvino_tokenizer.xml"))


def _config(model: str, pipe: DiffusionPipeline, size: Size, has_encoder: bool) -> dict[str, Any]:
    """The contents of a model's `config.json`.

    Args:
        has_encoder: whether the folder has the VAE's encoder. The UNet's `sample_size` then is a number, its longer
            side, because diffusers' pipelines for image-to-image and inpainting compare it with a number; those for
            SDXL multiply it (0.39.0).
    """
    if model in text_encoders(pipe):
        encoder = getattr(pipe, model)
        config = {name: getattr(encoder.config, name) for name in TEXT_CONFIG if hasattr(encoder.config, name)}
        return config | {"architectures": [TEXT_CLASSES[model]], "model_type": "clip_text_model"}
    if model != "unet":
        return without_foreign(dict(pipe.vae.config))
    latent = [size.height // vae_factor(pipe), size.width // vae_factor(pipe)]
    is_number = has_encoder or is_xl(pipe) or latent[0] == latent[1]
    return without_foreign(dict(pipe.unet.config)) | {"sample_size": max(latent) if is_number else latent}


def without_foreign(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the entries that the loaders do not know."""
    return {name: value for name, value in config.items() if name not in FOREIGN}


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """The contents of `tokenizer_config.json` as transformers reads them, without paths of this machine."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.setdefault("model_max_length", config.get("max_len", 77))
    for name in ("max_len", "special_tokens_map_file", "name_or_path"):
        config.pop(name, None)
    return config | {"tokenizer_class": "CLIPTokenizer"}


def _model_index(pipe: DiffusionPipeline) -> dict[str, Any]:
    """The contents of `model_index.json`: the classes of all parts, in diffusers and transformers."""
    index: dict[str, Any] = {
        "_class_name": type(pipe).__name__,
        "scheduler": ["diffusers", type(pipe.scheduler).__name__],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    for name in text_encoders(pipe):
        index[name] = ["transformers", TEXT_CLASSES[name]]
    for name in ("tokenizer", "tokenizer_2"):
        if vars(pipe).get(name) is not None:
            index[name] = ["transformers", "CLIPTokenizer"]
    index = {"text_encoder": [None, None], "tokenizer": [None, None]} | index  # as in SDXL's refiner
    if is_xl(pipe):
        return index | {name: pipe.config[name] for name in PASSED if name in pipe.config}
    none = {"feature_extractor": [None, None], "image_encoder": [None, None], "safety_checker": [None, None]}
    return index | none | {"requires_safety_checker": False}


def _readme(layout: DiffusersLayout, pipe: DiffusionPipeline, about: Mapping[str, Any]) -> str:
    """The contents of the folder's README.md."""
    class_name, ratio = type(pipe).__name__, ratio_name(about["ratio"])
    width, height = about["size"].split("x")
    sides = f"height={height}, width={width}"
    arguments = {"Img2Img": "image=image", "Inpaint": f"image=image, mask_image=mask, {sides}"}
    merged = f"Token merging is part of the UNet: ratio {ratio}, {about['method']}."
    own = defaults_of(pipe)
    settings = {"num_inference_steps": own.steps, "guidance_scale": own.guidance_scale}
    template = Path(__file__).with_name(f"readme_{layout.format}.md").read_text(encoding="utf-8")
    return Template(template).substitute(
        name=Path(pipe.config.get("_name_or_path") or class_name).name,
        class_name=class_name,
        version=about["version"],
        width=width,
        height=height,
        merging=merged if about["ratio"] else "Nothing merges in the UNet: it is plain.",
        runtime=layout.runtime,
        prompt=json.dumps(next(iter(own.prompts), "a prompt"), ensure_ascii=False),
        arguments=next((given for kind, given in arguments.items() if kind in class_name), sides),
        settings="".join(f", {name}={value}" for name, value in settings.items() if value is not None),
    )


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
