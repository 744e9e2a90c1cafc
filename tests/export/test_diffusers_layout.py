"""The layout that Optimum and OpenVINO GenAI load: names, types, dimensions, configs; what is rejected.

`test_diffusers_layout_loaders.py` loads such folders with these libraries.
"""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import paddle
import pytest
from conftest import refiner_pipeline, tiny_pipeline
from exporting import ONNX_SETTINGS, export_linked, linking, programs_of
from onnx import TensorProto
from ppdiffusers import (
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    PreconfigLMSDiscreteScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLPipeline,
)
from zoo.parts import (
    ONE_DEPTH,
    ONE_LEVEL,
    SDXL,
    controlnet,
    sdxl,
    stable_diffusion,
    unet,
)

from ppdiffusers_tome import ToMeConfigError, ToMeExportError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.export import diffusers_layout, loading
from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export.comparison import relative_difference
from ppdiffusers_tome.export.layouts import MARK, MODEL_FORMATS, DiffusersLayout, has_diffusers_layout
from ppdiffusers_tome.inference import Size, export_pipeline
from ppdiffusers_tome.run import openvino_runtime
from ppdiffusers_tome.run.onnx_weights import external_places
from ppdiffusers_tome.run.runtime import FUSED_TOLERANCE, load_module

SIZE = (32, 40)  # of `onnx_folder`; 16×20 latent pixels
MODELS = ("unet", "text_encoder", "vae_decoder", "vae_encoder")


def write(folder, onnx_folder, **options):
    """A folder from the programs of `onnx_folder`, without a trace."""
    linked = programs_of(onnx_folder)
    settings = {"image_to_image": True, "format": "onnx", "linked": linked, **ONNX_SETTINGS, **options}
    export_linked(tiny_pipeline(), folder, 0.5, [SIZE], layout="diffusers", **settings)
    return folder


@pytest.fixture(scope="module")
def plain_form(onnx_folder, tmp_path_factory):
    """Models with attention step by step, for OpenVINO and ONNX Runtime."""
    return write(tmp_path_factory.mktemp("layout") / "plain", onnx_folder)


@pytest.fixture(scope="module")
def fused_form(onnx_folder, tmp_path_factory):
    """Models with fused attention, for ONNX Runtime alone."""
    return write(tmp_path_factory.mktemp("layout") / "fused", onnx_folder, runtime="onnxruntime")


def read(folder, *names):
    return json.loads(folder.joinpath(*names).read_text(encoding="utf-8"))


def values(model_values):
    """Data type and dimensions of a model's inputs or outputs, by name."""
    return {
        value.name: (
            TensorProto.DataType.Name(value.type.tensor_type.elem_type),
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in model_values
    }


def model(folder, name):
    return onnx.load(str(folder / name / "model.onnx"), load_external_data=False)


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, inputs), strict=True))


def random(*shape):
    return np.random.RandomState(0).standard_normal(shape).astype("float32")


def unet_inputs(timestep):
    return {"sample": random(2, 4, 16, 20), "timestep": timestep, "encoder_hidden_states": random(2, 7, 32)}


# Models


@pytest.mark.parametrize("name", MODELS)
def test_inputs_and_outputs_have_the_names_and_dimensions_that_optimum_reads(plain_form, name):
    text = ["batch_size", "sequence_length", 32]
    expected = {
        "unet": (
            {
                "sample": ("FLOAT", ["batch_size", 4, 16, 20]),
                "timestep": ("INT64", [1]),
                "encoder_hidden_states": ("FLOAT", text),
            },
            {"out_sample": ("FLOAT", ["batch_size", 4, 16, 20])},
        ),
        "text_encoder": (
            {"input_ids": ("INT64", text[:2])},
            {"last_hidden_state": ("FLOAT", text), "pooler_output": ("FLOAT", ["batch_size", 32])},
        ),
        "vae_decoder": (
            {"latent_sample": ("FLOAT", ["batch_size", 4, 16, 20])},
            {"sample": ("FLOAT", ["batch_size", 3, 32, 40])},
        ),
        "vae_encoder": (
            {"sample": ("FLOAT", ["batch_size", 3, 32, 40])},
            {"latent_parameters": ("FLOAT", ["batch_size", 8, 16, 20])},
        ),
    }
    graph = model(plain_form, name).graph
    assert (values(graph.input), values(graph.output)) == expected[name]


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_beside_their_model(plain_form, fused_form, name):
    for folder in (plain_form, fused_form):
        assert {path.name for path in (folder / name).iterdir()} == {"config.json", "model.onnx", "model.onnx_data"}
        places = [external_places(tensor) for tensor in model(folder, name).graph.initializer]
        assert {place["location"] for place in places if place} == {"model.onnx_data"}
        assert (folder / name / "model.onnx").stat().st_size < 1e6


