"""The table of model families: all that this package knows of a model's classes, its blocks and their layers.

A class that ppdiffusers 0.29.0 does not have is named by a string.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ppdiffusers import ControlNetModel, SD3Transformer2DModel, UNet2DConditionModel
from ppdiffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from ppdiffusers.models.transformer_2d import Transformer2DModel
from ppdiffusers.models.transformer_temporal import TransformerSpatioTemporalModel

from .stream import Text


@dataclass(frozen=True)
class Projections:
    """The names of the layers of an attention that compute queries, keys, values and the output."""

    q: str = "to_q"
    k: str = "to_k"
    v: str = "to_v"
    out: str = "to_out"  # one layer, or several that run one after the other
    norm_q: str = "norm_q"  # norms of queries and keys, in each head or across heads; an attention may lack them
    norm_k: str = "norm_k"


@dataclass(frozen=True)
class Attention:
    """How an attention layer names its parts."""

    image: Projections = Projections()
    # The projections of a second stream, of the text in joint attention; its keys and values attend with the image.
    text: Projections = Projections(
        "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k"
    )
    heads: str = "heads"  # number of heads
    scale: str = "scale"  # of the scores
    processor: str | None = "processor"  # computes the attention; None: the layer does

    def computed_by(self, layer: Any) -> Any:
        """The processor of an attention layer, or the layer itself."""
        return layer if self.processor is None else getattr(layer, self.processor)


@dataclass(frozen=True)
class BlockSpec:
    """Describes a class of transformer blocks. Layers are named by the block's attributes; a block may lack some."""

    # The layers around which tokens can merge, by the names of the `merge_…` settings.
    attn: tuple[str, ...] = ("attn1",)
    crossattn: tuple[str, ...] = ("attn2",)
    mlp: tuple[str, ...] = ("ff",)
    only_crossattn: str = "only_cross_attention"  # attribute that is true if `attn` is cross-attention too
    chunk_size: str = "_chunk_size"  # attribute that is not None if the MLP gets the tokens in chunks
    tokens: str = "hidden_states"  # argument of the block that is its tokens
    text: Text | None = None  # where the text is that attends with the image in `attn`; None: there is none
    gets_text: Text | None = None  # where it is in `tokens`, if text and image are one input of the block
    timestep: str | None = None  # argument of the block that is the timestep, if it is not an embedding of it
    text_layers: tuple[str, ...] = ()  # layers of the block that get the text alone
    follows_tomesd: bool = False  # whether queries can merge: the class of blocks in whose UNets tomesd merges

    @property
    def merging_layers(self) -> tuple[str, ...]:
        """All layers of the block around which tokens can merge."""
        return self.attn + self.crossattn + self.mlp


@dataclass(frozen=True)
class Family:
    """Describes models that are built alike: one entry of `FAMILIES`."""

    name: str  # for messages and documents
    transformers: tuple[type | str, ...]  # models whose lists of blocks contain these blocks
    blocks: Mapping[type | str, BlockSpec]  # by the class of a block
    # Paths in the transformer: the input of the first that exists has the height and width of the token grid.
    grid_layers: tuple[str, ...]
    controlnets: tuple[type | str, ...] = ()  # those models that are ControlNets
    # Layers of the denoiser: the first argument of the first that exists is the timestep, [B] from 0 to 1000.
    timestep_inputs: tuple[str, ...] = ()
    is_flow: bool = False  # whether timesteps are shares of noise, in thousandths
    has_frame_rows: bool = False  # whether a batch may have several rows for each timestep, the frames of a video
    block_lists: tuple[str, ...] = ("transformer_blocks",)
    attention: Attention = field(default_factory=Attention)
    positions: str | None = None  # argument of an attention by which queries and keys rotate
    # The only processor whose attention can merge, where `attach.computed` computes it: queries and keys rotate, or
    # text and image share a softmax.
    only_processor: str | None = None
    has_mask: bool = False  # whether an attention takes a mask of the text
    # Argument of a denoiser: the positions of its image tokens. The grid layer gets them after those of the text, in
    # place of a feature map.
    grid_positions: str | None = None
    packs_latents: bool = False  # whether the pipeline packs 2×2 latent pixels into one token
    has_frames: bool = False  # whether the frames of a video are one sequence of tokens
    # What counting MACs assumes. Without text_tokens only the models of `counted` are counted.
    counted: tuple[type | str, ...] = ()
    text_tokens: int | None = None  # that the pipeline passes by default; None: as many as its tokenizer allows
    text_layers: tuple[str, ...] = ()  # layers around the blocks that get the text alone
    image_tokens: int = 0  # tokens of an image that cross-attention also attends to, if it has projections for them
    image_layers: tuple[str, ...] = ()  # layers around the blocks that get those image tokens
    timestep_layers: tuple[str, ...] = ("time", "norm")  # start of the names of layers that get one row per image
    uncounted: tuple[str, ...] = ()  # attributes that are set in models with layers that cannot be counted


def _joint(**fields: Any) -> BlockSpec:
    """A block whose attention sees text with projections of its own."""
    own: dict[str, Any] = {"crossattn": (), "text": Text.OWN_PROJECTIONS, "text_layers": ("ff_context",)}
    return BlockSpec(**{**own, **fields})


