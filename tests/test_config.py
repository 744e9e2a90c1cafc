import numpy as np
import pytest

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeError


def test_defaults():
    config = ToMeConfig()
    assert vars(config) == {
        "ratio": 0.5,
        "max_downsample": None,
        "sx": 2,
        "sy": 2,
        "use_rand": True,
        "seed": 0,
        "window": None,
        "proportional": False,
        "merge_attn": True,
        "merge_crossattn": False,
        "merge_mlp": False,
    }


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("window", 0, "a multiple of sx=2 and sy=2"),
        ("window", 7, "a multiple of sx=2 and sy=2"),
        ("window", 8.0, "or None for the whole grid"),
        ("proportional", 1, "True or False"),
        ("ratio", -0.1, "from 0 to 1 - 1/(sx·sy) = 0.75"),
        ("ratio", 0.76, "from 0 to 1 - 1/(sx·sy) = 0.75"),
        ("ratio", 1, "from 0 to"),
        ("ratio", float("nan"), "from 0 to"),
        ("ratio", float("inf"), "from 0 to"),
        ("ratio", "0.5", "a number"),
        ("ratio", None, "a number"),
        ("ratio", True, "a number"),
        ("max_downsample", 3, "1, 2, 4 or 8"),
        ("max_downsample", 0, "1, 2, 4 or 8"),
        ("max_downsample", 2.0, "1, 2, 4 or 8"),
        ("max_downsample", True, "1, 2, 4 or 8"),
        ("max_downsample", "2", "1, 2, 4 or 8"),
        ("sx", 0, "1 or more"),
        ("sx", -2, "1 or more"),
        ("sx", 2.0, "1 or more"),
        ("sy", "2", "1 or more"),
        ("sy", None, "1 or more"),
        ("use_rand", 1, "True or False"),
        ("use_rand", "no", "True or False"),
        ("seed", -1, "0 to 2**64 - 1, or None"),
        ("seed", 2**64, "0 to 2**64 - 1, or None"),
        ("seed", 0.5, "0 to 2**64 - 1, or None"),
        ("seed", False, "0 to 2**64 - 1, or None"),
        ("merge_attn", None, "True or False"),
        ("merge_crossattn", 0, "True or False"),
        ("merge_mlp", "yes", "True or False"),
    ],
)
def test_invalid_value_is_reported_with_allowed_ones(argument, value, allowed):
    with pytest.raises(ToMeConfigError) as caught:
        ToMeConfig(**{argument: value})
    assert f"{argument}={value!r}" in str(caught.value)
    assert allowed in str(caught.value)


def test_config_error_is_a_value_error_and_a_tome_error():
    with pytest.raises(ValueError, match="ratio"):
        ToMeConfig(ratio=2)
    with pytest.raises(ToMeError, match="ratio"):
        ToMeConfig(ratio=2)


@pytest.mark.parametrize(("sx", "sy"), [(2, 2), (4, 4), (2, 3), (3, 2), (1, 2), (3, 3), (1, 1), (7, 11)])
def test_maximum_ratio(sx, sy):
    largest = 1 - 1 / (sx * sy)
    assert ToMeConfig(ratio=largest, sx=sx, sy=sy).ratio == largest
    with pytest.raises(ToMeConfigError, match=rf"sx={sx}, sy={sy}"):
        ToMeConfig(ratio=largest + 1e-6, sx=sx, sy=sy)


def test_no_layer_to_merge_is_rejected():
    with pytest.raises(ToMeConfigError, match="merge_attn, merge_crossattn and merge_mlp are all False"):
        ToMeConfig(merge_attn=False)


def test_proportional_attention_needs_self_attention_to_merge():
    with pytest.raises(ToMeConfigError, match=r"proportional=True .* merge_attn=False"):
        ToMeConfig(merge_attn=False, merge_mlp=True, proportional=True)


def test_numpy_numbers_are_converted():
    config = ToMeConfig(ratio=np.float32(0.25), sx=np.int64(4), seed=np.uint32(7))
    assert (type(config.ratio), type(config.sx), type(config.seed)) == (float, int, int)
    assert config == ToMeConfig(ratio=0.25, sx=4, seed=7)


def test_frozen():
    with pytest.raises(AttributeError):
        ToMeConfig().ratio = 0.25


@pytest.mark.parametrize(
    ("ratio", "tokens", "dst", "removed"),
    [(0.5, 4096, 1024, 2048), (0.75, 64, 16, 48), (0.5, 35, 6, 17), (0, 64, 16, 0), (0.5, 1, 0, 0), (0.5, 3, 0, 0)],
)
def test_removed_rounds_down_and_needs_a_dst(ratio, tokens, dst, removed):
    assert ToMeConfig(ratio=ratio).removed(tokens, dst) == removed


def test_describe_has_ratio_and_changed_settings():
    assert ToMeConfig().describe() == "ratio=0.5"
    assert ToMeConfig(ratio=0.25, seed=None, sx=4).describe() == "ratio=0.25, sx=4, seed=None"
