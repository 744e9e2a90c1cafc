"""CogVideoX, Wan and HunyuanVideo, which ppdiffusers 0.29.0 does not have: doubles with their names and their calls.

Each is a model of two blocks (HunyuanVideo: one of each kind) over videos [B, …] of 3 frames, and `inputs` of a pass.
"""

from types import SimpleNamespace

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from .flux import Modulated

HEADS, WIDTH = 2, 16
CHANNELS = HEADS * WIDTH
FRAMES, TEXT = 3, 5
LATENTS, STATES = 4, 8  # channels of latents, and of text embeddings
IMAGE = 257  # tokens of an image, in Wan's image-to-video
AXES = (8, 4, 4)  # channels of a head that rotate by frame, row and column


def rotary_rows(frames, h, w):
    """Cosines and sines [F·h·w, WIDTH], each twice, as pipelines pass them."""
    positions = np.stack(np.meshgrid(*map(np.arange, (frames, h, w)), indexing="ij"), axis=-1).reshape(-1, 3)
    angles = np.concatenate(
        [positions[:, i : i + 1] * 20.0 ** -(np.arange(0, n, 2) / n) for i, n in enumerate(AXES)], axis=1
    ).repeat(2, axis=1)
    return tuple(paddle.to_tensor(x.astype("float32")) for x in (np.cos(angles), np.sin(angles)))


def split(x):
    return x.reshape([x.shape[0], -1, HEADS, WIDTH]).transpose([0, 2, 1, 3])


def turn(x, numbers):
    """Rotate by complex numbers, so that it is another computation than the package's."""
    turned = paddle.as_complex(x.cast(numbers.real().dtype).reshape([*x.shape[:-1], -1, 2])) * numbers
    return paddle.as_real(turned).reshape(x.shape).cast(x.dtype)


def complex_rows(rows):
    return paddle.complex(rows[0][:, ::2], rows[1][:, ::2])


def attend(query, key, value, mask=None):
    scores = query @ key.transpose([0, 1, 3, 2]) * WIDTH**-0.5
    if mask is not None:
        scores = paddle.where(mask.expand_as(scores), scores, paddle.full_like(scores, -np.inf))
    return (F.softmax(scores, axis=-1) @ value).transpose([0, 2, 1, 3]).flatten(2)


class RMSNorm(nn.Layer):
    def __init__(self, width):
        super().__init__()
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Uniform(0.5, 1.5))

    def forward(self, x):
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class CogVideoXAttnProcessor2_0:
    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None):
        text = encoder_hidden_states.shape[1]
        both = paddle.concat([encoder_hidden_states, hidden_states], axis=1)
        query, key = attn.norm_q(split(attn.to_q(both))), attn.norm_k(split(attn.to_k(both)))
        if image_rotary_emb is not None:
            numbers = complex_rows(image_rotary_emb)
            query, key = (paddle.concat([x[:, :, :text], turn(x[:, :, text:], numbers)], axis=2) for x in (query, key))
        out = attn.to_out[1](attn.to_out[0](attend(query, key, split(attn.to_v(both)))))
        return out[:, text:], out[:, :text]


class WanAttnProcessor2_0:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        keys, of_image = hidden_states if encoder_hidden_states is None else encoder_hidden_states, 0
        if attn.add_k_proj is not None:
            image, keys = keys[:, :IMAGE], keys[:, IMAGE:]
        query, key = split(attn.norm_q(attn.to_q(hidden_states))), split(attn.norm_k(attn.to_k(keys)))
        if rotary_emb is not None:
            query, key = turn(query, rotary_emb), turn(key, rotary_emb)
        if attn.add_k_proj is not None:
            of_image = attend(query, split(attn.norm_added_k(attn.add_k_proj(image))), split(attn.add_v_proj(image)))
        return attn.to_out[1](attn.to_out[0](attend(query, key, split(attn.to_v(keys))) + of_image))


