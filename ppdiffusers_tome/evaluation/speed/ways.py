"""Ways to compute a model: how tokens merge and how attention is computed, put on and taken off exactly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ppdiffusers.models.attention_processor import Attention, AttnProcessor, SlicedAttnProcessor
from ppdiffusers.patches import tomesd_patch_utils as builtin

from ...models import find_blocks
from ...patch import attach, chosen_blocks, detach
from ..free_merge import attach_free_merge
from .cases import ArmPlan
from .names import BUILT_IN, LIMIT
from .subjects import Subject


@contextmanager
def merging(subject: Subject, plan: ArmPlan) -> Iterator[None]:
    """Merge in a subject as an arm does, until the context is left."""
    if plan.config is None:
        yield
        return
    try:
        put_on(subject.denoiser, plan, subject)
        yield
    finally:
        detach(subject.denoiser)


def put_on(model: Any, plan: ArmPlan, subject: Subject) -> None:
    """Make a model merge as an arm does; `patch.detach` takes it off."""
    config = plan.config
    assert config
    if plan.arm == LIMIT:
        attach_free_merge(model, config, subject.latent)
    elif plan.arm != BUILT_IN:
        attach(model, config, None)
    else:  # what ppdiffusers' apply_tome does, which this package replaces, at the levels that ours merges at
        deepest = max(found.level for found in chosen_blocks(model, config))
        settings = {name: getattr(config, name) for name in ("ratio", "sx", "sy", "use_rand")}
        layers = {name: getattr(config, name) for name in ("merge_attn", "merge_crossattn", "merge_mlp")}
        args = {**settings, **layers, "max_downsample": deepest}
        model._tome_info = {"size": None, "hooks": [], "args": args}
        for found in find_blocks(model):
            found.block.__class__ = builtin.make_tome_block(type(found.block))
            found.block._tome_info = model._tome_info
        builtin.hook_tome_model(model)


@contextmanager
def attention(subject: Subject, plan: ArmPlan) -> Iterator[None]:
    """Compute a subject's attention plainly, or so as to save memory, until the context is left."""
    layers = [layer for layer in subject.denoiser.sublayers() if isinstance(layer, Attention)]
    before = [layer.processor for layer in layers]
    try:
        for layer in layers:
            if plan.attention == "xformers":
                layer.set_use_memory_efficient_attention_xformers(True)
            elif plan.attention == "slicing":  # as `enable_attention_slicing("auto")`: half of the heads at once
                layer.set_processor(SlicedAttnProcessor(max(1, layer.sliceable_head_dim // 2)))
            else:
                layer.set_processor(AttnProcessor())
        yield
    finally:
        for layer, processor in zip(layers, before, strict=True):
            layer.set_processor(processor)
