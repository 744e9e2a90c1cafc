"""Models that do not merge: the table of reasons has existing class names, and errors show the reason."""

import importlib

import paddle
import ppdiffusers
import pytest
from ppdiffusers import PaddleInferRuntimeModel, PaddleInferStableDiffusionPipeline
from ppdiffusers.models import unet_2d_blocks
from ppdiffusers_source import newer_class

from ppdiffusers_tome import NoMergeableLayerError
from ppdiffusers_tome.inference.models import ExportedUNet
from ppdiffusers_tome.unsupported import BLOCK_REASONS, REASONS, no_merge_reason

MODULES = {  # of classes that ppdiffusers does not export
    "Kandinsky3UNet": "models.unet_kandi3",
    "ReduxImageEncoder": "pipelines.flux.modeling_flux",
    "T5FilmDecoder": "models.t5_film_transformer",
    "UNetFlatConditionModel": "pipelines.versatile_diffusion.modeling_text_unet",
    "WuerstchenDiffNeXt": "pipelines.wuerstchen.modeling_wuerstchen_diffnext",
    "WuerstchenPrior": "pipelines.wuerstchen.modeling_wuerstchen_prior",
}
PADDLE_2_ONLY = ("DiTLLaMA2DModel", "DiTLLaMAT2IModel")  # they cannot be imported on Paddle 3.3


@pytest.mark.parametrize("name", sorted(set(REASONS) - {ExportedUNet.__name__}))
def test_classes_of_the_table_exist(name):
    if name in PADDLE_2_ONLY and paddle.__version__ >= "3":
        pytest.skip("ppdiffusers cannot import it with this Paddle")
    if name == "ReduxImageEncoder":
        newer_class("FluxPriorReduxPipeline")
    module = importlib.import_module(f"ppdiffusers.{MODULES[name]}") if name in MODULES else ppdiffusers
    assert isinstance(getattr(module, name), type)


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
