"""What `bench` compares this package with.

- The arm `built-in`: the apply_tome that ppdiffusers ships. It must equal ToMe with tomesd's settings.
- The arm `limit`, the free-merge limit: as few tokens as merging leaves, at almost no cost (free_merge.py).
- The backends `PyTorch` and `PyTorch-bf16`: diffusers with tomesd in a process of the interpreter TORCH_PYTHON.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddle import nn
from ppdiffusers.patches import tomesd_patch_utils as builtin

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeError
from ppdiffusers_tome.attach.placement import placements, tokens_kept
from ppdiffusers_tome.families.models import find_blocks
from ppdiffusers_tome.grid import Grid
from ppdiffusers_tome.methods import METHODS

from ..torch_unet import TorchProcess, torch_versions
from .backends import Attach, Backend, Run
from .cases import Arm, Case
from .workloads import Workload, as_array

BUILT_IN, LIMIT, PYTORCH, PYTORCH_BF16 = "built-in", "limit", "PyTorch", "PyTorch-bf16"
SETTLE = 0.3  # seconds for which OpenMP's threads may go on spinning after a pass of PyTorch's process


def tomesd_arguments(denoiser: nn.Layer, config: ToMeConfig) -> dict[str, Any]:
    """Arguments of tomesd and of the built-in ToMe, to merge at the levels that the other arms merge at."""
    names = ("ratio", "sx", "sy", "use_rand", "merge_attn", "merge_crossattn", "merge_mlp")
    deepest = max(block.level for block, _ in placements(denoiser, config))
    return {**{name: getattr(config, name) for name in names}, "max_downsample": deepest}


def attach_built_in(denoiser: nn.Layer, config: ToMeConfig, latent: Grid) -> None:
    """What ppdiffusers' apply_tome does, which this package replaces."""
    denoiser._tome_info = {"size": None, "hooks": [], "args": tomesd_arguments(denoiser, config)}
    for block in find_blocks(denoiser):
        block.block.__class__ = builtin.make_tome_block(type(block.block))
        block.block._tome_info = denoiser._tome_info
    builtin.hook_tome_model(denoiser)


def tomesd_configs(case: Case, configs: Sequence[ToMeConfig]) -> list[ToMeConfig]:
    """The same ratios by the method of tomesd and of ppdiffusers' built-in ToMe."""
    return [replace(config, method="tomesd", min_tokens=0, **METHODS["tomesd"].fixed) for config in configs]


def built_in_configs(case: Case, configs: Sequence[ToMeConfig]) -> list[ToMeConfig]:
    """By tomesd's method, at the ratios that ppdiffusers' apply_tome allows."""
    return [config for config in tomesd_configs(case, configs) if config.ratio < 0.75]


def limit_configs(case: Case, configs: Sequence[ToMeConfig]) -> list[ToMeConfig]:
    """One config for each number of tokens that the configs leave, at each level and from the same layers."""
    limits: dict[Any, ToMeConfig] = {}
    for config in configs:
        kept = tokens_kept(config, case.architecture.first_grid(case.size))
        layers = config.merge_attn, config.merge_crossattn, config.merge_mlp
        place = METHODS[config.method].merges_queries, config.max_downsample, *layers
        limits.setdefault((kept, *place), replace(config, window=None, proportional=False))
    return list(limits.values())


class PyTorchBackend(Backend):
    """PyTorch with diffusers and tomesd, in its own process, with the weights and inputs of a UNet's workload.

    Raises:
        ToMeConfigError: the scope is not "unet".
    """

    def __init__(
        self, name: str, workload: Workload, threads: int, programs: Path, attachers: Mapping[str, Attach]
    ) -> None:
        super().__init__(name, workload, threads, programs, attachers)
        if workload.case.scope != "unet":
            raise ToMeConfigError("PyTorch is compared with --scope unet only")
        self._folder = tempfile.TemporaryDirectory()
        folder, is_bf16 = Path(self._folder.name), name == PYTORCH_BF16
        try:
            self._torch = TorchProcess(torch_python(), folder, workload.denoiser, threads, is_bf16)
        except ToMeError:
            self._folder.cleanup()
            raise
        self._inputs: dict[str, Any] = {}

    @contextmanager
    def prepared(self, arm: Arm) -> Iterator[Run]:
        if self._inputs is not self.workload.inputs:
            self._inputs = self.workload.inputs
            self._torch.set_inputs({name: as_array(value) for name, value in self._inputs.items()})
        merging = self._merging(arm)
        yield lambda is_short: self._torch.output(merging)

    def seconds(self, arm: Arm) -> float:
        with self.prepared(arm):
            seconds = self._torch.seconds(self._merging(arm))
        time.sleep(SETTLE)
        return seconds

    def close(self) -> None:
        self._torch.close()
        self._folder.cleanup()

    def _merging(self, arm: Arm) -> dict[str, Any] | None:
        return tomesd_arguments(self.workload.denoiser, arm.config) if arm.config else None


def torch_python() -> str:
    """The interpreter with torch, diffusers and tomesd."""
    return os.environ.get("TORCH_PYTHON") or sys.executable


def versions_of_pytorch() -> dict[str, str]:
    """Versions of the packages in the interpreter with torch, for the result."""
    return torch_versions(torch_python())
