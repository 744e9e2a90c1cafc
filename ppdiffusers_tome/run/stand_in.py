"""Models of ppdiffusers without layers and weights. What needs these raises one error, which names the remedy."""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

import paddle
from paddle import nn
from ppdiffusers import DiffusionPipeline
from ppdiffusers.configuration_utils import FrozenDict

from ..api import ToMeMixin
from ..errors import NotExportedError, ToMeConfigError

# Methods of nn.Layer that need weights. All remaining methods are harmless without weights, or are defined below.
NEED_WEIGHTS = (
    "astype", "bfloat16", "float16", "load_dict", "set_dict", "set_state_dict", "state_dict", "to_static_state_dict",
)  # fmt: skip
CALLED_BY_PIPELINES = "maybe_convert_prompt"  # a method of the loader mixins that each pipeline call uses
REMEDIES = {"save_pretrained": "copy the exported folder instead."}
REMEDY = "do it before export_pipeline(), as with LoRA and textual inversion, or leave it out, as with IP-Adapters."
PACKAGE = __name__.partition(".")[0]


def refuse(owner: type, name: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotExportedError for an attribute of a model or pipeline that needs layers or weights."""
    remedy = REMEDIES.get(name, REMEDY)
    raise NotExportedError(
        f"{owner.__name__}.{name} needs layers or weights, but an exported pipeline runs fixed programs: {remedy}"
    )


def refuse_loading(pipe: DiffusionPipeline) -> None:
    """Let a pipeline refuse weights before it reads or downloads them, not only when it adds them to a model."""
    for base in type(pipe).__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("ppdiffusers.loaders.") else ():
            if isinstance(value, FunctionType) and not name.startswith("_") and name != CALLED_BY_PIPELINES:
                setattr(pipe, name, partial(refuse, type(pipe), name))


class StandIn(ToMeMixin, nn.Layer):
    """Base class of stand-ins, which also inherit from the class of ppdiffusers that they stand for.

    Pipelines ask for that class, and whether a model has a method; without it they silently do nothing. Therefore a
    stand-in has all methods, but those that no class of ours defines raise NotExportedError. So do properties and all
    other attributes, such as layers. The `__init__` of ppdiffusers' class never runs.
    """

    config = FrozenDict({})
    dtype = paddle.float32  # the type of inputs and outputs, whatever the precision inside

    def __init__(self, config: dict[str, Any]) -> None:
        nn.Layer.__init__(self)
        self.config = FrozenDict(config)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in cls.__mro__:
            for name, value in [*vars(base).items()]:
                if _is_ours(base) or name.startswith("__") or (base is nn.Layer and name not in NEED_WEIGHTS):
                    continue
                if any(name in vars(base) for base in cls.__mro__ if _is_ours(base)):
                    continue
                if isinstance(value, FunctionType):
                    setattr(cls, name, _refusing(name))
                elif isinstance(value, property):
                    setattr(cls, name, property(_refusing(name)))

    def __getattr__(self, name: str) -> Any:
        refuse(type(self), name)

    @property
    def place(self) -> str:
        """The device of inputs and outputs, for pipelines: Paddle's current one, as "cpu" or "gpu:0"."""
        return paddle.get_device()

    def to(self, device: Any = None, dtype: Any = None, blocking: bool | None = None) -> "StandIn":
        """Do nothing. SDXL's pipelines cast the VAE to float32 and back, but programs always take float32.

        Raises:
            ToMeConfigError: a different device or dtype is asked for.
        """
        if device is not None or dtype not in (None, "float32", paddle.float32):
            raise ToMeConfigError(
                f"to(device={device!r}, dtype={dtype}) is not allowed: an exported pipeline has the device and the "
                "precision of load_pipeline(device=…, precision=…). Pass them there."
            )
        return self


def _refusing(name: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: refuse(type(self), name)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == PACKAGE


class NoImageEncoder:
    """Placeholder for an IP-Adapter's image encoder, which cannot be exported."""

    def __getattr__(self, name: str) -> Any:
        refuse(type(self), name)