class HunyuanVideoAttnProcessor2_0:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        image, numbers = hidden_states.shape[1], complex_rows(image_rotary_emb)
        is_joint = attn.add_q_proj is not None
        tokens = hidden_states if is_joint else paddle.concat([hidden_states, encoder_hidden_states], axis=1)
        query, key = attn.norm_q(split(attn.to_q(tokens))), attn.norm_k(split(attn.to_k(tokens)))
        value = split(attn.to_v(tokens))
        query, key = (paddle.concat([turn(x[:, :, :image], numbers), x[:, :, image:]], axis=2) for x in (query, key))
        if is_joint:
            text = encoder_hidden_states
            query = paddle.concat([query, attn.norm_added_q(split(attn.add_q_proj(text)))], axis=2)
            key = paddle.concat([key, attn.norm_added_k(split(attn.add_k_proj(text)))], axis=2)
            value = paddle.concat([value, split(attn.add_v_proj(text))], axis=2)
        out = attend(query, key, value, attention_mask)
        out, text = out[:, :image], out[:, image:]
        if is_joint:
            out, text = attn.to_out[1](attn.to_out[0](out)), attn.to_add_out(text)
        return out, text


class Attention(nn.Layer):
    def __init__(self, processor, norm, is_joint=False, has_out=True, has_image=False):
        super().__init__()
        self.heads, self.scale, self.processor = HEADS, WIDTH**-0.5, processor
        self.inner_dim = self.out_dim = CHANNELS
        self.norm_q, self.norm_k = norm(), norm()
        self.add_q_proj = self.add_k_proj = None
        for name in "qkv":
            setattr(self, f"to_{name}", nn.Linear(CHANNELS, CHANNELS))
            if is_joint or (has_image and name != "q"):
                setattr(self, f"add_{name}_proj", nn.Linear(CHANNELS, CHANNELS))
        if has_image:
            self.norm_added_k = norm()
        if is_joint:
            self.norm_added_q, self.norm_added_k = norm(), norm()
            self.to_add_out = nn.Linear(CHANNELS, CHANNELS)
        if has_out:
            self.to_out = nn.LayerList([nn.Linear(CHANNELS, CHANNELS), nn.Dropout(0.0)])

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, **others):
        return self.processor(self, hidden_states, encoder_hidden_states, attention_mask, **others)


def mlp():
    return nn.Sequential(nn.Linear(CHANNELS, 2 * CHANNELS), nn.GELU(), nn.Linear(2 * CHANNELS, CHANNELS))


def modulated(x, emb):
    return F.layer_norm(x, [CHANNELS]) * (1 + emb.unsqueeze(1))


class CogVideoXBlock(nn.Layer):
    def __init__(self):
        super().__init__()
        self.attn1 = Attention(CogVideoXAttnProcessor2_0(), lambda: nn.LayerNorm(WIDTH))
        self.ff = mlp()

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None):
        image, text = self.attn1(
            hidden_states=modulated(hidden_states, temb),
            encoder_hidden_states=modulated(encoder_hidden_states, temb),
            image_rotary_emb=image_rotary_emb,
        )
        image, text = hidden_states + image, encoder_hidden_states + text
        out = self.ff(modulated(paddle.concat([text, image], axis=1), temb))
        return image + out[:, text.shape[1] :], text + out[:, : text.shape[1]]


class WanTransformerBlock(nn.Layer):
    def __init__(self, has_image):
        super().__init__()
        self.attn1, self.attn2 = (
            Attention(WanAttnProcessor2_0(), lambda: RMSNorm(CHANNELS), has_image=is_added)
            for is_added in (False, has_image)
        )
        self.ffn = mlp()

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
        x = hidden_states + self.attn1(hidden_states=modulated(hidden_states, temb), rotary_emb=rotary_emb)
        x = x + self.attn2(hidden_states=x, encoder_hidden_states=encoder_hidden_states)
        return x + self.ffn(modulated(x, temb))


class HunyuanVideoTransformerBlock(nn.Layer):
    def __init__(self):
        super().__init__()
        self.attn = Attention(HunyuanVideoAttnProcessor2_0(), lambda: RMSNorm(WIDTH), is_joint=True)
        self.ff, self.ff_context = mlp(), mlp()

    def forward(self, hidden_states, encoder_hidden_states, temb, attention_mask=None, freqs_cis=None):
        image, text = self.attn(
            hidden_states=modulated(hidden_states, temb),
            encoder_hidden_states=modulated(encoder_hidden_states, temb),
            attention_mask=attention_mask,
            image_rotary_emb=freqs_cis,
        )
        image, text = hidden_states + image, encoder_hidden_states + text
        return image + self.ff(modulated(image, temb)), text + self.ff_context(modulated(text, temb))


