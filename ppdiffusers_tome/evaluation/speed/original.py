"""The figures of the three documents that this project is measured against, as data: theirs, on their machines.

Nothing here was measured by us, and none of it is a claim about this package.
"""

from dataclasses import dataclass
from typing import Final, Literal

OOM: Final = "OOM"
Seconds = float | Literal["OOM"]


@dataclass(frozen=True)
class Document:
    """Where figures come from."""

    title: str
    source: str
    machine: str
    setting: str  # versions, sampler, precision
    unit: str


@dataclass(frozen=True)
class DiffusersRow:
    """Seconds for a batch of pictures; ratio 0.5."""

    gpu: str
    size: int  # px, square
    batch: int  # pictures
    plain: Seconds
    tome: Seconds
    both: Seconds  # ToMe + xFormers


@dataclass(frozen=True)
class PpdiffusersRow:
    """Seconds for a batch of pictures; the merged arms at `PPDIFFUSERS_RATIOS`."""

    batch: int  # pictures
    plain: Seconds
    tome: tuple[float, float]
    both: tuple[float, float]  # xFormers (cutlass) + ToMe


@dataclass(frozen=True)
class TomesdRow:
    """One picture of 512 × 512 px."""

    ratio: float
    fid: float  # 2,000 pictures of ImageNet's classes
    seconds: float
    memory_gb: float

    @property
    def speed_up(self) -> float:
        """How many times faster than without merging."""
        return TOMESD_ROWS[0].seconds / self.seconds

    @property
    def memory_share(self) -> float:
        """Its memory over that without merging."""
        return self.memory_gb / TOMESD_ROWS[0].memory_gb


DIFFUSERS: Final = Document(
    title="diffusers' ToMe page",
    source="https://huggingface.co/docs/diffusers/optimization/tome",
    machine="an A100 and a V100",
    setting="diffusers 0.15.1, torch 1.13.1, xFormers 0.0.16, tomesd 0.1.2; ratio 0.5",
    unit="seconds for the whole batch, and their change, computed from them; the page prints the time saved, as "
    "+23.55 %, and for the A100, 768 px, batch 2, xFormers +37.88 %, where its seconds say 57.92 %",
)
PPDIFFUSERS: Final = Document(
    title="ppdiffusers' ToMe page",
    source="https://github.com/PaddlePaddle/PaddleMIX/tree/develop/ppdiffusers",
    machine="an A100",
    setting="512 × 512 px, DPMSolverMultistep, fp16, 50 steps; ratio 0.5 / 0.749",
    unit="seconds for the whole batch",
)
TOMESD: Final = Document(
    title="tomesd, the paper's table",
    source="https://arxiv.org/abs/2303.17604",
    machine="an RTX 4090",
    setting="Stable Diffusion 1.5, 512 × 512 px, 50 PLMS steps, fp16, 2,000 pictures of ImageNet's classes",
    unit="seconds and GB a picture; the change of memory is computed, the paper prints how many times less it is",
)

DIFFUSERS_ROWS: Final = (
    DiffusersRow("A100", 512, 10, 6.88, 5.26, 4.69),
    DiffusersRow("A100", 768, 10, OOM, 14.71, 11.0),
    DiffusersRow("A100", 768, 8, OOM, 11.56, 8.84),
    DiffusersRow("A100", 768, 4, OOM, 5.98, 4.66),
    DiffusersRow("A100", 768, 2, 4.99, 3.24, 2.1),
    DiffusersRow("A100", 768, 1, 3.29, 2.24, 2.03),
    DiffusersRow("A100", 1024, 10, OOM, OOM, OOM),
    DiffusersRow("A100", 1024, 8, OOM, OOM, OOM),
    DiffusersRow("A100", 1024, 4, OOM, 12.51, 9.09),
    DiffusersRow("A100", 1024, 2, OOM, 6.52, 4.96),
    DiffusersRow("A100", 1024, 1, 6.4, 3.61, 2.81),
    DiffusersRow("V100", 512, 10, OOM, 10.03, 9.29),
    DiffusersRow("V100", 512, 8, OOM, 8.05, 7.47),
    DiffusersRow("V100", 512, 4, 5.7, 4.3, 3.98),
    DiffusersRow("V100", 512, 2, 3.14, 2.43, 2.27),
    DiffusersRow("V100", 512, 1, 1.88, 1.57, 1.57),
    DiffusersRow("V100", 768, 10, OOM, OOM, 23.67),
    DiffusersRow("V100", 768, 8, OOM, OOM, 18.81),
    DiffusersRow("V100", 768, 4, OOM, 11.81, 9.7),
    DiffusersRow("V100", 768, 2, OOM, 6.27, 5.2),
    DiffusersRow("V100", 768, 1, 5.43, 3.38, 2.82),
    DiffusersRow("V100", 1024, 10, OOM, OOM, OOM),
    DiffusersRow("V100", 1024, 8, OOM, OOM, OOM),
    DiffusersRow("V100", 1024, 4, OOM, OOM, 19.35),
    DiffusersRow("V100", 1024, 2, OOM, 13.0, 10.78),
    DiffusersRow("V100", 1024, 1, OOM, 6.66, 5.54),
)
PPDIFFUSERS_RATIOS: Final = (0.5, 0.749)
PPDIFFUSERS_ROWS: Final = (
    PpdiffusersRow(1, 2.08, (2.15, 2.06), (1.99, 1.95)),
    PpdiffusersRow(10, 14.15, (10.94, 10.04), (9.21, 8.87)),
    PpdiffusersRow(16, 21.93, (16.73, 15.31), (13.98, 13.95)),
    PpdiffusersRow(32, 42.93, (32.88, 29.48), (26.82, 29.08)),
    PpdiffusersRow(64, OOM, (63.79, 58.21), (52.86, 50.8)),
)
TOMESD_ROWS: Final = (
    TomesdRow(0.0, 33.12, 3.09, 3.41),
    TomesdRow(0.1, 32.86, 2.56, 2.99),
    TomesdRow(0.2, 32.86, 2.29, 2.17),
    TomesdRow(0.3, 32.80, 2.06, 1.71),
    TomesdRow(0.4, 32.87, 1.85, 1.26),
    TomesdRow(0.5, 33.02, 1.65, 0.89),
    TomesdRow(0.6, 33.37, 1.52, 0.60),
)
