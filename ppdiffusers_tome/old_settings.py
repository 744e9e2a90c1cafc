"""What releases before 3.0 had: settings files of theirs, and what to write today in place of what is gone."""

from collections.abc import Mapping
from typing import Any

from .errors import ToMeConfigError

_METHODS = {
    "default": 'use method="interlace", which is nearer to the plain image at the same speed',
    "symmetric": 'use method="tomesd", which also merges queries, keys and values alike, or "interlace", which is '
    "nearer to the plain image",
    "kv": 'use method="interlace", which leaves out keys and values of another part of the tokens in each step',
}
# The values of `merge_attn` that named a method.
MERGE_ATTN_OF_2 = {
    "asymmetric": f"it must be True or False, and method names how tokens merge: {_METHODS['default']}",
    "kv": f"it must be True or False, and method names how tokens merge: {_METHODS['kv']}",
}
REPLACED = {
    "match": 'leave it out, or in place of match="grid" pass method="todo"',
    "blend": 'leave it out: with method="tomesd" a merged token is the mean of its tokens',
    "window": "leave it out: only the matching of tokens needed it",
    "proportional": "leave it out: tokens that remain are not weighted by a size",
    "for_gpu": "leave it out: exports have one form, which runs on CPUs and GPUs",  # of `export_pipeline`
    "merge_map": "leave it out: no export has merge maps",  # the same
}


def why_removed(method: str) -> str | None:
    """What to use in place of a method that is gone; None if there was none of this name."""
    return _METHODS.get(method)


def settings_of_2(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file of a release before 3.0, as those of this release.

    Raises:
        ToMeConfigError: tokens merged in a way that is gone; the message says what to use.
    """
    changed = dict(settings)
    match, attention = changed.pop("match", "similarity"), changed.pop("merge_attn", "asymmetric")
    window, is_proportional = changed.pop("window", 16), changed.pop("proportional", True)
    blend = changed.pop("blend", 0 if match == "grid" else 1)
    is_plain = window is None and is_proportional is False and blend == 1
    if match == "grid" and attention == "kv" and blend == 0:
        if changed.get("use_rand", True):
            raise ToMeConfigError('it has random tokens of each cell, which method="todo" has not: use "interlace".')
        for name in ("merge_crossattn", "merge_mlp"):
            if changed.get(name, False):
                raise ToMeConfigError(f'it has {name}, which only method="tomesd" has since release 3.0.')
        chose_nothing = ("use_rand", "seed", "merge_crossattn", "merge_mlp")
        others = {name: value for name, value in changed.items() if name not in chose_nothing}
        return {"ratio": 0.5, **others, "method": "todo"}
    if match == "similarity" and isinstance(attention, bool) and is_plain:
        if changed.get("seed", 0) is None:
            changed["seed"] = 0  # each pass chose other tokens, as each step does today
        return {"ratio": 0.5, **changed, "method": "tomesd", "merge_attn": attention}
    instead = _METHODS["kv" if attention == "kv" else "symmetric" if attention is True else "default"]
    raise ToMeConfigError(f"it merges in a way that is gone since release 3.0: {instead}.")
