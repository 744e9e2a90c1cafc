"""`tune`: the search on a landscape whose best point is known, and the command on a tiny model."""

import json
from dataclasses import replace

import pytest
from conftest import tiny_pipeline
from zoo.parts import unet as unet_of_zoo

from ppdiffusers_tome import ToMeConfig, ToMeError, apply_tome
from ppdiffusers_tome.cli import _parser, main
from ppdiffusers_tome.commands import tune
from ppdiffusers_tome.evaluation.quality import image_generation, networks
from ppdiffusers_tome.evaluation.speed import backends
from ppdiffusers_tome.evaluation.speed.backends import ProgramBackend
from ppdiffusers_tome.evaluation.speed.cases import make_case
from ppdiffusers_tome.evaluation.tuning import measurement, outcome
from ppdiffusers_tome.evaluation.tuning import search as tuning
from ppdiffusers_tome.evaluation.tuning.measurement import Measurement
from ppdiffusers_tome.evaluation.tuning.search import (
    PERCEPTUAL,
    PSNR,
    SPEED_UP,
    Candidate,
    Goal,
    Stage,
    known_candidates,
    make_stages,
    nearest,
    search,
)
from ppdiffusers_tome.generation import offline
from ppdiffusers_tome.grid import Grid
from ppdiffusers_tome.inference import export

STAGES = make_stages(9, 8)
# ratio → speed-up over plain, PSNR, perceptual distance. From 0.1 on faster and farther; 0.05 is slower than plain,
# and 0.33 is slower and farther than 0.3.
LANDSCAPE = {
    0.05: (0.8, 60.0, 0.001),
    0.1: (1.1, 50.0, 0.002),
    0.2: (1.2, 45.0, 0.004),
    0.3: (1.35, 40.0, 0.008),
    0.33: (1.32, 38.0, 0.009),
    0.4: (1.5, 36.0, 0.012),
    0.5: (1.7, 33.0, 0.02),
    0.6: (1.9, 30.0, 0.04),
    0.7: (2.1, 27.0, 0.08),
}


class FakeMeasurement:
    """Figures of a landscape, by ratio, and what was asked for. `early` are speed-ups of fewer than nine rounds."""

    def __init__(self, landscape=LANDSCAPE, early=None, failures=None):
        self.landscape, self.early, self.failures = landscape, early or {}, failures or {}
        self.timed, self.compared = [], []

    def time(self, candidates, rounds):
        for candidate in candidates:
            ratio = candidate.config.ratio
            self.timed.append((ratio, rounds))
            speed_up = self.landscape[ratio][0]
            candidate.speed_up = [self.early.get(ratio, speed_up) if rounds < 9 else speed_up] * rounds
            candidate.failure = self.failures.get(ratio)

    def compare(self, candidates, images):
        for candidate in candidates:
            self.compared.append((candidate.config.ratio, images))
            _, psnr, perceptual = self.landscape[candidate.config.ratio]
            candidate.psnr, candidate.perceptual = [psnr] * images, [perceptual] * images


def search_in(fake, goal, ratios=tuple(LANDSCAPE), stages=STAGES, report=lambda text: None, **options):
    """What the search chooses of these ratios, and all candidates."""
    configs = [ToMeConfig(ratio) for ratio in ratios]
    return search(configs, goal, stages, fake.time, fake.compare, report, **options)


def find(fake, goal, **options):
    """The ratio that the search chooses; None if it chooses none."""
    chosen, _ = search_in(fake, goal, **options)
    return chosen and chosen.config.ratio


@pytest.mark.parametrize(
    ("measure", "bests"),
    [(SPEED_UP, {1.3: 0.3, 1.05: 0.1, 2.1: 0.7}), (PSNR, {35: 0.4, 50: 0.1}), (PERCEPTUAL, {0.02: 0.5, 0.005: 0.2})],
)
def test_the_known_best_point_is_chosen(measure, bests):
    assert {value: find(FakeMeasurement(), Goal(measure, value)) for value in bests} == bests