@pytest.mark.parametrize("content", ["7", "[]", "no JSON"])
def test_a_folder_with_another_index_is_not_one_of_these(tmp_path, content):
    (tmp_path / "model_index.json").write_text(content)
    assert not has_diffusers_layout(tmp_path)


def test_the_folder_has_nothing_else(plain_form):
    parts = {*MODELS, "tokenizer", "scheduler", "model_index.json", "README.md"}
    assert {path.name for path in plain_form.iterdir()} == parts


def test_models_compute_what_the_programs_compute(plain_form, onnx_folder):
    source = onnx_folder / "onnx"
    inputs = unet_inputs(np.array([10], "float32"))
    (expected,) = run(source / "unet_40x32_0.5.onnx", **inputs).values()
    inputs["timestep"] = np.array([10])
    assert (run(plain_form / "unet" / "model.onnx", **inputs)["out_sample"] == expected).all()
    ids = np.array([[2046, 5, 7, 2047, 2047]])
    expected = list(run(source / "text_encoder.onnx", input_ids=ids).values())
    encoded = run(plain_form / "text_encoder" / "model.onnx", input_ids=ids)
    for name, array in zip(("last_hidden_state", "pooler_output"), expected, strict=True):
        assert (encoded[name] == array).all()
    image = random(2, 3, *SIZE)
    expected = np.concatenate(list(run(source / "vae_encoder.onnx", sample=image).values()), axis=1)
    assert (run(plain_form / "vae_encoder" / "model.onnx", sample=image)["latent_parameters"] == expected).all()
    latents = random(2, 4, 16, 20)
    (expected,) = run(source / "vae_decoder.onnx", latent_sample=latents).values()
    assert (run(plain_form / "vae_decoder" / "model.onnx", latent_sample=latents)["sample"] == expected).all()


def test_for_onnxruntime_attention_is_fused_and_the_timestep_a_scalar(plain_form, fused_form):
    operators = [node.op_type for node in model(fused_form, "unet").graph.node]
    assert "MultiHeadAttention" in operators and "Softmax" not in operators
    assert "MultiHeadAttention" not in [node.op_type for node in model(plain_form, "unet").graph.node]
    assert values(model(fused_form, "unet").graph.input)["timestep"] == ("FLOAT", [])
    expected = run(plain_form / "unet" / "model.onnx", **unet_inputs(np.array([10])))["out_sample"]
    output = run(fused_form / "unet" / "model.onnx", **unet_inputs(np.array(10, "float32")))["out_sample"]
    assert 0 < relative_difference(output, expected) < FUSED_TOLERANCE
    of_fraction = run(fused_form / "unet" / "model.onnx", **unet_inputs(np.array(10.5, "float32")))["out_sample"]
    assert (of_fraction != output).any()


def test_openvino_reads_the_names_of_inputs_and_outputs(plain_form):
    """Loaders ask for any name of an input, so there must be no other."""
    for name in MODELS:
        graph = model(plain_form, name).graph
        read = load_module("openvino").convert_model(plain_form / name / "model.onnx")
        assert [value.names for value in read.inputs] == [{value.name} for value in graph.input]
        assert [value.get_any_name() for value in read.outputs] == [value.name for value in graph.output]


