"""Pictures of an evaluation: the same noise for all, one program folder for what differs in the ratio, resumable."""

import shutil
from dataclasses import replace

import numpy as np
import paddle
import pytest
from conftest import tiny_pipeline

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeError
from ppdiffusers_tome.evaluation import environment
from ppdiffusers_tome.evaluation.quality import drawing
from ppdiffusers_tome.evaluation.quality.drawing import Plan, claim_folder, draw, folder_of, loader, picture_paths
from ppdiffusers_tome.evaluation.quality.engines import EagerEngine, TorchUNet, without_ratio
from ppdiffusers_tome.evaluation.quality.settings import OTHER_SEEDS, PLAIN, Setting, study
from ppdiffusers_tome.generation.offline import Failure, draw_here

PLAN = Plan("model", (("a fox", 1), ("an owl", 2)), 32, steps=1, backend="eager")
HALF = Setting("0.5", "ratio", ToMeConfig(ratio=0.5))


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pictures(folder):
    return drawing.read_pictures(picture_paths(folder), 32)


def test_a_setting_draws_as_the_pipeline_does_and_leaves_no_trace(pipe, tmp_path):
    engine = EagerEngine(pipe, without_ratio(ToMeConfig(use_rand=False)))
    for setting in (PLAIN, replace(HALF, config=ToMeConfig(ratio=0.5, use_rand=False))):
        draw(PLAN, setting, tmp_path, draw_here(lambda: engine), batch=2)
    assert pipe.tome_summary().blocks == ()
    plain, merged = pictures(folder_of(PLAIN, tmp_path)), pictures(folder_of(HALF, tmp_path))
    assert plain.shape == (2, 32, 32, 3) and (plain != merged).any(axis=(1, 2, 3)).all()
    paddle.seed(2)
    with pipe.tome(ratio=0.5, use_rand=False):
        alone = pipe("an owl", num_inference_steps=1, guidance_scale=7.5, height=32, width=32).images[0]
    assert np.abs(np.asarray(alone).astype(int) - merged[1]).max() <= 1


def test_other_seeds_are_other_noise_of_the_same_prompts():
    plain, other = PLAN.jobs(PLAIN), PLAN.jobs(OTHER_SEEDS)
    assert [p.job.prompt for p in plain] == [p.job.prompt for p in other] == ["a fox", "an owl"]
    assert not {p.job.seed for p in plain} & {p.job.seed for p in other}


def test_pictures_that_failed_are_said_and_the_rest_is_kept(tmp_path):
    def drawer(batches):
        for batch in batches:
            yield batch[0], Failure("no such picture")
            yield batch[1], b"png"

    with pytest.raises(ToMeError, match=r"1 pictures of 0\.5 failed, the first of 'a fox': no such picture"):
        draw(PLAN, HALF, tmp_path, drawer, batch=2)
    assert len(picture_paths(folder_of(HALF, tmp_path))) == 1
    draw(PLAN, HALF, tmp_path, lambda batches: [(batches[0][0], b"png")], batch=2)
    assert len(picture_paths(folder_of(HALF, tmp_path))) == 2


def test_a_folder_is_for_one_plan(tmp_path):
    claim_folder(PLAN, tmp_path)
    claim_folder(replace(PLAN, threads=7), tmp_path)
    with pytest.raises(ToMeConfigError, match=r"drawn otherwise \(prompts, steps differ\): choose another folder"):
        claim_folder(replace(PLAN, steps=2, prompts=PLAN.prompts[:1]), tmp_path)


def test_a_folder_is_for_the_sources_that_drew_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "commit", lambda: "1234567")
    assert claim_folder(PLAN, tmp_path) == "1234567"
    monkeypatch.setattr(drawing, "commit", lambda: "7654321")
    assert claim_folder(PLAN, tmp_path) == "1234567", "another commit with the same sources: who drew is named"
    before = PLAN.identity()
    monkeypatch.setattr(drawing, "sources", lambda: "others")
    assert PLAN.identity() != before, "nor is a single image taken for its own"
    with pytest.raises(ToMeConfigError, match=r"drawn otherwise \(sources differ\): .* or remove this one"):
        claim_folder(PLAN, tmp_path)


@pytest.mark.parametrize("module", ["matching.py", "inference/export.py", "evaluation/quality/engines.py"])
def test_sources_are_all_modules(module, tmp_path, monkeypatch):
    copied = shutil.copytree(environment.PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment, "PACKAGE", copied)
    before = environment.sources.__wrapped__()
    assert before == environment.sources()
    (copied / module).write_text((copied / module).read_text() + "\n")
    assert environment.sources.__wrapped__() != before


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "torch"},
        {"size": 0},
        {"steps": 0},
        {"threads": 10**23},
        {"prompts": ()},
        {"guidance": float("nan")},
    ],
)
def test_plans_that_cannot_be_drawn_are_refused(change):
    with pytest.raises(ToMeConfigError):
        replace(PLAN, **change)


def test_one_exported_folder_for_settings_that_differ_in_the_ratio(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(drawing, "load_for_export", lambda *args, **kwargs: "pipe")
    monkeypatch.setattr(drawing, "export_pipeline", lambda *args, **kwargs: made.append((args, kwargs)))
    plan = replace(PLAN, backend="predictor")
    settings = [PLAIN, *study((0.25, 0.5), ("layers", "use_rand"))]
    exported = drawing.export_settings(plan, settings, tmp_path)
    folders = {setting.name: exported[setting].name for setting in settings}
    assert folders["plain"] == folders["0.25"] == folders["0.5"] == "defaults"
    assert folders["0.25-fixed"] == folders["0.5-fixed"] == "use_rand=False"
    assert len(made) == len(set(folders.values())) == 5
    (_, folder, ratios, sizes), others = made[0]
    assert (folder.name, ratios, sizes) == ("defaults", (0, 0.25, 0.5), [(32, 32)])
    assert "ratio" not in others and others["use_rand"]
    assert loader(plan, settings[1], exported).args == (exported[settings[1]], "cpu", 1)


def test_folders_without_pictures_are_refused(tmp_path):
    with pytest.raises(ToMeConfigError, match="has no PNG files"):
        picture_paths(tmp_path)


def test_pytorch_needs_an_interpreter():
    setting = study((0.5,), (), tomesd=(0.5,))[1]
    with pytest.raises(ToMeConfigError, match="name an interpreter"), drawing.open_torch(PLAN, setting, {}):
        pass


class FakeArm:
    """Adds nothing, or the ratio where tomesd is asked."""

    def take(self, inputs):
        self.inputs = inputs

    def output(self, merging):
        assert merging is None or merging["use_rand"] is False
        return self.inputs["sample"] + (0 if merging is None else merging["ratio"])


def test_a_unet_in_pytorch_is_asked_by_ratio(pipe):
    unet, sample = TorchUNet(pipe.unet, FakeArm(), {"use_rand": False}), paddle.zeros([2, 4, 8, 8])
    text = paddle.zeros([2, 7, 8])
    assert float(unet(sample, paddle.to_tensor(5), text).sample.max()) == 0
    unet.ratio = 0.5
    assert float(unet(sample, 5, text, return_dict=False)[0].max()) == 0.5
    with pytest.raises(ToMeConfigError, match="is not given class_labels"):
        unet(sample, 5, text, class_labels=text)
