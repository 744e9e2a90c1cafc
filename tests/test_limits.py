"""What does not merge says why: the names that the reasons go by are ppdiffusers' own."""

import importlib

import paddle
import ppdiffusers
import pytest
from ppdiffusers import PaddleInferRuntimeModel, PaddleInferStableDiffusionPipeline
from ppdiffusers.models import unet_2d_blocks

from ppdiffusers_tome import NoMergeableLayerError
from ppdiffusers_tome.inference.models import ExportedUNet
from ppdiffusers_tome.limits import BLOCK_REASONS, REASONS, why_nothing_merges

ELSEWHERE = {  # classes that ppdiffusers does not offer by name alone
    "Kandinsky3UNet": "models.unet_kandi3",
    "T5FilmDecoder": "models.t5_film_transformer",
    "UNetFlatConditionModel": "pipelines.versatile_diffusion.modeling_text_unet",
    "WuerstchenDiffNeXt": "pipelines.wuerstchen.modeling_wuerstchen_diffnext",
    "WuerstchenPrior": "pipelines.wuerstchen.modeling_wuerstchen_prior",
}
ON_PADDLE_2_ALONE = ("DiTLLaMA2DModel", "DiTLLaMAT2IModel")  # they do not import on Paddle 3.3


@pytest.mark.parametrize("name", sorted(set(REASONS) - {ExportedUNet.__name__}))
def test_reasons_go_by_classes_that_there_are(name):
    if name in ON_PADDLE_2_ALONE and paddle.__version__ >= "3":
        pytest.skip("ppdiffusers cannot import it with this Paddle")
    module = importlib.import_module(f"ppdiffusers.{ELSEWHERE[name]}") if name in ELSEWHERE else ppdiffusers
    assert isinstance(getattr(module, name), type)


@pytest.mark.parametrize("kind", sorted(BLOCK_REASONS))
def test_reasons_go_by_blocks_that_there_are(kind):
    assert any(name.startswith(kind) for name in dir(unet_2d_blocks))


def test_a_models_own_children_have_its_reason():
    class Mine(ppdiffusers.UNet2DModel):
        pass

    model = Mine(block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",))
    with pytest.raises(NoMergeableLayerError, match=r"found none in Mine\. Mine: its attention sits in convolutional"):
        model.apply_tome()


def test_kandinsky_3():
    """Its pipeline does not run on a CPU at all."""
    from ppdiffusers.models.unet_kandi3 import Kandinsky3UNet

    model = Kandinsky3UNet(block_out_channels=(128, 256), cross_attention_dim=64, encoder_hid_dim=64)
    with pytest.raises(NoMergeableLayerError, match="Kandinsky3UNet: its attention blocks, its own kind"):
        model.apply_tome()


def test_a_pipeline_over_exported_programs():
    unet = PaddleInferRuntimeModel.__new__(PaddleInferRuntimeModel)  # without a program to run
    pipe = PaddleInferStableDiffusionPipeline.__new__(PaddleInferStableDiffusionPipeline)
    pipe.register_to_config(unet=("ppdiffusers", "PaddleInferRuntimeModel"))
    pipe.unet = unet
    with pytest.raises(NoMergeableLayerError, match=r"unet \(PaddleInferRuntimeModel\): it runs an exported program"):
        pipe.apply_tome()


def test_what_no_reason_is_known_for():
    assert why_nothing_merges(paddle.nn.Linear(2, 2)) is None
    assert why_nothing_merges(None) is None
