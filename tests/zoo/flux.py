"""FLUX's transformer, which ppdiffusers 0.29.0 does not have: a double of our own with its names and its calls."""

import math
from types import SimpleNamespace

import paddle
import paddle.nn.functional as F
from paddle import nn

HEADS, WIDTH = 2, 8
AXES = (2, 2, 4)  # channels of a head that rotate by frame, row and column
TEXT = 5  # tokens


class FluxPosEmbed(nn.Layer):
    def forward(self, ids):  # [S, 3]
        angles = []
        for i, channels in enumerate(AXES):
            frequencies = 100.0 ** -(paddle.arange(0, channels, 2, dtype="float32") / channels)
            angles.append(ids[:, i].cast("float32").unsqueeze(1) * frequencies)
        angles = paddle.concat(angles, axis=1).repeat_interleave(2, axis=1)
        return paddle.cos(angles), paddle.sin(angles)


class RMSNorm(nn.Layer):
    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([WIDTH], default_initializer=nn.initializer.Uniform(0.5, 1.5))

    def forward(self, x):
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class FluxAttnProcessor2_0:
    """Complex numbers in place of pairs, so that it is another computation than the package's."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        def heads(x, norm):
            x = x.reshape([x.shape[0], -1, HEADS, WIDTH]).transpose([0, 2, 1, 3])
            return x if norm is None else norm(x)

        query, key, value = (
            heads(getattr(attn, f"to_{name}")(hidden_states), getattr(attn, f"norm_{name}", None)) for name in "qkv"
        )
        text = 0
        if encoder_hidden_states is not None:
            text = encoder_hidden_states.shape[1]
            added = (
                heads(getattr(attn, f"add_{n}_proj")(encoder_hidden_states), getattr(attn, f"norm_added_{n}", None))
                for n in "qkv"
            )
            query, key, value = (
                paddle.concat([first, own], 2) for first, own in zip(added, (query, key, value), strict=True)
            )
        if image_rotary_emb is not None:
            turn = paddle.complex(image_rotary_emb[0][:, ::2], image_rotary_emb[1][:, ::2])

            def rotate(x):
                turned = paddle.as_complex(x.reshape([*x.shape[:-1], -1, 2])) * turn
                return paddle.as_real(turned).reshape(x.shape)

            query, key = rotate(query), rotate(key)
        scores = F.softmax(query @ key.transpose([0, 1, 3, 2]) / math.sqrt(WIDTH), axis=-1)
        out = (scores @ value).transpose([0, 2, 1, 3]).flatten(2)
        if encoder_hidden_states is None:
            return out
        image = out[:, text:]
        for layer in attn.to_out:
            image = layer(image)
        return image, attn.to_add_out(out[:, :text])


class Attention(nn.Layer):
    def __init__(self, is_joint):
        super().__init__()
        channels = HEADS * WIDTH
        self.heads, self.scale, self.processor = HEADS, WIDTH**-0.5, FluxAttnProcessor2_0()
        self.inner_dim = self.out_dim = channels
        for name in "qkv":
            setattr(self, f"to_{name}", nn.Linear(channels, channels))
            if is_joint:
                setattr(self, f"add_{name}_proj", nn.Linear(channels, channels))
        self.norm_q, self.norm_k = RMSNorm(), RMSNorm()
        if is_joint:
            self.norm_added_q, self.norm_added_k = RMSNorm(), RMSNorm()
            self.to_out = nn.LayerList([nn.Linear(channels, channels), nn.Dropout(0.0)])
            self.to_add_out = nn.Linear(channels, channels)

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, **others):
        return self.processor(self, hidden_states, encoder_hidden_states, attention_mask, **others)


class Modulated(nn.Layer):
    """A norm that also returns the gate of its branch."""

    def forward(self, x, emb):
        channels = x.shape[-1]
        return F.layer_norm(x, [channels]) * (1 + emb.unsqueeze(1)), paddle.tanh(emb)


class FluxTransformerBlock(nn.Layer):
    def __init__(self):
        super().__init__()
        channels = HEADS * WIDTH
        self.norm1, self.norm1_context, self.attn = Modulated(), Modulated(), Attention(True)
        self.ff, self.ff_context = (
            nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))
            for _ in range(2)
        )

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        (image, gate), (text, text_gate) = (
            self.norm1(hidden_states, emb=temb),
            self.norm1_context(encoder_hidden_states, emb=temb),
        )
        image, text = self.attn(
            hidden_states=image,
            encoder_hidden_states=text,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        hidden_states = hidden_states + gate.unsqueeze(1) * image
        encoder_hidden_states = encoder_hidden_states + text_gate.unsqueeze(1) * text
        return encoder_hidden_states + self.ff_context(encoder_hidden_states), hidden_states + self.ff(hidden_states)


class FluxSingleTransformerBlock(nn.Layer):
    def __init__(self):
        super().__init__()
        channels = HEADS * WIDTH
        self.norm, self.attn = Modulated(), Attention(False)
        self.proj_mlp, self.act_mlp = nn.Linear(channels, 2 * channels), nn.GELU()
        self.proj_out = nn.Linear(3 * channels, channels)

    def forward(self, hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        tokens, gate = self.norm(hidden_states, emb=temb)
        attended = self.attn(hidden_states=tokens, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {}))
        both = paddle.concat([attended, self.act_mlp(self.proj_mlp(tokens))], axis=2)
        return hidden_states + gate.unsqueeze(1) * self.proj_out(both)


class Blocks(nn.Layer):
    """Two joint and two single-stream blocks, with the embeddings of what they get."""

    def __init__(self):
        super().__init__()
        channels = HEADS * WIDTH
        self.pos_embed = FluxPosEmbed()
        self.time, self.context_embedder, self.x_embedder = (nn.Linear(i, channels) for i in (1, 6, 4))
        self.transformer_blocks = nn.LayerList([FluxTransformerBlock() for _ in range(2)])
        self.single_transformer_blocks = nn.LayerList([FluxSingleTransformerBlock() for _ in range(2)])

    def run(self, image, text, timestep, img_ids, txt_ids, joint_attention_kwargs):
        """The image tokens after each joint block, and after each single-stream block."""
        after, after_single = [], []
        temb = self.time(timestep.unsqueeze(1))
        rows = self.pos_embed(paddle.concat([txt_ids, img_ids], axis=0))
        shared = {"temb": temb, "image_rotary_emb": rows, "joint_attention_kwargs": joint_attention_kwargs}
        for block in self.transformer_blocks:
            text, image = block(hidden_states=image, encoder_hidden_states=text, **shared)
            after.append(image)
        both = paddle.concat([text, image], axis=1)
        for block in self.single_transformer_blocks:
            both = block(hidden_states=both, **shared)
            after_single.append(both[:, text.shape[1] :])
        return after, after_single


class FluxTransformer2DModel(Blocks):
    def __init__(self):
        super().__init__()
        self.proj_out = nn.Linear(HEADS * WIDTH, 4)

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        pooled_projections=None,
        timestep=None,
        img_ids=None,
        txt_ids=None,
        guidance=None,
        joint_attention_kwargs=None,
        return_dict=True,
    ):
        image, text = self.x_embedder(hidden_states), self.context_embedder(encoder_hidden_states)
        after = self.run(image, text, timestep, img_ids, txt_ids, joint_attention_kwargs)
        return SimpleNamespace(sample=self.proj_out(after[1][-1]))


class FluxControlNetModel(Blocks):
    """A ControlNet, with a token for the kind of its image if there are several kinds."""

    def __init__(self, num_mode=None):
        super().__init__()
        channels = HEADS * WIDTH
        self.union, self.controlnet_x_embedder = num_mode is not None, nn.Linear(4, channels)
        if self.union:
            self.controlnet_mode_embedder = nn.Embedding(num_mode, channels)
        self.controlnet_blocks, self.controlnet_single_blocks = (
            nn.LayerList([nn.Linear(channels, channels) for _ in range(2)]) for _ in range(2)
        )

    def forward(
        self,
        hidden_states,
        controlnet_cond,
        controlnet_mode=None,
        conditioning_scale=1.0,
        encoder_hidden_states=None,
        pooled_projections=None,
        timestep=None,
        img_ids=None,
        txt_ids=None,
        guidance=None,
        joint_attention_kwargs=None,
    ):
        image = self.x_embedder(hidden_states) + self.controlnet_x_embedder(controlnet_cond)
        text = self.context_embedder(encoder_hidden_states)
        if self.union:
            text = paddle.concat([self.controlnet_mode_embedder(controlnet_mode), text], axis=1)
            txt_ids = paddle.concat([txt_ids[:1], txt_ids], axis=0)
        after = self.run(image, text, timestep, img_ids, txt_ids, joint_attention_kwargs)
        layers = (self.controlnet_blocks, self.controlnet_single_blocks)
        joint, single = (
            [conditioning_scale * layer(x) for layer, x in zip(group, tokens, strict=True)]
            for group, tokens in zip(layers, after, strict=True)
        )
        return SimpleNamespace(controlnet_block_samples=joint, controlnet_single_block_samples=single)


def double(cls=FluxTransformer2DModel, **config):
    """The double, with weights from seed 0."""
    paddle.seed(0)
    model = cls(**config)
    model.eval()
    return model


def inputs(h=6, w=8, batch=2, text=TEXT):
    """Arguments of one pass, as the pipeline makes them."""
    paddle.seed(1)
    rows, columns = (axis.flatten() for axis in paddle.meshgrid(paddle.arange(h), paddle.arange(w)))
    return {
        "hidden_states": paddle.randn([batch, h * w, 4]),
        "encoder_hidden_states": paddle.randn([batch, text, 6]),
        "pooled_projections": paddle.randn([batch, 6]),
        "timestep": paddle.full([batch], 0.5),
        "img_ids": paddle.stack([paddle.zeros_like(rows), rows, columns], axis=1).cast("float32"),
        "txt_ids": paddle.zeros([text, 3]),
    }
