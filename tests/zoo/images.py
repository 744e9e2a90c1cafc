"""Text to image, image to image and editing with UNets: Stable Diffusion 1.x, 2.x, SDXL and models based on them."""

import paddle
import ppdiffusers as pp
from ppdiffusers.pipelines.alt_diffusion.modeling_roberta_series import (
    RobertaSeriesConfig,
    RobertaSeriesModelWithTransformation,
)
from ppdiffusers.pipelines.paint_by_example.image_encoder import PaintByExampleImageEncoder
from ppdiffusers.pipelines.stable_diffusion.clip_image_project_model import CLIPImageProjection
from ppdiffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer
from ppdiffusers.pipelines.stable_diffusion_safe import StableDiffusionPipelineSafe as SafePipeline
from ppdiffusers.pipelines.unclip.text_proj import UnCLIPTextProjModel
from ppdiffusers.transformers import CLIPProcessor

from .base import Tiny, family
from .parts import (
    HIDDEN,
    SDXL,
    image,
    image_config,
    image_encoder,
    image_processor,
    mask,
    ready,
    scheduler,
    sdxl,
    stable_diffusion,
    text_encoder,
    text_encoder_with_projection,
    tokenizer,
    unet,
    vae,
)

TEXT = {"prompt": "a 3d render of fox", "num_inference_steps": 2, "output_type": "np"}
IMAGE = {**TEXT, "image": image(), "strength": 1.0}
INPAINT = {**IMAGE, "mask_image": mask()}
UNET = ("unet",)
V2 = {"use_linear_projection": True, "attention_head_dim": (2, 4)}


# Stable Diffusion


@family
def StableDiffusionPipeline():
    return Tiny(pp.StableDiffusionPipeline(**stable_diffusion()), TEXT, UNET)


@family
def StableDiffusionPipeline_v2():
    """Like Stable Diffusion 2.x: linear projections, more heads at deeper levels, v-prediction."""
    parts = stable_diffusion(unet=unet(**V2), scheduler=scheduler(prediction_type="v_prediction"))
    return Tiny(pp.StableDiffusionPipeline(**parts), TEXT, UNET)


@family
def StableDiffusionImg2ImgPipeline():
    return Tiny(pp.StableDiffusionImg2ImgPipeline(**stable_diffusion()), IMAGE, UNET)


@family
def StableDiffusionInpaintPipeline():
    """The UNet of an inpainting model, which also gets the mask and the masked image."""
    return Tiny(pp.StableDiffusionInpaintPipeline(**stable_diffusion(unet=unet(in_channels=9))), INPAINT, UNET)


@family
def StableDiffusionInpaintPipeline_4_channels():
    """Inpainting with the UNet of a text-to-image model."""
    return Tiny(pp.StableDiffusionInpaintPipeline(**stable_diffusion()), INPAINT, UNET)


@family
def StableDiffusionInpaintPipelineLegacy():
    return Tiny(pp.StableDiffusionInpaintPipelineLegacy(**stable_diffusion()), INPAINT, UNET)


@family
def StableDiffusionUpscalePipeline():
    """The x4 upscaler's layout: self-attention at the deepest level only."""
    upscaler = unet(
        sample_size=32,
        in_channels=7,
        block_out_channels=(32, 32, 32, 64),
        down_block_types=("DownBlock2D", *3 * ("CrossAttnDownBlock2D",)),
        up_block_types=(*3 * ("CrossAttnUpBlock2D",), "UpBlock2D"),
        only_cross_attention=(True, True, True, False),
        num_class_embeds=1000,
        use_linear_projection=True,
    )
    parts = {
        "vae": vae(
            scaling_factor=0.08333,
            block_out_channels=3 * (32,),
            down_block_types=3 * ("DownEncoderBlock2D",),
            up_block_types=3 * ("UpDecoderBlock2D",),
        ),
        "text_encoder": text_encoder(),
        "tokenizer": tokenizer(),
        "unet": upscaler,
        "low_res_scheduler": scheduler(pp.DDPMScheduler),
        "scheduler": scheduler(prediction_type="v_prediction"),
    }
    return Tiny(pp.StableDiffusionUpscalePipeline(**parts), {**TEXT, "image": image()}, UNET)


