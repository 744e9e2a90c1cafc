"""The folder that Optimum, optimum-intel and OpenVINO GenAI load: an export that runs without this package and Paddle.

It is made from the ONNX programs of an export for one size and one ratio. Names of files, inputs, outputs and
dimensions are those of `optimum.exporters.onnx` (read in optimum-onnx 0.1.0, optimum-intel 1.27.0 and openvino.genai
2026.4.1, which `make test-optimum` runs).
"""

import importlib.util
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ppdiffusers import DiffusionPipeline

from .._version import __version__
from ..errors import ToMeExportError
from ..families.models import vae_factor
from ..families.schedules import default_steps, timesteps_of
from ..run.defaults import ModelDefaults, read_defaults
from ..run.manifest import ProgramFile, Size, ratio_name
from ..run.onnx_weights import external_places, set_places
from ..run.runtime import load_module
from ..wording import method_in_words
from .exportable import is_xl, text_encoders
from .layouts import MARK, DiffusersLayout
from .request import DenoiserMerging

if TYPE_CHECKING:
    import onnx

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
IN_PIXELS = {("vae_encoder", "sample"), ("vae_decoder", "sample")}  # all other feature maps are latents
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
    written: Iterable[ProgramFile],
    merging: DenoiserMerging,
    size: Size,
    pipe: DiffusionPipeline,
    folder: Path,
) -> None:
    """Write the folder from an export in ppdiffusers' layout, whose weights and other files are moved.

    Args:
        export: the folder of the export.
        written: its programs, each as ONNX; one UNet.
        merging: how its UNet merges.
        size: the UNet's size.
        pipe: the pipeline that was exported.
        folder: an existing folder on the same file system.

    Raises:
        OSError: the files cannot be written.
        ToMeExportError: OpenVINO cannot convert a model.
    """
    files = {file.model: file for file in written}
    for name, file in files.items():
        part = folder / name
        part.mkdir()
        outputs = _outputs(name, pipe)
        write_model(export / file.onnx_files[0], part / "model.onnx", name, outputs, size, vae_factor(pipe), layout)
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
    method = "plain" if merging.unet is None else method_in_words(merging.unet)
    about = {"version": __version__, "size": str(size), "ratio": merging.ratio, "method": method}
    _write_json(folder / "model_index.json", _model_index(pipe) | {MARK: about})
    (folder / "README.md").write_text(_readme(layout, pipe, about), encoding="utf-8")


def _outputs(model: str, pipe: DiffusionPipeline) -> tuple[str, ...]:
    """The names of a model's outputs; if the program has more, they are the states of the text encoder's layers."""
    if model in text_encoders(pipe):
        layers = range(getattr(pipe, model).config.num_hidden_layers + 1)
        states = [f"hidden_states.{layer}" for layer in layers] if is_xl(pipe) else []
        return (*TEXT_OUTPUTS[model], *states)
    return {"unet": ("out_sample",), "vae_decoder": ("sample",), "vae_encoder": ("mean", "logvar")}[model]


