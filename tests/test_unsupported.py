"""Models that do not merge: the table of reasons has existing class names, and errors show the reason."""

import ast
import importlib
from pathlib import Path

import paddle
import ppdiffusers
import pytest
from ppdiffusers import PaddleInferRuntimeModel, PaddleInferStableDiffusionPipeline
from ppdiffusers.models import unet_2d_blocks
from ppdiffusers_source import newer_class

from ppdiffusers_tome import NoMergeableLayerError
from ppdiffusers_tome.inference.models import ExportedUNet
from ppdiffusers_tome.models import ROTARY
from ppdiffusers_tome.unsupported import BLOCK_REASONS, MODULE_REASONS, REASONS, no_merge_reason

MODULES = {  # of classes that ppdiffusers does not export
    "Kandinsky3UNet": "models.unet_kandi3",
    "ReduxImageEncoder": "pipelines.flux.modeling_flux",
    "T5FilmDecoder": "models.t5_film_transformer",
    "UNetFlatConditionModel": "pipelines.versatile_diffusion.modeling_text_unet",
    "WuerstchenDiffNeXt": "pipelines.wuerstchen.modeling_wuerstchen_diffnext",
    "WuerstchenPrior": "pipelines.wuerstchen.modeling_wuerstchen_prior",
}
PADDLE_2_ONLY = ("DiTLLaMA2DModel", "DiTLLaMAT2IModel")  # they cannot be imported on Paddle 3.3
NEWER = {"ReduxImageEncoder": "FluxPriorReduxPipeline", "MochiTransformer3DModel": "MochiTransformer3DModel"}
# Of the models that ppdiffusers defines: those that merge, and those that are no denoisers, or parts of them.
MERGE = {
    *ROTARY, "AudioLDM2UNet2DConditionModel", "ControlNetModel", "FluxMultiControlNetModel", "MultiControlNetModel",
    "SD3ControlNetModel", "SD3MultiControlNetModel", "SD3Transformer2DModel", "Transformer2DModel",
    "Transformer3DModel", "UNet2DConditionModel", "UNet3DConditionModel", "UNetMotionModel",
    "UNetSpatioTemporalConditionModel",
}  # fmt: skip
OTHERS = {
    "AudioLDM2ProjectionModel", "CLIPImageProjection", "IFWatermarker", "LearnedClassifierFreeSamplingEmbeddings",
    "MLPNeRSTFModel", "MotionAdapter", "MultiAdapter", "PaellaVQModel", "ShapEParamsProjModel", "ShapERenderer",
    "SpectrogramContEncoder", "SpectrogramNotesEncoder", "StableUnCLIPImageNormalizer", "T2IAdapter",
    "TransformerTemporalModel", "UTransformer2DModel", "UnCLIPTextProjModel", "UniDiffuserTextDecoder", "VQModel",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(REASONS) - {ExportedUNet.__name__, "StageB", "StageC"}))
def test_classes_of_the_table_exist(name):
    if name in PADDLE_2_ONLY and paddle.__version__ >= "3":
        pytest.skip("ppdiffusers cannot import it with this Paddle")
    if name in NEWER:
        newer_class(NEWER[name])
    module = importlib.import_module(f"ppdiffusers.{MODULES[name]}") if name in MODULES else ppdiffusers
    assert isinstance(getattr(module, name), type)


@pytest.mark.parametrize("name", ["StageB", "StageC"])
def test_stable_cascade(name):
    """ppdiffusers' own modules import paddle_aux, which it has not."""
    path = Path(ppdiffusers.__file__).parent / f"models/stable_cascade/modules/stage_{name[-1].lower()}.py"
    if not path.exists():
        pytest.skip("came after ppdiffusers 0.29.0")
    assert f"class {name}(" in path.read_text(encoding="utf-8")
    with pytest.raises(NoMergeableLayerError, match=f"{name}: its own kind of block attends to pixels and text"):
        type(name, (paddle.nn.Layer,), {})().apply_tome()


def model_classes():
    """The names of all models in the source of ppdiffusers, but for modules whose models all have a reason."""
    folder, parents = Path(ppdiffusers.__file__).parent, {}
    for path in (*folder.glob("models/**/*.py"), *folder.glob("pipelines/**/*.py")):
        module = ".".join(["ppdiffusers", *path.relative_to(folder).with_suffix("").parts])
        if not module.startswith(tuple(MODULE_REASONS)):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    parents.setdefault(node.name, set()).update(ast.unparse(base) for base in node.bases)

    def ancestors(name):
        return {name}.union(*(ancestors(parent) for parent in parents.get(name, ()) if parent != name))

    return {name: known for name in parents if "ModelMixin" in (known := ancestors(name)) and name != "ModelMixin"}


def test_every_model_merges_or_has_a_reason_or_does_not_denoise():
    classes = model_classes()
    assert len(classes) > 50
    for name, ancestors in classes.items():
        is_other = name in OTHERS or "Autoencoder" in name or "VAE" in name
        assert (name in MERGE) + (not ancestors.isdisjoint(REASONS)) + is_other == 1, name


def test_animate_anyone():
    """Its models have the names of others that merge."""
    pytest.importorskip("ppdiffusers.models.animate_anyone.unet_3d", reason="came after ppdiffusers 0.29.0")
    from ppdiffusers.models.animate_anyone.unet_3d import UNet3DConditionModel

    model = UNet3DConditionModel(
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock3D",),
        up_block_types=("CrossAttnUpBlock3D",),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=2,
        unet_use_temporal_attention=False,
    )
    with pytest.raises(NoMergeableLayerError, match=r"attends to the tokens of a reference image\. Run it without"):
        model.apply_tome()


@pytest.mark.parametrize("kind", sorted(BLOCK_REASONS))
def test_blocks_of_the_table_exist(kind):
    assert any(name.startswith(kind) for name in dir(unet_2d_blocks))


def test_subclasses_have_the_reason_of_their_parent():
    class Mine(ppdiffusers.UNet2DModel):
        pass

    model = Mine(block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",))
    with pytest.raises(
        NoMergeableLayerError, match=r"there are none in Mine\. Mine: its attention works on feature maps"
    ):
        model.apply_tome()


def test_kandinsky_3():
    """Its pipeline does not run on a CPU."""
    from ppdiffusers.models.unet_kandi3 import Kandinsky3UNet

    model = Kandinsky3UNet(block_out_channels=(128, 256), cross_attention_dim=64, encoder_hid_dim=64)
    with pytest.raises(NoMergeableLayerError, match="Kandinsky3UNet: its own kind of attention block"):
        model.apply_tome()


def test_pipeline_over_exported_programs():
    unet = PaddleInferRuntimeModel.__new__(PaddleInferRuntimeModel)  # without a program to run
    pipe = PaddleInferStableDiffusionPipeline.__new__(PaddleInferStableDiffusionPipeline)
    pipe.register_to_config(unet=("ppdiffusers", "PaddleInferRuntimeModel"))
    pipe.unet = unet
    with pytest.raises(NoMergeableLayerError, match=r"unet \(PaddleInferRuntimeModel\): it runs an exported program"):
        pipe.apply_tome()


def test_no_reason_is_known():
    assert no_merge_reason(paddle.nn.Linear(2, 2)) is None
    assert no_merge_reason(None) is None