def test_openvino_files_compute_the_same(onnx_folder, plain_form, tmp_path):
    folder = write(tmp_path / "out", onnx_folder, format="openvino")
    for name in MODELS:
        files = {path.name for path in (folder / name).iterdir()}
        assert files == {"config.json", "openvino_model.xml", "openvino_model.bin"}
    compiled = openvino_runtime.core().compile_model(
        folder / "unet" / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    assert {name for value in compiled.inputs for name in value.names} == {
        "sample",
        "timestep",
        "encoder_hidden_states",
    }
    inputs = unet_inputs(np.array([10]))
    expected = run(plain_form / "unet" / "model.onnx", **inputs)["out_sample"]
    assert relative_difference(compiled(inputs)["out_sample"], expected) < 1e-4
    readme = (folder / "README.md").read_text()
    assert "openvino_genai.Text2ImagePipeline" in readme and "from_onnx" not in readme
    assert "$" not in readme


def test_sdxl_returns_the_states_of_all_layers(tmp_path):
    components = sdxl(unet=unet(**{**SDXL, **ONE_LEVEL, **ONE_DEPTH}))
    pipe = StableDiffusionXLPipeline(**components)
    folder = tmp_path / "out"
    export_pipeline(pipe, folder, 0.5, [(32, 32)], layout="diffusers", progress=False)
    index = read(folder, "model_index.json")
    assert index["_class_name"] == "StableDiffusionXLPipeline"
    assert index["text_encoder"] == ["transformers", "CLIPTextModel"]
    assert index["text_encoder_2"] == ["transformers", "CLIPTextModelWithProjection"]
    assert index["tokenizer_2"] == ["transformers", "CLIPTokenizer"] and index["force_zeros_for_empty_prompt"] is True
    dims = values(model(folder, "unet").graph.input)
    assert dims["text_embeds"] == ("FLOAT", ["batch_size", 32]) and dims["time_ids"] == ("FLOAT", ["batch_size", 6])
    ids = np.array([[2046, 5, 7, 2047, 2047]])
    for name, first in (
        ("text_encoder", ["last_hidden_state", "pooler_output"]),
        ("text_encoder_2", ["text_embeds", "last_hidden_state"]),
    ):
        encoder = components[name]
        outputs = run(folder / name / "model.onnx", input_ids=ids)
        layers = read(folder, name, "config.json")["num_hidden_layers"]
        states = [f"hidden_states.{layer}" for layer in range(layers + 1)]
        assert [*outputs] == [*first, *states]
        with paddle.no_grad():
            eager = encoder(paddle.to_tensor(ids), output_hidden_states=True, return_dict=True)
        for key, expected in [*zip(first, eager[:2], strict=True), *zip(states, eager.hidden_states, strict=True)]:
            assert relative_difference(outputs[key], expected.numpy()) < 1e-4, key


def test_the_refiner_of_sdxl(refiner_folder, tmp_path):
    """OpenVINO GenAI needs the first text encoder."""
    pipe, folder = refiner_pipeline(), tmp_path / "out"
    # Of the text encoder with the states of all layers only the number of outputs is another.
    linked = [(root, file) for root, file in programs_of(refiner_folder) if file.model != "text_encoder_2"]
    export_linked(pipe, folder, 0.5, [(32, 32)], layout="diffusers", format="onnx", linked=linked)
    index = read(folder, "model_index.json")
    assert index["text_encoder"] == index["tokenizer"] == [None, None]
    assert index["text_encoder_2"] == ["transformers", "CLIPTextModelWithProjection"]
    assert index["requires_aesthetics_score"] is True
    assert values(model(folder, "unet").graph.input)["time_ids"] == ("FLOAT", ["batch_size", 5])
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        *("unet", "vae_decoder", "vae_encoder", "text_encoder_2", "tokenizer_2", "scheduler")
    }
    readme = diffusers_layout._readme(DiffusersLayout("openvino"), pipe, index[MARK])
    assert "OVStableDiffusionXLImg2ImgPipeline" in readme and "image=image" in readme and "$" not in readme


# Configs


def test_model_index_names_the_classes_of_diffusers_and_transformers(plain_form):
    index = read(plain_form, "model_index.json")
    assert index[MARK].keys() == {"version", "size", "ratio", "method"}
    assert (index[MARK]["size"], index[MARK]["ratio"]) == ("40x32", 0.5)
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["scheduler"] == ["diffusers", "DDIMScheduler"]
    assert index["tokenizer"] == ["transformers", "CLIPTokenizer"]
    assert index["text_encoder"] == ["transformers", "CLIPTextModel"]
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"] and index["vae"] == ["diffusers", "AutoencoderKL"]
    assert index["requires_safety_checker"] is False and index["safety_checker"] == [None, None]


def test_configs_have_nothing_of_ppdiffusers_own(plain_form):
    assert read(plain_form, "unet", "config.json")["sample_size"] == 20  # one number, for image-to-image
    assert read(plain_form, "vae_encoder", "config.json") == read(plain_form, "vae_decoder", "config.json")
    assert read(plain_form, "vae_decoder", "config.json")["scaling_factor"] == 0.18215
    text = read(plain_form, "text_encoder", "config.json")
    assert text["model_type"] == "clip_text_model" and text["architectures"] == ["CLIPTextModel"]
    assert text["num_hidden_layers"] == 2 and text["max_position_embeddings"] == 24
    tokenizer = read(plain_form, "tokenizer", "tokenizer_config.json")
    assert tokenizer["tokenizer_class"] == "CLIPTokenizer" and tokenizer["model_max_length"] > 0
    assert read(plain_form, "scheduler", "scheduler_config.json")["_class_name"] == "DDIMScheduler"
    for path in plain_form.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not re.search("paddle|ppdiffusers(?!_tome)|/tmp/|examples/", text), path


