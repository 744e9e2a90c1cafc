"""The methods and their settings by name, without importing the methods: for the command line, editors and mypy."""

from typing_extensions import TypedDict

DEFAULT_METHOD = "interlace"
DESCRIPTIONS = {  # what remains, in a line
    "interlace": "keys and values are those of a part of the tokens, and of a different part in each step",
    "todo": "keys and values are those of one token of each cell, or at ratio 0.5 of a checkerboard",
    "tomesd": "the results of tomesd, also with its random dst in each step",
}


class MethodSettings(TypedDict, total=False):
    """The settings of all methods beside `ratio` and `method`; the class of each method describes its own."""

    max_downsample: int | None
    min_tokens: int
    merge_steps: str
    sx: int
    sy: int
    use_rand: bool
    seed: int
    merge_attn: bool
    merge_crossattn: bool
    merge_mlp: bool


class MergeSettings(MethodSettings, total=False):
    """What `apply_tome` takes beside `ratio`."""

    method: str
