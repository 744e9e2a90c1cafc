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
from ppdiffusers.transformers import CLIPProcessor

from .base import Tiny, family, register
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


@family
def StableDiffusionPipelineSafe():
    return Tiny(SafePipeline(**stable_diffusion()), TEXT, UNET)


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


@family
def StableDiffusionXLPipeline_IP_Adapter():
    pipe = pp.StableDiffusionXLPipeline(**sdxl(), image_encoder=image_encoder(), feature_extractor=image_processor())
    pipe.load_ip_adapter(ip_adapter(pipe.unet))
    return Tiny(pipe, {**TEXT, "ip_adapter_image": image()}, UNET)


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


def prior(**changes):
    settings = {"attention_head_dim": 16, "num_layers": 1, "embedding_dim": HIDDEN, "num_embeddings": 24, **changes}
    return ready(pp.PriorTransformer(num_attention_heads=2, **settings))


def prior_scheduler():
    return pp.UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample")


def upscaler_parts():
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
    return {
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


def without(*names, **changes):
    """The components of Stable Diffusion without some."""
    return {name: part for name, part in stable_diffusion(**changes).items() if name not in names}


def gligen_parts():
    """Each block has one more attention, over the boxes and the image tokens together."""
    components = stable_diffusion(unet=unet(attention_type="gated-text-image"))
    processor = CLIPProcessor(components["feature_extractor"], components["tokenizer"])
    project = ready(CLIPImageProjection(HIDDEN))
    return {**components, "processor": processor, "image_encoder": image_encoder(), "image_project": project}


def adapter(**changes):
    return ready(pp.T2IAdapter(num_res_blocks=1, **changes))


def adapter_of_xl():
    return adapter(channels=[32, 32, 64], downscale_factor=4, adapter_type="full_adapter_xl")


def lcm_parts():
    return stable_diffusion(unet=unet(time_cond_proj_dim=32), scheduler=scheduler(pp.LCMScheduler))


def refiner_parts():
    """SDXL's refiner: one text encoder, the second; an aesthetic score instead of a target size."""
    refiner = unet(**{**SDXL, "cross_attention_dim": HIDDEN, "projection_class_embeddings_input_dim": 5 * 8 + HIDDEN})
    return sdxl(unet=refiner, text_encoder=None, tokenizer=None, requires_aesthetics_score=True)


def paint_by_example_parts():
    encoder = ready(PaintByExampleImageEncoder(image_config(), HIDDEN))
    return {**without("text_encoder", "tokenizer", unet=unet(in_channels=9)), "image_encoder": encoder}


def prior_parts():
    encoder = {"prior_tokenizer": tokenizer(), "prior_text_encoder": text_encoder_with_projection()}
    return {**encoder, "prior": prior(), "prior_scheduler": prior_scheduler()}


def image_encoder_parts():
    return {"feature_extractor": image_processor(), "image_encoder": image_encoder()}


FROM_IMAGE = {**TEXT, "image": image()}
WITHOUT_TEXT = {"image": image(), "num_inference_steps": 2, "output_type": "np"}
BOXES = {"gligen_phrases": ["fox"], "gligen_boxes": [[0.1, 0.2, 0.6, 0.7]], "gligen_scheduled_sampling_beta": 1}
# Self-attention guidance reads the attention map of the UNet's middle; its code for that raises on Paddle 2.
GUIDANCE = {"sag_scale": 0.75 if paddle.__version__ >= "3" else 0.0}


register(
    {
        "StableDiffusionPipeline": (stable_diffusion, TEXT),
        # Like Stable Diffusion 2.x: linear projections, more heads at deeper levels, v-prediction.
        "StableDiffusionPipeline_v2": (
            lambda: stable_diffusion(unet=unet(**V2), scheduler=scheduler(prediction_type="v_prediction")),
            TEXT,
        ),
        "StableDiffusionImg2ImgPipeline": (stable_diffusion, IMAGE),
        # The UNet of an inpainting model also gets the mask and the masked image.
        "StableDiffusionInpaintPipeline": (lambda: stable_diffusion(unet=unet(in_channels=9)), INPAINT),
        "StableDiffusionInpaintPipeline_4_channels": (stable_diffusion, INPAINT),
        "StableDiffusionInpaintPipelineLegacy": (stable_diffusion, INPAINT),
        "StableDiffusionUpscalePipeline": (upscaler_parts, FROM_IMAGE),
        "StableDiffusionDepth2ImgPipeline": (
            lambda: {
                **without("safety_checker", "requires_safety_checker", unet=unet(in_channels=5)),
                "depth_estimator": None,
            },
            lambda: {**IMAGE, "depth_map": paddle.randn([1, 16, 16])},
        ),
        # Its UNet gets the image to edit; each pass has a batch of three images, not two.
        "StableDiffusionInstructPix2PixPipeline": (lambda: stable_diffusion(unet=unet(in_channels=8)), FROM_IMAGE),
        "StableDiffusionImageVariationPipeline": (
            lambda: {**without("text_encoder", "tokenizer"), "image_encoder": image_encoder()},
            WITHOUT_TEXT,
        ),
        "CycleDiffusionPipeline": (
            stable_diffusion,
            {**IMAGE, "source_prompt": "a fox", "eta": 0.1, "guidance_scale": 3, "source_guidance_scale": 1},
        ),
        "StableDiffusionPanoramaPipeline": (
            stable_diffusion,
            {**TEXT, "height": 24, "width": 32, "circular_padding": True},
        ),
        "StableDiffusionSAGPipeline": (stable_diffusion, {**TEXT, **GUIDANCE}),
        "StableDiffusionAttendAndExcitePipeline": (
            stable_diffusion,
            {**TEXT, "token_indices": [2, 3], "attn_res": (16, 16), "thresholds": {}},
        ),
        "StableDiffusionModelEditingPipeline": (lambda: stable_diffusion(with_augs=[""]), TEXT),
        "StableDiffusionDiffEditPipeline": (
            lambda: stable_diffusion(inverse_scheduler=scheduler(pp.DDIMInverseScheduler)),
            lambda: {
                **TEXT,
                "mask_image": mask(16),
                "image_latents": paddle.randn([1, 2, 4, 16, 16]),
                "inpaint_strength": 1.0,
            },
        ),
        "StableDiffusionGLIGENPipeline": (
            lambda: stable_diffusion(unet=unet(attention_type="gated")),
            {**TEXT, **BOXES},
        ),
        "StableDiffusionGLIGENTextImagePipeline": (gligen_parts, {**TEXT, **BOXES, "gligen_images": [image()]}),
        "StableDiffusionAdapterPipeline": (
            lambda: stable_diffusion(adapter=adapter(channels=[32, 64], downscale_factor=2)),
            FROM_IMAGE,
        ),
        "StableDiffusionXLPipeline": (sdxl, TEXT),
        "StableDiffusionXLImg2ImgPipeline": (sdxl, IMAGE),
        "StableDiffusionXLImg2ImgPipeline_refiner": (refiner_parts, IMAGE),
        "StableDiffusionXLInpaintPipeline": (lambda: sdxl(unet=unet(**SDXL, in_channels=9)), INPAINT),
        "StableDiffusionXLInstructPix2PixPipeline": (lambda: sdxl(unet=unet(**SDXL, in_channels=8)), FROM_IMAGE),
        "StableDiffusionXLAdapterPipeline": (lambda: sdxl(adapter=adapter_of_xl()), FROM_IMAGE),
        "LatentConsistencyModelPipeline": (lcm_parts, TEXT),
        "LatentConsistencyModelImg2ImgPipeline": (lcm_parts, IMAGE),
        # With an XLM-R text encoder; it uses CLIP's tokenizer, because there is no tiny one of XLM-R.
        "AltDiffusionPipeline": (lambda: stable_diffusion(text_encoder=roberta()), TEXT),
        "AltDiffusionImg2ImgPipeline": (lambda: stable_diffusion(text_encoder=roberta()), IMAGE),
        "PaintByExamplePipeline": (
            paint_by_example_parts,
            {**WITHOUT_TEXT, "mask_image": mask(), "example_image": image(seed=1)},
        ),
        "StableUnCLIPPipeline": (
            lambda: {**prior_parts(), **unclip_parts()},
            {**TEXT, "prior_num_inference_steps": 2},
        ),
        "StableUnCLIPImg2ImgPipeline": (lambda: {**image_encoder_parts(), **unclip_parts()}, FROM_IMAGE),
    },
    UNET,
)
# Generates an image and its depth.
register(
    {"StableDiffusionLDM3DPipeline": (lambda: stable_diffusion(vae=vae(in_channels=6, out_channels=6)), TEXT)},
    UNET,
    "rgb",
)
