"""What `tune` measures: time by `bench`, and distance from plain by `evaluate`, with the same exported programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from ...comparison.environment import describe_environment
from ...config import ToMeConfig
from ...errors import ToMeError
from ...generation.offline import generate_here
from ..cache import Cache, digest, programs_of
from ..quality.evaluation import Measurer
from ..quality.image_generation import export_programs, fingerprint, generate_images
from ..quality.image_sets import PLAIN_IMAGES, Evaluation, ImageSet
from ..speed.cases import MEASURED, PLAIN, PROGRAMS, TOME, Case, Timing
from ..speed.catalog import make_arms
from ..speed.runner import measure_all
from .search import PERCEPTUAL, PSNR, Candidate


@dataclass(frozen=True)
class Measurement:
    """Measures candidates, each once. Figures, programs and images are cached in a folder."""

    case: Case  # one UNet pass, without arms
    evaluation: Evaluation
    root: Path  # has a folder for each set of inputs that the figures depend on
    command: str  # for the record

    @cached_property
    def folder(self) -> Path:
        """The cache for this model, its content, these prompts, sizes, versions, sources, threads and machine."""
        machine = describe_environment()["machine"]
        return self.root / digest([fingerprint(self.evaluation), self.evaluation.threads, machine])

    def time(self, candidates: Sequence[Candidate], rounds: int) -> None:
        """Set the candidates' speed-ups over plain in rounds of one UNet pass, or why they cannot be timed.

        Those that were not timed before take turns with plain in one run of `bench`, which a repeated call continues.
        """
        cache = Cache(self.folder / "figures")
        configs = [candidate.config for candidate in candidates]
        if missing := [config for config in configs if cache.load(asdict(config), rounds) is None]:
            for config, figures in self._bench(missing, rounds):
                cache.store(figures, asdict(config), rounds)
        for candidate in candidates:
            figures = cache.load(asdict(candidate.config), rounds)
            if isinstance(figures, str):
                candidate.failure = figures
            else:
                candidate.speed_up = figures

    def _bench(self, configs: Sequence[ToMeConfig], rounds: int) -> Iterator[tuple[ToMeConfig, list[float] | str]]:
        """Each config with its speed-ups, or with the reason that it has none.

        The programs are those that generate the images. In eager mode, dst is fixed: random dst take the same time,
        and the built-in ToMe samples others.
        """
        backend, threads = self.evaluation.backend, self.evaluation.threads
        has_own_dst = backend in PROGRAMS
        timed = {c: c if has_own_dst and c.seed is not None else replace(c, use_rand=False) for c in configs}
        arms = make_arms(self.case, [PLAIN, TOME], [backend], list(timed.values()))
        case, timing = replace(self.case, arms=arms), Timing(rounds=rounds, threads=threads)
        (measured,) = measure_all([case], timing, self.folder / "speed.json", self.command, programs=self._unets)
        by_config = {arm.config: arm for arm in measured.arms}
        plain = by_config[None]
        if plain.status != MEASURED:
            raise ToMeError(f"Plain cannot be timed: {plain.status}: {plain.reason}")
        for config in configs:
            arm = by_config[timed[config]]
            if arm.status == MEASURED:
                yield config, [a / b for a, b in zip(plain.seconds, arm.seconds, strict=True)]
            else:
                yield config, f"{arm.status}: {arm.reason}"

    def compare(self, candidates: Sequence[Candidate], count: int) -> None:
        """Set PSNR and perceptual distance of the candidates' first images from the plain ones.

        One image per call of the pipeline, so that later ones do not change them.
        """
        first, image_sets = replace(self.evaluation, prompts=self.evaluation.prompts[:count]), list[ImageSet]()
        for config in (candidate.config for candidate in candidates):
            name = config.describe().removeprefix("ratio=").replace(", ", "_").replace("'", "")
            image_sets.append(ImageSet(name, "method", config))
        if self.evaluation.backend in PROGRAMS:  # all now: image sets that differ in the ratio alone share a program
            cached = programs_of(self._unets, self.evaluation.model)
            export_programs(first, [PLAIN_IMAGES, *image_sets], self.folder, cached)
        measurer = Measurer(self.folder, self.evaluation.size)
        for candidate, image_set in zip(candidates, image_sets, strict=True):
            generate_images(first, [PLAIN_IMAGES, image_set], self.folder, generate_here, batch=1)
            measured = measurer.compare(image_set, count=count)
            candidate.psnr, candidate.perceptual = (measured[name].tolist() for name in (PSNR, PERCEPTUAL))

    @property
    def _unets(self) -> Path:
        """Folder of the programs that are timed, from which images are generated too, whatever the prompts."""
        return self.root / "unets"