def test_plain_text_to_image(onnx_folder, tmp_path, tiny):
    """Without the VAE's encoder, a size that is not square is two numbers."""
    linked = [(root, file) for root, file in programs_of(onnx_folder) if file.model != "vae_encoder"]
    export_linked(tiny, tmp_path / "out", 0, [SIZE], layout="diffusers", format="onnx", linked=linked)
    assert read(tmp_path / "out", "unet", "config.json")["sample_size"] == [16, 20]
    assert diffusers_layout._config("unet", tiny, Size(32, 32), has_encoder=False)["sample_size"] == 16
    assert not (tmp_path / "out" / "vae_encoder").exists()
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "Nothing merges in the UNet" in readme


@pytest.mark.parametrize("form", ["plain_form", "fused_form"])
def test_the_readme_says_what_it_is_and_how_to_load_it(form, request):
    readme = (request.getfixturevalue(form) / "README.md").read_text()
    assert "ratio 0.5, tomesd" in readme and "40×32 px" in readme and "height=32, width=40" in readme
    assert 'ORTStableDiffusionPipeline.from_pretrained("FOLDER")' in readme
    assert 'OVStableDiffusionPipeline.from_pretrained("FOLDER", from_onnx=True, dynamic_shapes=False)' in readme
    assert ("exported with `--for onnxruntime`" in readme) == (form == "fused_form")
    assert "$" not in readme


def test_the_readme_passes_what_the_class_takes(onnx_folder, tmp_path):
    linked = programs_of(onnx_folder)
    settings = {"format": "onnx", "linked": linked, "layout": "diffusers", **ONNX_SETTINGS}
    for cls, call in (
        (StableDiffusionImg2ImgPipeline, 'pipe("a prompt", image=image).images[0]'),
        (
            StableDiffusionInpaintPipeline,
            'pipe("a prompt", image=image, mask_image=mask, height=32, width=40).images[0]',
        ),
    ):
        pipe = cls(**tiny_pipeline().components, requires_safety_checker=False)
        export_linked(pipe, tmp_path / cls.__name__, 0.5, [SIZE], **settings)
        readme = (tmp_path / cls.__name__ / "README.md").read_text()
        assert f'ORT{cls.__name__}.from_pretrained("FOLDER")' in readme and call in readme


@pytest.mark.parametrize("format", MODEL_FORMATS)
def test_the_readme_has_the_models_own_prompt_steps_and_guidance(format):
    """Those of the library would give broken images of a model that knows few words."""
    pipe, about = tiny_pipeline(), {"size": "256x256", "ratio": 0.5, "method": "tomesd", "version": "3"}
    pipe.config["_name_or_path"] = str(Path(__file__).parents[2] / "examples" / "scenes_sd")
    readme = diffusers_layout._readme(DiffusersLayout(format), pipe, about)
    settings = "num_inference_steps=20, guidance_scale=3.0)"
    assert f'pipe("a 3d render of fox on red bricks", height=256, width=256, {settings}.images[0]' in readme
    assert "a prompt" not in readme.replace("after the prompt", "") and readme.count(settings) == 2