def test_few_figures_for_all_and_more_for_the_better_half():
    fake, reports = FakeMeasurement(), []
    find(fake, Goal(PSNR, 35), report=reports.append)
    assert [ratio for ratio, rounds in fake.timed if rounds == 3] == list(LANDSCAPE)
    assert 0.05 not in {ratio for ratio, _ in fake.compared}, "what is slower than plain gets no images"
    by_images = {n: {ratio for ratio, images in fake.compared if images == n} for n in (2, 4, 8)}
    assert {n: len(ratios) for n, ratios in by_images.items()} == {2: 8, 4: 4, 8: 3}
    assert by_images[8] < by_images[4] and {ratio for ratio, rounds in fake.timed if rounds == 9} == by_images[8]
    assert reports == [
        "stage 1 of 3: 9 candidates, 3 rounds and 2 images of each",
        "stage 2 of 3: 4 candidates, 3 rounds and 4 images of each",
        "stage 3 of 3: 3 candidates, 9 rounds and 8 images of each",
    ]


def test_what_is_clearly_too_slow_for_the_goal_gets_no_images():
    fake = FakeMeasurement()
    find(fake, Goal(SPEED_UP, 1.55))  # 1.5 is within the margin, 1.35 is not
    assert {ratio for ratio, _ in fake.compared} == {0.4, 0.5, 0.6, 0.7}


def test_no_candidate_is_chosen_if_none_reaches_the_goal():
    fake = FakeMeasurement()
    chosen, candidates = search_in(fake, Goal(SPEED_UP, 2.5))
    assert chosen is None and not fake.compared
    assert nearest(candidates, Goal(SPEED_UP, 2.5)).config.ratio == 0.7
    chosen, candidates = search_in(fake, Goal(PSNR, 55))  # 60 dB is reached by what is slower than plain alone
    assert chosen is None and nearest(candidates, Goal(PSNR, 55)).config.ratio == 0.1


def test_what_was_left_behind_is_measured_if_all_finalists_fall_short():
    # Few rounds flatter the nearest three; of the others, 0.33 is the nearest that reaches the goal, then 0.4.
    fake = FakeMeasurement(early={0.05: 1.31, 0.1: 1.31, 0.2: 1.31, 0.7: 1.2})
    fake.landscape = {**LANDSCAPE, 0.3: (1.35, 28.0, 0.05)}
    goal = Goal(SPEED_UP, 1.3)
    assert find(fake, goal, stages=[Stage(3, 2), Stage(3, 4), Stage(9, 8)]) == 0.33
    finalists = [ratio for ratio, rounds in fake.timed if rounds == 9]
    assert set(finalists[:3]) == {0.05, 0.1, 0.2} and finalists[3:] == [0.33, 0.4]


def test_what_is_just_short_of_the_goal_and_nearer_goes_on():
    # In few rounds 0.3 misses the goal by less than the margin; five others reach it.
    fake = FakeMeasurement(early={0.3: 1.28, 0.1: 1.0, 0.2: 1.1})
    assert find(fake, Goal(SPEED_UP, 1.3)) == 0.3


def test_what_more_rounds_show_to_be_slower_than_plain_is_not_chosen():
    fake = FakeMeasurement({**LANDSCAPE, 0.1: (0.98, 50.0, 0.002)}, early={0.1: 1.03})
    assert find(fake, Goal(PSNR, 48)) is None
    assert (0.1, 8) in fake.compared, "its images reach the goal"


def test_a_candidate_that_fails_does_not_end_the_others():
    chosen, candidates = search_in(FakeMeasurement(failures={0.3: "out of memory"}), Goal(SPEED_UP, 1.3))
    assert chosen.config.ratio == 0.33
    assert [c.failure for c in candidates if c.failure] == ["out of memory"]


# The candidates


def test_known_candidates_differ_and_are_at_all_levels():
    configs = known_candidates(Grid(64, 64), [1, 2, 4])
    assert len(set(configs)) == len(configs) == 11
    assert {config.max_downsample for config in configs} == {None, 2}
    assert {config.window for config in configs} == {16, None}
    small = known_candidates(Grid(16, 16), [1])
    assert small and all(config.window is not None for config in small)  # windows of 16 are the whole grid
    assert not known_candidates(Grid(1, 1), [1])


@pytest.mark.parametrize(
    ("measure", "value", "between"),
    [
        (SPEED_UP, 1.3, [0.25, 0.35, 0.45]),  # 0.3, 0.4 and 0.5 reach it and are nearer with a lower ratio
        (PSNR, 35, [0.45, 0.35, 0.25]),  # 0.4, 0.3 and 0.2 reach it and are faster with a higher ratio
        (SPEED_UP, 3, [0.72, 0.65, 0.55]),  # none reaches it: faster, up to the largest ratio
    ],
)
def test_ratios_between_those_of_the_best(measure, value, between, monkeypatch):
    monkeypatch.setattr(tuning, "MIN_STEP", 0.02)
    ratios = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    figures = ((ratio, *LANDSCAPE[ratio]) for ratio in ratios)
    candidates = [Candidate(ToMeConfig(r), [speed_up], [psnr], [far]) for r, speed_up, psnr, far in figures]
    cells = ToMeConfig(0.75, "todo")
    candidates.append(Candidate(cells, [1.0], [70.0], [1.0]))
    assert [config.ratio for config in tuning.ratios_between(candidates, candidates, Goal(measure, value))] == between
    monkeypatch.setattr(tuning, "MIN_STEP", 0.06)
    assert not tuning.ratios_between(candidates, candidates, Goal(measure, value))