class HunyuanVideoSingleTransformerBlock(nn.Layer):
    def __init__(self):
        super().__init__()
        self.attn = Attention(HunyuanVideoAttnProcessor2_0(), lambda: RMSNorm(WIDTH), has_out=False)
        self.norm = Modulated()
        self.proj_mlp, self.act_mlp = nn.Linear(CHANNELS, 2 * CHANNELS), nn.GELU()
        self.proj_out = nn.Linear(3 * CHANNELS, CHANNELS)

    def forward(self, hidden_states, encoder_hidden_states, temb, attention_mask=None, image_rotary_emb=None):
        text = encoder_hidden_states.shape[1]
        both = paddle.concat([hidden_states, encoder_hidden_states], axis=1)
        tokens, gate = self.norm(both, emb=temb)
        attended = self.attn(
            hidden_states=tokens[:, :-text],
            encoder_hidden_states=tokens[:, -text:],
            attention_mask=attention_mask,
            image_rotary_emb=image_rotary_emb,
        )
        merged = paddle.concat([paddle.concat(attended, axis=1), self.act_mlp(self.proj_mlp(tokens))], axis=2)
        both = both + gate.unsqueeze(1) * self.proj_out(merged)
        return both[:, :-text], both[:, -text:]


class CogVideoXPatchEmbed(nn.Layer):
    """Patches of 2×2 in each frame, after the text; with positions or without."""

    def __init__(self, has_positions):
        super().__init__()
        self.proj, self.text_proj = nn.Conv2D(LATENTS, CHANNELS, 2, stride=2), nn.Linear(STATES, CHANNELS)
        self.has_positions = has_positions

    def forward(self, text_embeds, image_embeds):
        batch = image_embeds.shape[0]
        image = self.proj(image_embeds.flatten(0, 1)).flatten(2).transpose([0, 2, 1]).reshape([batch, -1, CHANNELS])
        text = self.text_proj(text_embeds)
        return paddle.concat([text, image], axis=1) + (
            self._get_positional_embeddings(text.shape[1], image.shape[1]) if self.has_positions else 0.0
        )

    def _get_positional_embeddings(self, text, image):
        waves = paddle.sin(1.7 * paddle.arange(image * CHANNELS, dtype="float32"))
        return paddle.concat([paddle.zeros([1, text, CHANNELS]), 0.3 * waves.reshape([1, image, CHANNELS])], axis=1)


class CogVideoXTransformer3DModel(nn.Layer):
    def __init__(self, use_rotary_positional_embeddings=False):
        super().__init__()
        self.patch_embed = CogVideoXPatchEmbed(not use_rotary_positional_embeddings)
        self.time = nn.Linear(1, CHANNELS)
        self.transformer_blocks = nn.LayerList([CogVideoXBlock() for _ in range(2)])
        self.proj_out = nn.Linear(CHANNELS, 4 * LATENTS)

    def forward(self, hidden_states, encoder_hidden_states, timestep, image_rotary_emb=None):
        temb = self.time(timestep.cast("float32").unsqueeze(1) / 1000)
        both, text = self.patch_embed(encoder_hidden_states, hidden_states), encoder_hidden_states.shape[1]
        text, image = both[:, :text], both[:, text:]
        for block in self.transformer_blocks:
            image, text = block(
                hidden_states=image, encoder_hidden_states=text, temb=temb, image_rotary_emb=image_rotary_emb
            )
        return SimpleNamespace(sample=self.proj_out(image))


class CogVideoXTransformer3DVCtrlModel(CogVideoXTransformer3DModel):
    """The model that VCtrl controls; its residuals make no difference to merging."""


class VCtrlAttnProcessor2_0:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        numbers = complex_rows(image_rotary_emb)
        query, key = (
            turn(norm(split(project(hidden_states))), numbers)
            for norm, project in ((attn.norm_q, attn.to_q), (attn.norm_k, attn.to_k))
        )
        return attn.to_out[1](attn.to_out[0](attend(query, key, split(attn.to_v(hidden_states)))))


class VCtrlBlock(nn.Layer):
    def __init__(self):
        super().__init__()
        self.attn1 = Attention(VCtrlAttnProcessor2_0(), lambda: nn.LayerNorm(WIDTH))
        self.ff = mlp()

    def forward(self, hidden_states, temb, image_rotary_emb=None):
        x = hidden_states + self.attn1(hidden_states=modulated(hidden_states, temb), image_rotary_emb=image_rotary_emb)
        return x + self.ff(modulated(x, temb))