# Errors, before anything is written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ratios": (0.5, 0)}, r"ratios=\('0.5', '0'\) is not allowed: the layout 'diffusers' has one UNet"),
        (
            {"sizes": [(32, 32), (32, 40)]},
            r"sizes=\('32x32', '40x32'\) .*one UNet",
        ),
        ({"format": "paddle"}, r"format='paddle' .*'diffusers' .*\['onnx'"),
        ({"format": "both"}, "format='both' .*'diffusers'"),
        ({"runtime": "paddle"}, "runtime='paddle' "),
        (
            {"format": "openvino", "runtime": "onnxruntime"},
            "runtime='onnxruntime' .*'openvino'",
        ),
        ({"layout": "onnx"}, r"layout='onnx' .*\['ppdiffusers', 'diffusers'\]"),
        (
            {"layout": "ppdiffusers", "runtime": "openvino"},
            "runtime='openvino' .*'diffusers'",
        ),
        (
            {"layout": "ppdiffusers", "format": "openvino"},
            "format='openvino' .*'diffusers'",
        ),
    ],
)
def test_wrong_requests_are_errors(tiny, tmp_path, arguments, words):
    request = {"ratios": 0.5, "sizes": [(32, 32)], "layout": "diffusers", **arguments}
    with pytest.raises(ToMeConfigError, match=words):
        export_pipeline(tiny, tmp_path / "out", **request)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"controlnet": None}, "StableDiffusionControlNetPipeline .*'diffusers'"),
        ({"scheduler": PreconfigLMSDiscreteScheduler}, "PreconfigLMSDiscreteScheduler"),
        ({"scheduler": EDMEulerScheduler}, r"EDMEulerScheduler are noise levels, from -1.6 to 1.1.*--for onnxruntime"),
    ],
)
def test_pipelines_that_the_loaders_do_not_know_are_errors(tmp_path, changes, words):
    if "controlnet" in changes:
        components = stable_diffusion(unet=unet(**ONE_LEVEL))
        pipe = StableDiffusionControlNetPipeline(**components, controlnet=controlnet(**ONE_LEVEL))
    else:
        pipe = tiny_pipeline(**{name: build() for name, build in changes.items()})
    with pytest.raises(ToMeExportError, match=words):
        export_pipeline(pipe, tmp_path / "out", 0.5, [(32, 32)], layout="diffusers", progress=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of ppdiffusers' classes
def test_timesteps_that_the_loaders_get_as_they_are_or_rounded():
    """Those of EDM as they are; of Karras' noise levels only fractions are lost."""
    edm = tiny_pipeline(scheduler=EDMEulerScheduler())
    diffusers_layout.check_loadable(edm, DiffusersLayout(runtime="onnxruntime"))
    karras = tiny_pipeline(scheduler=EulerDiscreteScheduler(use_karras_sigmas=True))
    diffusers_layout.check_loadable(karras, DiffusersLayout())


def test_an_existing_folder_is_only_replaced_by_request(onnx_folder, plain_form, tmp_path):
    folder = write(tmp_path / "out", onnx_folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ToMeExportError, match=r"overwrite=True \(--overwrite\)"):
        write(folder, onnx_folder)
    assert sorted(folder.rglob("*")) == before
    write(folder, onnx_folder, runtime="onnxruntime", overwrite=True)
    assert "MultiHeadAttention" in [node.op_type for node in model(folder, "unet").graph.node]
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text("{}")
    with pytest.raises(ToMeExportError, match="pass another folder"):
        write(other, onnx_folder, overwrite=True)
    assert (other / "model_index.json").read_text() == "{}"


def test_the_command_checks_options_before_it_loads_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "load_eager_pipeline", lambda *_, **__: pytest.fail("it loads the model"))
    command = ["export", "--model", "x/y", "--output", str(tmp_path / "out"), "--layout", "diffusers"]
    for options, words in (
        (["--ratio", "0.5", "0"], "--ratio 0.5 0 is not allowed: the layout 'diffusers' has one UNet"),
        (["--size", "32", "48x32"], "--size 32x32 48x32 is not allowed: the layout 'diffusers' has one UNet"),
        (["--format", "both"], "--format both is not allowed: the layout 'diffusers' has"),
        (["--format", "openvino", "--for", "onnxruntime"], "--for onnxruntime is not allowed: ONNX Runtime does not"),
    ):
        assert main([*command, *options]) == 2
        assert words in capsys.readouterr().err
    assert main([*command[:-2], "--for", "openvino"]) == 2
    assert "--for openvino is not allowed: it is for the layout 'diffusers'" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_command_writes_the_folder(onnx_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export_module, "sha256", lambda _: pytest.fail("what is deleted at the end is hashed"))
    tiny_pipeline().save_pretrained(str(tmp_path / "model"))
    command = ["export", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--size", "40x32"]
    with linking(programs_of(onnx_folder), ("onnx",)):
        assert main([*command, "--ratio", "0.5", "--layout", "diffusers", "--for", "onnxruntime"]) == 0
    assert read(tmp_path / "out", "model_index.json")[MARK]["size"] == "40x32"
    assert "MultiHeadAttention" in [node.op_type for node in model(tmp_path / "out", "unet").graph.node]
    printed = capsys.readouterr().out
    megabytes = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()) / 1e6
    assert f", {megabytes:.0f} MB\n" in printed
    assert "\nunet  " in printed and f"{tmp_path / 'out' / 'README.md'} has the lines that load it" in printed