def test_ratios_between_are_measured():
    landscape = {ratio: (1 + ratio, 60 - 40 * ratio, ratio) for ratio in (0.05, 0.15, 0.3, 0.4, 0.5, 0.62, 0.75)}
    assert find(FakeMeasurement(landscape), Goal(SPEED_UP, 1.4), ratios=[0.3, 0.5, 0.75], refines=True) == 0.4


# The command


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    """Its images and programs are measured once for all tests."""
    return tmp_path_factory.mktemp("tuned") / "new"


@pytest.fixture
def output(shared_folder):
    """The settings file, which is absent."""
    file = shared_folder / "tuned.json"
    for path in (file, file.with_suffix(".png")):
        path.unlink(missing_ok=True)
    return file


@pytest.fixture
def command(model, output):
    """Runs `tune` on the tiny model with two candidates."""
    options = ["--size", "32", "--steps", "2", "--rounds", "2", "--count", "2", "--threads", "1"]
    options += ["--backend", "eager", "--merging", "ratio=0.25", "ratio=0.75"]
    return lambda *more: main(["tune", "--model", str(model), *options, "--output", str(output), *more])


def set_speed_ups(monkeypatch, speed_ups):
    """Replace the clock: speed-ups by ratio."""

    def time(self, candidates, rounds):
        for candidate in candidates:
            candidate.speed_up = [speed_ups[candidate.config.ratio]] * rounds

    monkeypatch.setattr(Measurement, "time", time)


def test_the_settings_that_reach_the_goal_are_written(command, output, monkeypatch, capsys):
    set_speed_ups(monkeypatch, {0.25: 1.2, 0.75: 1.6})
    assert command("--speed-up", "1.4") == 0
    printed, file = capsys.readouterr().out, output
    content = json.loads(file.read_text())
    assert ToMeConfig.load(file) == ToMeConfig(0.75, min_tokens=256)  # smaller images stay plain
    assert (content["size"], content["sizes"]) == (32, {"measured": [32], "merges_from": 32})
    assert (content["backend"], content["goal"]) == ("eager", {"measure": "speed_up", "value": 1.4})
    assert content["figures"]["speed_up"]["median"] == 1.6 and content["figures"]["images"] == 2
    assert content["command"].startswith("python -m ppdiffusers_tome tune") and content["environment"]["machine"]
    slow, fast = content["candidates"]
    assert "psnr" not in slow and fast["psnr"] == content["figures"]["psnr"] > 0 and fast["perceptual"] > 0
    assert "merge too" not in printed
    (chosen,) = [line for line in printed.splitlines() if line.startswith("→ *")]
    assert "0.75" in chosen and "1.60×" in chosen
    assert f"written to {file} and {file.with_suffix('.png')}" in printed and file.with_suffix(".png").exists()
    pipe = tiny_pipeline()
    apply_tome(pipe, config=file)
    blocks = pipe.tome_summary(height=32, width=32).blocks
    assert blocks and not any(block.is_gated for block in blocks)


@pytest.mark.parametrize("option", ["--method", "--merging", "--config", None])
def test_only_known_candidates_get_further_ratios(option, model, tmp_path, monkeypatch):
    """What the options name is all that is measured; a method of theirs has the ratio that it brings."""
    ToMeConfig(method="todo").save(tmp_path / "tuned.json")
    value = {"--method": "todo", "--merging": "method=todo", "--config": str(tmp_path / "tuned.json")}.get(option)
    searched = {}

    def search(configs, *_, refines):
        searched.update(configs=list(configs), refines=refines)
        raise ToMeError("searched")

    monkeypatch.setattr(tune, "search", search)
    options = ["--speed-up", "1.1", "--size", "64", "--backend", "eager", "--output", str(tmp_path / "out.json")]
    assert main(["tune", "--model", str(model), *options, *([option, value] if option else [])]) != 0
    assert searched["refines"] == (option is None)
    assert option is None or searched["configs"] == [ToMeConfig(method="todo")]