class VCtrlPatchEmbed(nn.Layer):
    def __init__(self, channels):
        super().__init__()
        self.proj = nn.Conv2D(channels, CHANNELS, 2, stride=2)

    def forward(self, image_embeds):
        tokens = self.proj(image_embeds.flatten(0, 1)).flatten(2).transpose([0, 2, 1])
        return tokens.reshape([image_embeds.shape[0], -1, CHANNELS])


class VCtrlModel(nn.Layer):
    """CogVideoX's ControlNet: two blocks, without text."""

    def __init__(self):
        super().__init__()
        self.sample_patch_embed, self.cond_patch_embed = VCtrlPatchEmbed(LATENTS), VCtrlPatchEmbed(LATENTS + 1)
        self.time = nn.Linear(1, CHANNELS)
        self.transformer_blocks = nn.LayerList([VCtrlBlock() for _ in range(2)])

    def forward(self, sample, timestep, v_cond, image_rotary_emb=None):
        x, temb = self.sample_patch_embed(sample), self.time(timestep.cast("float32").unsqueeze(1) / 1000)
        x, features = x + self.cond_patch_embed(v_cond), []
        for block in self.transformer_blocks:
            x = block(hidden_states=x, temb=temb, image_rotary_emb=image_rotary_emb)
            features.append(x)
        return SimpleNamespace(vctrl_block_samples=features)


class Rope(nn.Layer):
    """Rotary rows of a video [B, C, F, H, W]: complex as Wan's, or cosines and sines as HunyuanVideo's."""

    def __init__(self, is_complex):
        super().__init__()
        self.is_complex = is_complex

    def forward(self, hidden_states):
        frames, h, w = hidden_states.shape[2:]
        rows = rotary_rows(frames, h // 2, w // 2)
        return complex_rows(rows).reshape([1, 1, -1, WIDTH // 2]).cast("complex128") if self.is_complex else rows


class WanTransformer3DModel(nn.Layer):
    def __init__(self, has_image=False):
        super().__init__()
        self.rope = Rope(is_complex=True)
        self.patch_embedding = nn.Conv3D(LATENTS, CHANNELS, (1, 2, 2), stride=(1, 2, 2))
        self.time, self.text = nn.Linear(1, CHANNELS), nn.Linear(STATES, CHANNELS)
        self.image_embedder = nn.Linear(STATES, CHANNELS) if has_image else None
        self.blocks = nn.LayerList([WanTransformerBlock(has_image) for _ in range(2)])
        self.proj_out = nn.Linear(CHANNELS, 4 * LATENTS)

    def forward(self, hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None):
        rows = self.rope(hidden_states)
        x = self.patch_embedding(hidden_states).flatten(2).transpose([0, 2, 1])
        temb, text = self.time(timestep.cast("float32").unsqueeze(1) / 1000), self.text(encoder_hidden_states)
        if self.image_embedder is not None:
            text = paddle.concat([self.image_embedder(encoder_hidden_states_image), text], axis=1)
        for block in self.blocks:
            x = block(x, text, temb, rows)
        return SimpleNamespace(sample=self.proj_out(x))


class HunyuanVideoPatchEmbed(nn.Layer):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv3D(LATENTS, CHANNELS, (1, 2, 2), stride=(1, 2, 2))

    def forward(self, hidden_states):
        return self.proj(hidden_states).flatten(2).transpose([0, 2, 1])


class HunyuanVideoTransformer3DModel(nn.Layer):
    def __init__(self):
        super().__init__()
        self.rope, self.x_embedder = Rope(is_complex=False), HunyuanVideoPatchEmbed()
        self.time, self.text = nn.Linear(1, CHANNELS), nn.Linear(STATES, CHANNELS)
        self.transformer_blocks = nn.LayerList([HunyuanVideoTransformerBlock()])
        self.single_transformer_blocks = nn.LayerList([HunyuanVideoSingleTransformerBlock()])
        self.proj_out = nn.Linear(CHANNELS, 4 * LATENTS)

    def forward(self, hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, **others):
        rows, image = self.rope(hidden_states), self.x_embedder(hidden_states)
        temb, text = self.time(timestep.cast("float32").unsqueeze(1) / 1000), self.text(encoder_hidden_states)
        mask = paddle.concat([paddle.ones([*image.shape[:2]]), encoder_attention_mask.cast("float32")], axis=1) > 0
        mask = mask.unsqueeze([1, 2])
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            image, text = block(image, text, temb, mask, rows)
        return SimpleNamespace(sample=self.proj_out(image))