def _single_stream(text: Text, gets_text: Text | None = None) -> BlockSpec:
    """A block whose attention, over text and image as one sequence, is parallel to its MLP."""
    return BlockSpec(attn=("attn",), crossattn=(), mlp=(), text=text, gets_text=gets_text)


FAMILIES: list[Family] = [
    Family(
        name="UNets, their ControlNets, DiT and PixArt",
        transformers=(Transformer2DModel, TransformerSpatioTemporalModel),
        # The timestep is an argument in VQ-Diffusion and DiT.
        blocks={BasicTransformerBlock: BlockSpec(timestep="timestep", follows_tomesd=True)},
        grid_layers=("latent_image_embedding", "pos_embed", "norm"),  # of VQ-Diffusion; DiT and PixArt; UNets
        timestep_inputs=("time_proj", "adaln_single"),  # of UNets and ControlNets; PixArt
        has_frame_rows=True,
        controlnets=(ControlNetModel,),
        counted=(UNet2DConditionModel, ControlNetModel),
    ),
    Family(
        name="Stable Diffusion 3",
        transformers=(SD3Transformer2DModel, "SD3ControlNetModel"),
        # The second attention, over the image alone, is in some blocks of Stable Diffusion 3.5.
        blocks={JointTransformerBlock: _joint(attn=("attn", "attn2"))},
        grid_layers=("pos_embed",),
        timestep_inputs=("time_text_embed",),
        is_flow=True,
        controlnets=("SD3ControlNetModel",),
        only_processor="JointAttnProcessor2_5",
        text_tokens=77 + 256,  # of CLIP and T5
        text_layers=("context_embedder",),
    ),
    Family(
        name="FLUX",
        transformers=("FluxTransformer2DModel", "FluxControlNetModel"),
        blocks={
            "FluxTransformerBlock": _joint(attn=("attn",)),
            "FluxSingleTransformerBlock": _single_stream(Text.FIRST, Text.FIRST),
        },
        grid_layers=("pos_embed",),
        timestep_inputs=("time_text_embed",),
        is_flow=True,
        controlnets=("FluxControlNetModel",),
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        only_processor="FluxAttnProcessor2_0",
        positions="image_rotary_emb",
        grid_positions="img_ids",
        packs_latents=True,
        text_tokens=512,
        text_layers=("context_embedder",),
        # ControlNets that add a token for the kind of their image, or that embed it by convolutions.
        uncounted=("union", "input_hint_block"),
    ),
    Family(
        name="CogVideoX",
        transformers=("CogVideoXTransformer3DModel", "CogVideoXTransformer3DVCtrlModel"),
        blocks={"CogVideoXBlock": BlockSpec(crossattn=(), text=Text.SHARED_PROJECTIONS)},
        grid_layers=("patch_embed.proj",),
        timestep_inputs=("time_proj",),
        only_processor="CogVideoXAttnProcessor2_0",
        positions="image_rotary_emb",
        has_frames=True,
        text_tokens=226,
        text_layers=("text_proj",),
    ),
    Family(
        name="CogVideoX's VCtrl",
        transformers=("VCtrlModel",),
        blocks={"VCtrlBlock": BlockSpec(crossattn=())},
        grid_layers=("sample_patch_embed.proj",),
        timestep_inputs=("time_proj",),
        controlnets=("VCtrlModel",),
        only_processor="VCtrlAttnProcessor2_0",
        positions="image_rotary_emb",
        has_frames=True,
        text_tokens=226,  # of CogVideoX beside it; the block itself gets no text
    ),
    Family(
        name="Wan",
        transformers=("WanTransformer3DModel",),
        blocks={"WanTransformerBlock": BlockSpec(mlp=("ffn",))},
        grid_layers=("patch_embedding",),
        timestep_inputs=("condition_embedder",),
        is_flow=True,
        block_lists=("blocks",),
        only_processor="WanAttnProcessor2_0",
        positions="rotary_emb",
        has_frames=True,
        text_tokens=512,
        text_layers=("text_embedder",),
        image_tokens=257,
        image_layers=("image_embedder",),
    ),
    Family(
        name="HunyuanVideo",
        transformers=("HunyuanVideoTransformer3DModel",),
        blocks={
            "HunyuanVideoTransformerBlock": _joint(attn=("attn",)),
            "HunyuanVideoSingleTransformerBlock": _single_stream(Text.SHARED_PROJECTIONS),
        },
        grid_layers=("x_embedder.proj",),
        timestep_inputs=("time_text_embed",),
        is_flow=True,
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        only_processor="HunyuanVideoAttnProcessor2_0",
        positions="image_rotary_emb",
        has_mask=True,
        has_frames=True,
        text_tokens=256,
        text_layers=("context_embedder",),
    ),
]
# Transformers that are always parts of a UNet, and models whose blocks are not over the pixels of a feature map, such
# as the text UNet of Versatile Diffusion: none of them is a denoiser by itself.
INSIDE_UNET = (TransformerSpatioTemporalModel,)
WITHOUT_PIXELS = ("UNetFlatConditionModel",)