NOTHING_FASTER, NOT_REACHED = "Nothing is faster than plain at 32 px in eager", "No candidate reaches the goal"


@pytest.mark.parametrize(
    ("goal", "speed_ups", "ratio", "words"),
    [
        (("--psnr", "1"), (1.2, 1.6), 0.75, "→ *"),
        (("--psnr", "1"), (1.2, 1.1), 0.25, "→ *"),
        (("--perceptual", "1000"), (1.2, 1.6), 0.75, "→ *"),
        (("--speed-up", "1.4"), (0.7, 0.99), 0, NOTHING_FASTER),
        (("--psnr", "5"), (0.7, 0.99), 0, NOTHING_FASTER),
        (("--speed-up", "3"), (1.2, 1.6), None, "Nearest: default, ratio 0.75, "),
        (("--psnr", "200"), (1.2, 1.6), None, "Nearest: default, ratio 0.25, "),
    ],
)
def test_goals(goal, speed_ups, ratio, words, command, output, monkeypatch, capsys):
    set_speed_ups(monkeypatch, dict(zip((0.25, 0.75), speed_ups, strict=True)))
    assert command(*goal) == (1 if ratio is None else 0)
    printed = capsys.readouterr().out
    assert words in printed and (NOT_REACHED in printed) == (ratio is None) != output.exists()
    if ratio is not None:
        content = json.loads(output.read_text())
        assert content["settings"]["ratio"] == ToMeConfig.load(output).ratio == ratio
        assert [content["figures"] is None, content["sizes"]["merges_from"] is None] == [ratio == 0] * 2
        apply_tome(tiny_pipeline(), config=output)


def test_a_whole_run_and_its_repetition(command, output, monkeypatch, worker_in_this_process):
    """Measured times decide, so any of the candidates may be chosen, or none."""
    options = ["--merging", "ratio=0.5", "method=kv,ratio=0.75", "--restart"]
    assert command("--psnr", "1", *options) == 0
    content = json.loads(output.read_text())
    assert content["backend"] == "eager" and len(content["candidates"]) == 2
    assert all(candidate["rounds"] == 2 for candidate in content["candidates"])
    for place, name in ((measurement, "measure_all"), (offline, "generate_batch"), (networks, "run")):
        monkeypatch.setattr(place, name, lambda *args, name=name, **_: pytest.fail(f"{name} was called"))
    assert command("--perceptual", "1000", *options[:-1]) == 0  # another goal
    assert json.loads(output.read_text())["candidates"] == content["candidates"]


@pytest.fixture
def traced(worker_in_this_process, monkeypatch):
    """The labels of programs that are traced. They are timed in this process, where merging is twice as fast."""
    labels = []
    for module in (backends, export):

        def save(traceable, planned, *others, trace=module.save):
            labels.append(f"{planned.label}, {planned.ratio}")
            return trace(traceable, planned, *others)

        monkeypatch.setattr(module, "save", save)
    monkeypatch.setattr(ProgramBackend, "seconds", lambda self, arm: 1.0 if arm.config else 2.0)
    return labels


def test_each_program_is_traced_once(command, traced, output):
    options = ["--backend", "predictor", "--speed-up", "1.9", "--merging", "ratio=0.5", "--rounds", "4", "--restart"]
    assert command(*options) == 0
    assert sorted(traced) == ["text_encoder, None", "unet at 32x32, 0.0", "unet at 32x32, 0.5", "vae_decoder, None"]
    content = json.loads(output.read_text())
    assert content["figures"]["rounds"] == 4 and content["figures"]["psnr"] > 0
    traced.clear()
    options.pop()
    assert command(*options, "--rounds", "5") == 0  # more rounds than there are
    assert not traced


