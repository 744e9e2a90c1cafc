"""What `tune` measures: time by `bench`, and distance from plain by `evaluate`, with the same exported programs."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...config import ToMeConfig
from ...errors import ToMeError
from ...generation.offline import generate_here
from ..cached_programs import CachedPrograms, folder_of_programs
from ..environment import describe_environment
from ..quality.evaluation import Measurer
from ..quality.image_generation import export_programs, fingerprint, generate_images, image_folder, image_paths
from ..quality.settings import PLAIN_IMAGES, Evaluation, Setting
from ..speed.cases import MEASURED, PLAIN, PROGRAMS, TOME, Case, make_arms
from ..speed.runner import Settings, measure_all


@dataclass(frozen=True)
class Measurement:
    """Measures candidates in a folder, from which a repeated run takes programs and images."""

    case: Case  # one UNet pass, without arms
    evaluation: Evaluation
    folder: Path
    command: str  # for the record

    def fingerprint(self) -> dict[str, Any]:
        """What decides the figures, ready for JSON."""
        machine = describe_environment()["machine"]
        return {**fingerprint(self.evaluation), "threads": self.evaluation.threads, "machine": machine}

    def time(self, configs: Sequence[ToMeConfig], rounds: int) -> Iterator[tuple[ToMeConfig, list[float] | str]]:
        """Each candidate with its speed-ups over plain in rounds of one UNet pass, or why it cannot be timed.

        All take turns with plain in one run of `bench`, which a repeated call continues. Programs are those that
        generate the images. In eager, dst is fixed: random dst take the same time, and the built-in ToMe samples
        others.
        """
        backend, threads = self.evaluation.backend, self.evaluation.threads
        has_own_dst = backend in PROGRAMS
        timed = {c: c if has_own_dst and c.seed is not None else replace(c, use_rand=False) for c in configs}
        arms = make_arms(self.case, [PLAIN, TOME], [backend], list(timed.values()))
        key = hashlib.sha256(repr(sorted(map(repr, timed.values()))).encode()).hexdigest()[:8]
        output = self.folder / f"speed_{rounds}_{key}.json"
        settings = Settings(rounds=rounds, threads=threads)
        (measured,) = measure_all(
            [replace(self.case, arms=arms)], settings, output, self.command, programs=self._unets
        )
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

    def compare(
        self, configs: Sequence[ToMeConfig], count: int
    ) -> Iterator[tuple[ToMeConfig, list[float], list[float]]]:
        """Each candidate with PSNR and perceptual distance of its first images from the plain ones.

        One image per call of the pipeline, so that later ones do not change them.
        """
        first = replace(self.evaluation, prompts=self.evaluation.prompts[:count])
        names = {config: config.describe().removeprefix("ratio=") for config in configs}
        settings = {c: Setting(name.replace(", ", "_").replace("'", ""), "method", c) for c, name in names.items()}
        if self.evaluation.backend in PROGRAMS:  # all now: settings that differ in the ratio alone share a program
            cached = CachedPrograms(folder_of_programs(self._unets, self.evaluation.model))
            export_programs(first, [PLAIN_IMAGES, *settings.values()], self.folder, cached)
        measurer = Measurer(self.folder, self.evaluation.size)
        for config, setting in settings.items():
            generate_images(first, [PLAIN_IMAGES, setting], self.folder, generate_here, batch=1)
            images, plain = (image_paths(image_folder(one, self.folder))[:count] for one in (setting, PLAIN_IMAGES))
            measured = measurer.measure(images, plain)
            yield config, measured["psnr"].tolist(), measured["perceptual"].tolist()

    @property
    def _unets(self) -> Path:
        """Folder of the programs that are timed, from which images are generated too."""
        return self.folder / "unets"