def write_model(
    source: Path, target: Path, model: str, outputs: tuple[str, ...], size: Size, factor: int, layout: DiffusersLayout
) -> None:
    """Write one model as the loaders read it, and move its weights beside it."""
    import onnx

    from ..run.onnx_attention import fuse_attention

    program = onnx.load(str(source), load_external_data=False)
    graph = program.graph
    if layout.runtime == "onnxruntime":
        fuse_attention(program)
    _rename_outputs(graph, outputs)
    if model == "vae_encoder":
        _join_outputs(graph, "latent_parameters")
    _skip_casts_of_inputs(program)
    for value in graph.input:
        if value.name == "timestep":
            _declare_timestep(graph, value, layout.runtime)
    for value in (*graph.input, *graph.output):
        pixels = 1 if (model, value.name) in IN_PIXELS else factor
        _name_dimensions(value, size.height // pixels, size.width // pixels)
    weights = target.with_name("model.onnx_data")
    moved = set()
    for tensor in graph.initializer:
        places = external_places(tensor)
        if places:
            moved.add(places["location"])
            del tensor.external_data[:]
            set_places(tensor, places | {"location": weights.name})
    for name in moved:
        shutil.move(source.with_name(name), weights)  # one file: all weights of a model are in one
    onnx.save(program, str(target))
    if layout.runtime == "openvino":
        onnx.checker.check_model(str(target))  # it does not know the operators of ONNX Runtime


def _rename_outputs(graph: "onnx.GraphProto", names: tuple[str, ...]) -> None:
    renamed = {value.name: name for value, name in zip(graph.output, names, strict=True)}
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in graph.output:
        value.name = renamed[value.name]


def _join_outputs(graph: "onnx.GraphProto", name: str) -> None:
    """Concatenate the graph's outputs [B, C, h, w] along their channels, to one output."""
    from onnx import helper

    graph.node.append(helper.make_node("Concat", [value.name for value in graph.output], [name], axis=1))
    joined = graph.output[0]
    joined.name = name
    joined.type.tensor_type.shape.dim[1].dim_value *= len(graph.output)
    del graph.output[1:]


def _skip_casts_of_inputs(program: "onnx.ModelProto") -> None:
    """Remove casts of inputs to their own data type.

    OpenVINO removes them too, and then the input has both names, of which loaders read either.
    """
    from ..run.onnx_graph import casts

    dtypes = {value.name: value.type.tensor_type.elem_type for value in program.graph.input}
    outputs = {value.name for value in program.graph.output}
    kept: list[onnx.NodeProto] = []
    skipped: dict[str, str] = {}
    for node in program.graph.node:
        node.input[:] = [skipped.get(name, name) for name in node.input]
        dtype = dtypes.get(node.input[0]) if node.op_type == "Cast" else None
        if dtype is not None and casts(node, dtype) and node.output[0] not in outputs:
            skipped[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    del program.graph.node[:]
    program.graph.node.extend(kept)


def _declare_timestep(graph: "onnx.GraphProto", value: "onnx.ValueInfoProto", runtime: str) -> None:
    """Let the timestep, float32 [1], be what the loaders pass: they cast a scheduler's to its type.

    OpenVINO GenAI passes int64 [1]. Optimum passes a scalar, and warns if it has to reshape it; as float32 it has
    every timestep as the scheduler has it.
    """
    from onnx import TensorProto, helper

    name = value.name
    for node in graph.node:
        node.input[:] = [f"{name}.float" if other == name else other for other in node.input]
    if runtime == "openvino":
        value.type.tensor_type.elem_type = TensorProto.INT64
        nodes = [helper.make_node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT)]
    else:
        del value.type.tensor_type.shape.dim[:]
        one = helper.make_tensor(f"{name}.shape", TensorProto.INT64, [1], [1])
        nodes = [
            helper.make_node("Constant", [], [one.name], value=one),
            helper.make_node("Reshape", [name, one.name], [f"{name}.float"]),
        ]
    for node in reversed(nodes):
        graph.node.insert(0, node)


def _name_dimensions(value: "onnx.ValueInfoProto", height: int, width: int) -> None:
    """Name the dimensions that are dynamic, [batch_size, sequence_length, …]; height and width get their size.

    Optimum derives the shapes of outputs from the names.
    """
    dims = value.type.tensor_type.shape.dim
    for axis, dim in enumerate(dims):
        if dim.dim_value <= 0:
            if axis < 2:
                dim.dim_param = ("batch_size", "sequence_length")[axis]
            else:
                dim.dim_value = (height, width)[axis - 2]


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
        has_encoder: whether the folder has the VAE's encoder. The UNet's `sample_size` then is one number, its longer
            side, because diffusers' pipelines for image-to-image and inpainting compare it with one; those for SDXL
            multiply it (0.39.0).
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
    model = pipe.config.get("_name_or_path")  # None of a pipeline that was made in Python
    own = read_defaults(Path(model)) if model else ModelDefaults()
    settings = {"num_inference_steps": own.steps, "guidance_scale": own.guidance_scale}
    template = Path(__file__).with_name(f"readme_{layout.format}.md").read_text(encoding="utf-8")
    return Template(template).substitute(
        name=Path(model or class_name).name,
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