def test_figures_are_measured_once_for_what_decides_them(model, tmp_path, monkeypatch):
    """Two candidates may have the same name in words: theirs differ in the seventh digit, and in the seed of dst."""
    runs = []

    def measure(cases, settings, output, command, programs):
        arms = cases[0].arms
        runs.append(len(arms) - 1)
        for arm in arms:
            arm.status, merging = "measured", 1 if arm.config is None else 1 + arm.config.seed + arm.ratio
            arm.seconds = [4 / merging] * settings.rounds
            if arm.ratio == 0.25:
                arm.fail("error", "of no use")
        return [replace(cases[0], arms=arms[::-1])]

    options = ["--model", str(model), "--size", "32", "--psnr", "3", "--output", str(tmp_path / "a.json")]
    case, evaluation, _ = tune._checked(_parser().parse_args(["tune", *options]))
    assert (case.batch, evaluation.steps, evaluation.guidance_scale) == (2, 50, 7.5)  # the model's own
    monkeypatch.setattr(measurement, "measure_all", measure)
    configs = [ToMeConfig(0.5), ToMeConfig(0.5000001), ToMeConfig(0.5, seed=1), ToMeConfig(0.25)]

    def timed(configs, rounds=1):
        candidates = [Candidate(config) for config in configs]
        Measurement(case, evaluation, tmp_path, "tune").time(candidates, rounds)
        return {candidate.config: candidate.failure or candidate.speed_up for candidate in candidates}

    first = timed(configs)
    assert first.pop(configs[3]) == "error: of no use"
    assert {config: speed_ups[0] for config, speed_ups in first.items()} == pytest.approx(
        dict(zip(configs, (1.5, 1.5000001, 2.5), strict=False)), rel=1e-9
    )
    assert {**timed(configs[:3]), **timed(configs[3:])} == {**first, configs[3]: "error: of no use"} and runs == [4]
    timed([*configs, ToMeConfig(0.4)])
    timed(configs[:2], rounds=2)
    assert runs == [4, 1, 2], "only what is missing"
    for file in tmp_path.glob("*/figures/*.json"):
        file.write_text(file.read_text()[:-1])
    with pytest.warns(RuntimeWarning, match="is damaged") as warned:
        assert timed(configs)[configs[0]] == first[configs[0]] and runs[3:] == [4], "damaged"
    assert len(warned) == 4
    monkeypatch.setattr(image_generation, "model_files", lambda model: f"{model}, retrained")
    timed(configs)
    assert runs[4:] == [4], "other weights under the same path"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speed-up", "1"], "--speed-up 1 is not allowed: it must be a number above 1"),
        (["--speed-up", "nan"], "--speed-up nan is not allowed"),
        (["--psnr", "0"], "--psnr 0 is not allowed: it must be a number above 0"),
        (["--perceptual", "-1"], "--perceptual -1 is not allowed"),
        (["--psnr", "30", "--size", "33"], "--size 33 is not allowed"),
        (["--psnr", "30", "--size", "8"], "size=8 is not allowed"),
        (["--psnr", "30", "--rounds", "0"], "--rounds 0 is not allowed"),
        (["--psnr", "30", "--steps", "0"], "steps=0 is not allowed"),
        (["--psnr", "30", "--merging", "ratio=0"], "A candidate of ratio=0 is not allowed"),
        (["--psnr", "30", "--merging", "ratio=0.001"], "merges no token"),
        (["--psnr", "30", "--model", "nowhere"], "nowhere is not a folder"),
        (["--psnr", "30", "--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--psnr", "30", "--output", "tuned.png"], "--output tuned.png is not allowed: name a .json file"),
    ],
)
def test_bad_options_are_errors_before_anything_is_measured(options, message, command, output, monkeypatch, capsys):
    monkeypatch.setattr(tune, "search", lambda *_: pytest.fail("something was measured"))
    assert command(*options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not output.exists()


def test_smaller_images_that_merge_are_reported(tmp_path, monkeypatch, capsys):
    """None does with one level. Each grid is compared by itself, and level 1 at 16 px is like level 2 at 32 px."""
    folder, output = tmp_path / "model", tmp_path / "tuned.json"
    tiny_pipeline(unet=unet_of_zoo()).save_pretrained(str(folder))
    set_speed_ups(monkeypatch, {0.5: 1.6})
    options = ["--size", "32", "--steps", "1", "--count", "2", "--guidance-scale", "1", "--backend", "eager"]
    options += ["--merging", "ratio=0.5,max_downsample=2", "--model", str(folder), "--output", str(output)]
    assert main(["tune", "--speed-up", "1.4", *options]) == 0
    assert json.loads(output.read_text())["sizes"] == {"measured": [32], "merges_from": 16}
    assert ToMeConfig.load(output).min_tokens == 64
    assert "Images from 16 px on merge too" in capsys.readouterr().out
    case = make_case(str(folder), size=32, batch=2)
    assert outcome.gate(ToMeConfig(0.5, min_tokens=4), case).min_tokens == 4, "its own"


@pytest.mark.parametrize("goals", [[], ["--psnr", "30", "--speed-up", "2"]])
def test_there_is_one_goal(goals, command):
    with pytest.raises(SystemExit):
        command(*goals)