@family
def StableDiffusionLatentUpscalePipeline():
    """K-blocks, whose attention is not inside a Transformer2DModel."""
    upscaler = unet(
        in_channels=8,
        out_channels=5,
        block_out_channels=(32, 64, 64),
        down_block_types=("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
        mid_block_type=None,
        up_block_types=("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
        act_fn="gelu",
        attention_head_dim=8,
        conv_in_kernel=1,
        conv_out_kernel=1,
        norm_num_groups=None,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
        time_cond_proj_dim=128 + HIDDEN,
        time_embedding_dim=64,
    )
    parts = {
        "vae": vae(),
        "text_encoder": text_encoder(),
        "tokenizer": tokenizer(),
        "unet": upscaler,
        "scheduler": scheduler(pp.EulerDiscreteScheduler, prediction_type="sample"),
    }
    return Tiny(pp.StableDiffusionLatentUpscalePipeline(**parts), {**TEXT, "image": image()}, ())


@family
def StableDiffusionDepth2ImgPipeline():
    parts = {key: part for key, part in stable_diffusion(unet=unet(in_channels=5)).items() if "safety" not in key}
    call = {**IMAGE, "depth_map": paddle.randn([1, 16, 16])}
    return Tiny(pp.StableDiffusionDepth2ImgPipeline(**parts, depth_estimator=None), call, UNET)


@family
def StableDiffusionInstructPix2PixPipeline():
    """Its UNet gets the image to edit; each pass has a batch of three images, not two."""
    pipe = pp.StableDiffusionInstructPix2PixPipeline(**stable_diffusion(unet=unet(in_channels=8)))
    return Tiny(pipe, {**TEXT, "image": image()}, UNET)


@family
def StableDiffusionImageVariationPipeline():
    parts = {key: part for key, part in stable_diffusion().items() if key not in ("text_encoder", "tokenizer")}
    pipe = pp.StableDiffusionImageVariationPipeline(**parts, image_encoder=image_encoder())
    return Tiny(pipe, {"image": image(), "num_inference_steps": 2, "output_type": "np"}, UNET)


@family
def CycleDiffusionPipeline():
    call = {**IMAGE, "source_prompt": "a fox", "eta": 0.1, "guidance_scale": 3, "source_guidance_scale": 1}
    return Tiny(pp.CycleDiffusionPipeline(**stable_diffusion()), call, UNET)


@family
def StableDiffusionPanoramaPipeline():
    call = {**TEXT, "height": 24, "width": 32, "circular_padding": True}
    return Tiny(pp.StableDiffusionPanoramaPipeline(**stable_diffusion()), call, UNET)


@family
def StableDiffusionSAGPipeline():
    """Self-attention guidance reads the attention map of the UNet's middle; its code for that raises on Paddle 2."""
    guidance = {"sag_scale": 0.75 if paddle.__version__ >= "3" else 0.0}
    return Tiny(pp.StableDiffusionSAGPipeline(**stable_diffusion()), {**TEXT, **guidance}, UNET)


@family
def StableDiffusionAttendAndExcitePipeline():
    call = {**TEXT, "token_indices": [2, 3], "attn_res": (16, 16), "thresholds": {}}
    return Tiny(pp.StableDiffusionAttendAndExcitePipeline(**stable_diffusion()), call, UNET)


@family
def StableDiffusionModelEditingPipeline():
    return Tiny(pp.StableDiffusionModelEditingPipeline(**stable_diffusion(), with_augs=[""]), TEXT, UNET)


@family
def StableDiffusionDiffEditPipeline():
    pipe = pp.StableDiffusionDiffEditPipeline(
        **stable_diffusion(), inverse_scheduler=scheduler(pp.DDIMInverseScheduler)
    )
    call = {"mask_image": mask(16), "image_latents": paddle.randn([1, 2, 4, 16, 16]), "inpaint_strength": 1.0}
    return Tiny(pipe, {**TEXT, **call}, UNET)


@family
def StableDiffusionLDM3DPipeline():
    """Generates an image and its depth."""
    parts = stable_diffusion(vae=vae(in_channels=6, out_channels=6))
    return Tiny(pp.StableDiffusionLDM3DPipeline(**parts), TEXT, UNET, output="rgb")


@family
def StableDiffusionPipelineSafe():
    return Tiny(SafePipeline(**stable_diffusion()), TEXT, UNET)


@family
def StableDiffusionGLIGENPipeline():
    """Each block has one more attention, over the boxes and the image tokens together."""
    pipe = pp.StableDiffusionGLIGENPipeline(**stable_diffusion(unet=unet(attention_type="gated")))
    boxes = {"gligen_phrases": ["fox"], "gligen_boxes": [[0.1, 0.2, 0.6, 0.7]], "gligen_scheduled_sampling_beta": 1}
    return Tiny(pipe, {**TEXT, **boxes}, UNET)


@family
def StableDiffusionGLIGENTextImagePipeline():
    parts = stable_diffusion(unet=unet(attention_type="gated-text-image"))
    pipe = pp.StableDiffusionGLIGENTextImagePipeline(
        **parts,
        processor=CLIPProcessor(parts["feature_extractor"], parts["tokenizer"]),
        image_encoder=image_encoder(),
        image_project=ready(CLIPImageProjection(HIDDEN)),
    )
    call = {
        "gligen_phrases": ["fox"],
        "gligen_images": [image()],
        "gligen_boxes": [[0.1, 0.2, 0.6, 0.7]],
        "gligen_scheduled_sampling_beta": 1,
    }
    return Tiny(pipe, {**TEXT, **call}, UNET)


@family
def StableDiffusionAdapterPipeline():
    adapter = ready(pp.T2IAdapter(channels=[32, 64], num_res_blocks=1, downscale_factor=2))
    return Tiny(
        pp.StableDiffusionAdapterPipeline(**stable_diffusion(), adapter=adapter), {**TEXT, "image": image()}, UNET
    )


@family
def StableDiffusionPipeline_IP_Adapter():
    pipe = pp.StableDiffusionPipeline(**stable_diffusion(), image_encoder=image_encoder())
    pipe.load_ip_adapter(ip_adapter(pipe.unet))
    return Tiny(pipe, {**TEXT, "ip_adapter_image": image()}, UNET)


def ip_adapter(model):
    """An IP-Adapter's weights for a UNet: keys and values of its cross-attention, and a projection to 4 tokens."""
    crosses = [layer for name, layer in model.named_sublayers() if name.endswith("attn2")]
    weights = {}
    for i, layer in enumerate(crosses):
        for name, linear in (("k", layer.to_k), ("v", layer.to_v)):
            weights[f"{2 * i + 1}.to_{name}_ip.weight"] = 0.1 * paddle.randn(linear.weight.shape)
    context = crosses[0].to_k.weight.shape[0]
    projection = {
        "proj.weight": 0.1 * paddle.randn([HIDDEN, 4 * context]),
        "proj.bias": paddle.zeros([4 * context]),
        "norm.weight": paddle.ones([context]),
        "norm.bias": paddle.zeros([context]),
    }
    return {"image_proj": projection, "ip_adapter": weights}


# SDXL


@family
def StableDiffusionXLPipeline():
    return Tiny(pp.StableDiffusionXLPipeline(**sdxl()), TEXT, UNET)


@family
def StableDiffusionXLPipeline_IP_Adapter():
    pipe = pp.StableDiffusionXLPipeline(**sdxl(), image_encoder=image_encoder(), feature_extractor=image_processor())
    pipe.load_ip_adapter(ip_adapter(pipe.unet))
    return Tiny(pipe, {**TEXT, "ip_adapter_image": image()}, UNET)


@family
def StableDiffusionXLImg2ImgPipeline():
    return Tiny(pp.StableDiffusionXLImg2ImgPipeline(**sdxl()), IMAGE, UNET)


@family
def StableDiffusionXLImg2ImgPipeline_refiner():
    """SDXL's refiner: one text encoder, the second; an aesthetic score instead of a target size."""
    refiner = unet(**{**SDXL, "cross_attention_dim": HIDDEN, "projection_class_embeddings_input_dim": 5 * 8 + HIDDEN})
    parts = sdxl(unet=refiner, text_encoder=None, tokenizer=None, requires_aesthetics_score=True)
    return Tiny(pp.StableDiffusionXLImg2ImgPipeline(**parts), IMAGE, UNET)


@family
def StableDiffusionXLInpaintPipeline():
    return Tiny(pp.StableDiffusionXLInpaintPipeline(**sdxl(unet=unet(**SDXL, in_channels=9))), INPAINT, UNET)


@family
def StableDiffusionXLInstructPix2PixPipeline():
    pipe = pp.StableDiffusionXLInstructPix2PixPipeline(**sdxl(unet=unet(**SDXL, in_channels=8)))
    return Tiny(pipe, {**TEXT, "image": image()}, UNET)


@family
def StableDiffusionXLAdapterPipeline():
    adapter = pp.T2IAdapter(
        channels=[32, 32, 64], num_res_blocks=1, downscale_factor=4, adapter_type="full_adapter_xl"
    )
    pipe = pp.StableDiffusionXLAdapterPipeline(**sdxl(), adapter=ready(adapter))
    return Tiny(pipe, {**TEXT, "image": image()}, UNET)


# Latent consistency


@family
def LatentConsistencyModelPipeline():
    parts = stable_diffusion(unet=unet(time_cond_proj_dim=32), scheduler=scheduler(pp.LCMScheduler))
    return Tiny(pp.LatentConsistencyModelPipeline(**parts), TEXT, UNET)


@family
def LatentConsistencyModelImg2ImgPipeline():
    parts = stable_diffusion(unet=unet(time_cond_proj_dim=32), scheduler=scheduler(pp.LCMScheduler))
    return Tiny(pp.LatentConsistencyModelImg2ImgPipeline(**parts), IMAGE, UNET)


# Other kinds of prompts


def roberta():
    config = RobertaSeriesConfig(
        vocab_size=2048,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        type_vocab_size=1,
        project_dim=HIDDEN,
    )
    return ready(RobertaSeriesModelWithTransformation(config))


@family
def AltDiffusionPipeline():
    """With an XLM-R text encoder; it uses CLIP's tokenizer, because there is no tiny one of XLM-R."""
    return Tiny(pp.AltDiffusionPipeline(**stable_diffusion(text_encoder=roberta())), TEXT, UNET)


@family
def AltDiffusionImg2ImgPipeline():
    return Tiny(pp.AltDiffusionImg2ImgPipeline(**stable_diffusion(text_encoder=roberta())), IMAGE, UNET)


@family
def PaintByExamplePipeline():
    parts = stable_diffusion(unet=unet(in_channels=9))
    del parts["text_encoder"], parts["tokenizer"]
    pipe = pp.PaintByExamplePipeline(**parts, image_encoder=ready(PaintByExampleImageEncoder(image_config(), HIDDEN)))
    call = {"image": image(), "mask_image": mask(), "example_image": image(seed=1)}
    return Tiny(pipe, {**call, "num_inference_steps": 2, "output_type": "np"}, UNET)


def unclip_parts():
    """Components of both StableUnCLIP pipelines: a UNet that also gets an image embedding."""
    return {
        "image_normalizer": ready(StableUnCLIPImageNormalizer(HIDDEN)),
        "image_noising_scheduler": scheduler(pp.DDPMScheduler),
        "tokenizer": tokenizer(),
        "text_encoder": text_encoder(),
        "unet": unet(**V2, class_embed_type="projection", projection_class_embeddings_input_dim=2 * HIDDEN),
        "scheduler": scheduler(prediction_type="v_prediction"),
        "vae": vae(),
    }


def prior():
    return ready(
        pp.PriorTransformer(
            num_attention_heads=2, attention_head_dim=16, num_layers=1, embedding_dim=HIDDEN, num_embeddings=24
        )
    )


def prior_scheduler():
    return pp.UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample")


@family
def StableUnCLIPPipeline():
    pipe = pp.StableUnCLIPPipeline(
        prior_tokenizer=tokenizer(),
        prior_text_encoder=text_encoder_with_projection(),
        prior=prior(),
        prior_scheduler=prior_scheduler(),
        **unclip_parts(),
    )
    return Tiny(pipe, {**TEXT, "prior_num_inference_steps": 2}, UNET)


@family
def StableUnCLIPImg2ImgPipeline():
    pipe = pp.StableUnCLIPImg2ImgPipeline(
        feature_extractor=image_processor(), image_encoder=image_encoder(), **unclip_parts()
    )
    return Tiny(pipe, {**TEXT, "image": image()}, UNET)


def super_resolution():
    """A UNet without text, whose attention is not in a Transformer2DModel."""
    return ready(
        pp.UNet2DModel(
            sample_size=32,
            in_channels=6,
            layers_per_block=1,
            block_out_channels=(32, 32),
            down_block_types=2 * ("ResnetDownsampleBlock2D",),
            up_block_types=2 * ("ResnetUpsampleBlock2D",),
            resnet_time_scale_shift="scale_shift",
        )
    )


def unclip_decoder_parts():
    """Components of both UnCLIP pipelines, which have no Transformer2DModel."""
    decoder = unet(
        in_channels=3,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        class_embed_type="identity",
        resnet_time_scale_shift="scale_shift",
    )
    projection = UnCLIPTextProjModel(
        clip_embeddings_dim=HIDDEN, time_embed_dim=4 * 32, cross_attention_dim=HIDDEN, clip_extra_context_tokens=4
    )
    return {
        "decoder": decoder,
        "text_encoder": text_encoder_with_projection(),
        "tokenizer": tokenizer(),
        "text_proj": ready(projection),
        "super_res_first": super_resolution(),
        "super_res_last": super_resolution(),
        "decoder_scheduler": pp.UnCLIPScheduler(variance_type="learned_range"),
        "super_res_scheduler": pp.UnCLIPScheduler(variance_type="fixed_small_log"),
    }


@family
def UnCLIPPipeline():
    pipe = pp.UnCLIPPipeline(prior=prior(), prior_scheduler=prior_scheduler(), **unclip_decoder_parts())
    steps = {f"{stage}_num_inference_steps": 2 for stage in ("prior", "decoder", "super_res")}
    return Tiny(pipe, {"prompt": "a fox", "output_type": "np", **steps}, ())


@family
def UnCLIPImageVariationPipeline():
    pipe = pp.UnCLIPImageVariationPipeline(
        feature_extractor=image_processor(), image_encoder=image_encoder(), **unclip_decoder_parts()
    )
    steps = {f"{stage}_num_inference_steps": 2 for stage in ("decoder", "super_res")}
    return Tiny(pipe, {"image": image(), "output_type": "np", **steps}, ())


# DeepFloyd IF: denoises pixels instead of latents, with attention outside of a Transformer2DModel


def floyd(**changes):
    model = unet(
        **{
            "in_channels": 3,
            "out_channels": 6,
            "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
            "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            "addition_embed_type": "text",
            "addition_embed_type_num_heads": 2,
            "cross_attention_norm": "group_norm",
            "attention_head_dim": 16,
            "encoder_hid_dim": 24,
            "encoder_hid_dim_type": "text_proj",
            "resnet_time_scale_shift": "scale_shift",
            "time_embedding_act_fn": "gelu",
            **changes,
        }
    )
    noise = scheduler(pp.DDPMScheduler, variance_type="learned_range")
    none = ("tokenizer", "text_encoder", "safety_checker", "feature_extractor", "watermarker")
    return {**dict.fromkeys(none), "unet": model, "scheduler": noise, "requires_safety_checker": False}


def floyd_upscaler():
    model = {"in_channels": 6, "class_embed_type": "timestep", "sample_size": 32}
    return {**floyd(**model), "image_noising_scheduler": scheduler(pp.DDPMScheduler)}


def floyd_call(**changes):
    embeds = {name: paddle.randn([1, 7, 24]) for name in ("prompt_embeds", "negative_prompt_embeds")}
    return {**embeds, "num_inference_steps": 2, "output_type": "np", **changes}


@family
def IFPipeline():
    return Tiny(pp.IFPipeline(**floyd()), floyd_call(), ())


@family
def IFImg2ImgPipeline():
    return Tiny(pp.IFImg2ImgPipeline(**floyd()), floyd_call(image=image(16), strength=1.0), ())


@family
def IFInpaintingPipeline():
    return Tiny(pp.IFInpaintingPipeline(**floyd()), floyd_call(image=image(16), mask_image=mask(16)), ())


@family
def IFSuperResolutionPipeline():
    return Tiny(pp.IFSuperResolutionPipeline(**floyd_upscaler()), floyd_call(image=image(16)), ())


@family
def IFImg2ImgSuperResolutionPipeline():
    call = floyd_call(image=image(16), original_image=image(), strength=1.0)
    return Tiny(pp.IFImg2ImgSuperResolutionPipeline(**floyd_upscaler()), call, ())


@family
def IFInpaintingSuperResolutionPipeline():
    call = floyd_call(image=image(16), original_image=image(), mask_image=mask(), strength=1.0)
    return Tiny(pp.IFInpaintingSuperResolutionPipeline(**floyd_upscaler()), call, ())
