"""Video UNets: pixels merge within each frame, frames never merge, and all frames share their dst positions."""

from functools import partial
from itertools import pairwise

import paddle
import pytest
from kept_keys import calls_of_attention, check_calls
from ppdiffusers import UNetMotionModel
from ppdiffusers.models.attention_processor import Attention
from zoo import parts
from zoo.noise import noise
from zoo.videos import motion_adapter, unet_3d, unet_hotshot, unet_spatio_temporal

from ppdiffusers_tome import Grid

VIDEOS, FRAMES, SIDE, TEXT = 2, 3, 8, 5
PIXELS = SIDE * SIDE


def motion():
    """AnimateDiff's UNet, with attention at levels 1 and 2."""
    return parts.ready(UNetMotionModel.from_unet2d(parts.unet(), motion_adapter()))


def video(channels, seed=0):
    return noise(VIDEOS, channels, FRAMES, SIDE, SIDE, seed=seed)


@paddle.no_grad()
def draw(model, seed=0):
    """One forward pass over two videos."""
    if hasattr(model, "add_embedding"):  # Stable Video Diffusion: frames before channels, an image instead of text
        model_input, arguments = video(8, seed).transpose([0, 2, 1, 3, 4]), {"added_time_ids": noise(VIDEOS, 3)}
        return model(model_input, paddle.to_tensor(10), noise(VIDEOS, 1, parts.HIDDEN), **arguments).sample.numpy()
    return model(video(4, seed), paddle.to_tensor([10]), noise(VIDEOS, TEXT, parts.HIDDEN)).sample.numpy()


FAMILIES = {
    "AnimateDiff": motion,
    "ModelScope": unet_3d,
    "Hotshot-XL": unet_hotshot,
    "Stable Video Diffusion": unet_spatio_temporal,
}
TEMPORAL = (
    "motion_modules",
    "temp_attentions",
    "transformer_in",
    "temporal_attentions",
    "temporal_transformer_blocks",
)


@pytest.fixture(params=FAMILIES)
def model(request):
    return FAMILIES[request.param]()


def record(model):
    """Rows, tokens and keys of each attention layer in one pass, by path: over frames, and over pixels."""
    seen = {}

    def shape_of(layer, arguments, output, path, name):
        seen.setdefault(path, {})[name] = output.shape[:2]

    for path, layer in model.named_sublayers():
        if isinstance(layer, Attention):
            for name in ("to_q", "to_k"):
                getattr(layer, name).register_forward_post_hook(partial(shape_of, path=path, name=name))
    draw(model)
    shapes = {path: (*of["to_q"], of["to_k"][1]) for path, of in seen.items()}
    over_frames = {path: shape for path, shape in shapes.items() if any(part in path for part in TEMPORAL)}
    return over_frames, {path: shape for path, shape in shapes.items() if path not in over_frames}


def self_attention(over_pixels):
    return {path: shape for path, shape in over_pixels.items() if path.endswith("attn1")}


@pytest.mark.parametrize(
    ("method", "queries", "keys"), [("interlace", PIXELS, 16), ("todo", PIXELS, 16), ("tomesd", 16, 16)]
)
def test_pixels_merge_in_each_frame_and_frames_do_not_merge(model, method, queries, keys):
    """With interlace the last block of the UNet keeps twice the keys of the average, and the others fewer."""
    plain_frames, plain_pixels = record(model)
    model.apply_tome(ratio=0.75, method=method)
    over_frames, over_pixels = record(model)
    assert plain_frames
    assert over_frames == plain_frames
    assert {tokens for _, tokens, _ in over_frames.values()} == {FRAMES}
    assert {rows for rows, _, _ in over_frames.values()} <= {VIDEOS * PIXELS, VIDEOS * PIXELS // 4}  # levels 1 and 2
    at_level_1 = [path for path, shape in self_attention(plain_pixels).items() if shape[1] == PIXELS]
    assert at_level_1
    of_blocks = [(VIDEOS * FRAMES, queries, keys)] * len(at_level_1)
    if method == "interlace":
        of_blocks = [(VIDEOS * FRAMES, queries, kept) for kept in [8] * (len(at_level_1) - 1) + [32]]
    expected = {**plain_pixels, **dict(zip(at_level_1, of_blocks, strict=True))}
    assert over_pixels == expected


def test_attention_has_the_keys_that_remain_in_its_frame(model):
    with calls_of_attention() as calls:
        draw(model.apply_tome())
    check_calls(model, calls, Grid(SIDE, SIDE), frames=FRAMES)


def test_frames_have_turns_of_their_own_or_share_dst(model, plans):
    """With interlace each frame keeps other pixels than the one before; with tomesd all frames have the same dst."""
    draw(model.apply_tome())
    for plan in plans:
        positions = [set(row) for row in plan.choice.positions.tolist()]
        assert len(positions) == FRAMES and all(a != b for a, b in pairwise(positions))
    plans.clear()
    draw(model.apply_tome(method="tomesd"))
    assert plans
    for plan in plans:
        remain = [set(row) for row in plan.choice.positions.tolist()]
        assert len(remain) == VIDEOS * FRAMES and len(set.intersection(*remain)) >= PIXELS // 4
        assert len({frozenset(row) for row in remain}) > 1
