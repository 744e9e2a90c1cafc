"""What merging cannot share a model with: a program that it runs, and the merging that ppdiffusers ships."""

from paddle import nn
from paddle.jit.dy2static.program_translator import ASTStaticFunction

from ..errors import ToMeConfigError
from ..families.pipelines import DenoiserBlocks


def check_not_compiled(found: DenoiserBlocks) -> None:
    """Raise ToMeConfigError if a denoiser runs a program, in which merging cannot change."""
    name, paths = found.name, [f"{block.path}." for block in found.blocks]
    for path, layer in found.model.named_sublayers(include_self=True):
        by = _compiled_by(layer)
        if by is not None and any(block.startswith(path and f"{path}.") for block in paths):
            where = f"{name}.{path}" if path else name
            raise ToMeConfigError(
                f"{where} runs a program that {by} has made, in which merging cannot change: undo that by "
                f"`del {where}.forward`, or load the model again. Then merge first, and make the program afterwards."
            )


def _compiled_by(layer: nn.Layer) -> str | None:
    """What has replaced the `forward` of a layer by a program; None if nothing has."""
    forward = layer.__dict__.get("forward")
    if getattr(forward, "__name__", None) == "innermost_decorator":  # as Paddle's `is_inference_mode`
        return "paddle.incubate.jit.inference()"
    if isinstance(forward, ASTStaticFunction) and len(forward.program_cache):
        return "paddle.jit.to_static()"
    return None


def remove_builtin(model: nn.Layer) -> None:
    """Remove the merging that ppdiffusers ships from a model: its classes, hooks and `_tome_info`."""
    for layer in model.sublayers(include_self=True):
        parent = getattr(type(layer), "_parent", None)
        if parent is not None and type(layer).__name__.startswith("ToMe"):
            layer.__class__ = parent
        info = layer.__dict__.pop("_tome_info", None)
        for hook in info["hooks"] if info else ():
            hook.remove()
