"""A folder that changes, moves or is damaged after it was loaded, and what is derived from it."""

import hashlib
import json
import os
import pickle
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest
from conftest import in_threads

from ppdiffusers_tome import ToMeConfigError, ToMeExportError
from ppdiffusers_tome.errors import ExportChangedError
from ppdiffusers_tome.inference import OnnxRuntime, load_pipeline, read_manifest
from ppdiffusers_tome.run import onnx_cache, onnx_cpu
from ppdiffusers_tome.run.folder import WEIGHTS
from ppdiffusers_tome.run.onnx_weights import OPTIMIZED, SharedWeights
from ppdiffusers_tome.run.paddle_runtime import Predictor
from ppdiffusers_tome.serving.engine import load_engine

RUNTIMES = ["onnxruntime", "openvino", "paddle"]


def prediction_of(pipe, ratio, batch=1):
    """What the UNet's program of a ratio computes, for inputs that are always the same."""
    pipe.unet.ratio = ratio
    random, size = np.random.RandomState(0), pipe.unet.manifest.sizes[0]
    sample = random.standard_normal([batch, 4, *(side // 2 for side in size)]).astype("float32")
    text = random.standard_normal([batch, 24, 32]).astype("float32")
    return pipe.unet(paddle.to_tensor(sample), 10, encoder_hidden_states=paddle.to_tensor(text)).sample.numpy()


@pytest.fixture
def folder_of(exported_folder, onnx_folder, tmp_path):
    """A function: a copy of the export for a runtime, without what is derived from it."""

    def copy(runtime, name="a"):
        source = exported_folder if runtime == "paddle" else onnx_folder
        return Path(shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns(OPTIMIZED)))

    return copy


def become_another_model(folder):
    """Change all weights, and the hashes in `tome.json`, as if another model had been exported."""
    manifest = json.loads((folder / "tome.json").read_text())
    for name in manifest["files"]:
        if name.endswith(WEIGHTS) and (folder / name).stat().st_size:
            content = bytearray((folder / name).read_bytes())
            end = slice(0 if name.endswith(".weights") else -1024, None)  # .pdiparams begin with text
            values = np.frombuffer(content[end], "float32")
            is_weight = (abs(values) > 1e-6) & (abs(values) < 1e3)  # integers look like the smallest floats
            content[end] = np.where(is_weight, values * 1.1, values).astype("float32").tobytes()
            (folder / name).write_bytes(content)
            manifest["files"][name]["sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "tome.json").write_text(json.dumps(manifest))
    return folder


def replace(folder, other):
    """As `export --overwrite` does."""
    folder.rename(folder.with_name("earlier"))
    other.rename(folder)


def overwrite(folder, other):
    """As `cp -r` does, and with the earlier times as `rsync --times --inplace` may."""
    for path in filter(Path.is_file, other.rglob("*")):
        target = folder / path.relative_to(other)
        stat = target.stat()
        target.write_bytes(path.read_bytes())
        os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def remove(folder, other):
    shutil.rmtree(folder)


# A folder that changes


@pytest.mark.parametrize(
    ("runtime", "change"), [("onnxruntime", replace), ("openvino", overwrite), ("paddle", remove)]
)
def test_a_program_of_another_export_is_never_loaded(folder_of, runtime, change):
    """The image would be of the earlier text encoder and VAE, and of the new UNet."""
    folder = folder_of(runtime)
    pipe = load_pipeline(folder, runtime=runtime, threads=1)
    expected = prediction_of(pipe, 0.5)
    change(folder, become_another_model(folder_of(runtime, "other")))
    np.testing.assert_array_equal(prediction_of(pipe, 0.5), expected)  # what is loaded stays as it is
    with pytest.raises(ExportChangedError, match=r"has changed .*load_pipeline"):
        prediction_of(pipe, 0)
    with pytest.raises(ExportChangedError, match="has changed"):
        pipe.vae.encode(paddle.zeros([1, 3, 32, 40]))


def test_weights_in_use_are_not_mapped_from_the_folder(folder_of, caplog):
    """Those of optimized programs are, whose files no copy of another folder overwrites."""
    folder = folder_of("onnxruntime")
    (folder / "onnx" / OPTIMIZED).write_text("a file in the way")
    pipe = load_pipeline(folder, threads=1)
    expected = prediction_of(pipe, 0.5)
    assert "cannot be written" in caplog.text
    become_another_model(folder)
    np.testing.assert_array_equal(prediction_of(pipe, 0.5), expected)


def test_a_copy_of_the_same_export_may_take_its_place(folder_of):
    folder = folder_of("paddle")
    pipe = load_pipeline(folder, runtime="paddle", threads=1)
    prediction_of(pipe, 0.5)
    replace(folder, folder_of("paddle", "other"))
    again = load_pipeline(folder, runtime="paddle", threads=1)
    np.testing.assert_array_equal(prediction_of(pipe, 0), prediction_of(again, 0))


def test_programs_that_are_compiled_again_are_checked_again(folder_of):
    """OpenVINO reads a program when it first runs, and for inputs of other shapes."""
    folder = folder_of("openvino")
    pipe = load_pipeline(folder, runtime="openvino", threads=1)
    prediction_of(pipe, 0.5)
    replace(folder, become_another_model(folder_of("openvino", "other")))
    with pytest.raises(ExportChangedError, match="has changed"):
        prediction_of(pipe, 0.5, batch=3)


def test_a_folder_that_changes_while_it_is_loaded(folder_of, monkeypatch):
    """Tokenizer, scheduler and configs are read after all files were compared."""
    folder, other = folder_of("onnxruntime"), folder_of("onnxruntime", "other")
    (other / "scheduler" / "scheduler_config.json").write_text("{}")
    read = Path.read_text

    def late(path, **options):
        if path == folder / "model_index.json":
            replace(folder, other)
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", late)
    with pytest.raises(ExportChangedError, match=r"scheduler_config\.json .*changed"):
        load_pipeline(folder, threads=1)


def test_weights_that_were_not_verified_are_checked_when_they_change(folder_of):
    folder = folder_of("paddle")
    pipe = load_pipeline(folder, runtime="paddle", threads=1, verify=False)
    prediction_of(pipe, 0.5)
    overwrite(folder, become_another_model(folder_of("paddle", "other")))
    with pytest.raises(ExportChangedError, match="has changed"):
        prediction_of(pipe, 0)


def test_an_engine_of_another_export_than_expected_is_an_error(folder_of):
    """As on Ray, where an engine that was lost is loaded again."""
    folder = folder_of("onnxruntime")
    manifest = read_manifest(folder)
    assert load_engine(folder, expected=manifest, threads=1)
    become_another_model(folder)
    with pytest.raises(ExportChangedError, match="another export"):
        load_engine(folder, expected=manifest, threads=1)


# A folder that moves


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_relative_path_is_resolved_when_the_folder_is_loaded(folder_of, runtime, monkeypatch, tmp_path):
    folder = folder_of(runtime)
    monkeypatch.chdir(folder.parent)
    pipe = load_pipeline("a", runtime=runtime, threads=1)
    monkeypatch.chdir("/")
    prediction_of(pipe, 0.5)


def test_a_link_is_resolved_when_the_folder_is_loaded(folder_of, tmp_path):
    """To switch a link is the way to replace a folder under a running server: what is loaded later is still right."""
    folder, link = folder_of("onnxruntime"), tmp_path / "latest"
    link.symlink_to(folder)
    pipe = load_pipeline(link, threads=1)
    prediction_of(pipe, 0.5)
    link.unlink()
    link.symlink_to(become_another_model(folder_of("onnxruntime", "other")))
    np.testing.assert_array_equal(prediction_of(pipe, 0), prediction_of(load_pipeline(folder, threads=1), 0))


def test_links_into_the_cache_of_a_hub_are_an_error_with_a_remedy(folder_of, tmp_path):
    """ONNX Runtime and OpenVINO refuse weights that are such a link."""
    folder = folder_of("onnxruntime")
    (tmp_path / "blobs").mkdir()
    (folder / "onnx" / "unet.weights").rename(tmp_path / "blobs" / "0123")
    (folder / "onnx" / "unet.weights").symlink_to(tmp_path / "blobs" / "0123")
    with pytest.raises(ToMeExportError, match=r"is a link .*snapshot_download\("):
        load_pipeline(folder)


# What is derived from it


def derived(folder):
    """The folder with the optimized programs of this machine."""
    (beside,) = (folder / "onnx" / OPTIMIZED).iterdir()
    return beside


def flip(path, share):
    """Flip a bit of every float of a part of a file, whose place is a share of its size."""
    content = np.fromfile(path, "uint8")
    start = int(share * len(content))
    content[start : start + 4096 : 4] ^= 64
    content.tofile(path)


def flip_weights(beside):
    (weights,) = beside.glob("weights-*")
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        flip(weights, share)


def cut(pattern):
    def change(beside):
        for path in beside.glob(pattern):
            path.write_bytes(path.read_bytes()[:-100])

    return change


def change_program(beside):
    for path in beside.glob("*.onnx"):
        flip(path, 0.5)


def delete(pattern):
    return lambda beside: [path.unlink() for path in beside.glob(pattern)]


def point_elsewhere(beside):
    """An index that is valid, and wrong."""
    index = json.loads((beside / onnx_cache.INDEX).read_text())
    places = list(index["places"].values())
    index["places"] = dict(zip(index["places"], [*places[1:], places[0]], strict=True))
    (beside / onnx_cache.INDEX).write_text(json.dumps(index))


DAMAGES = {
    "weights flipped": flip_weights,
    "weights cut": cut("weights-*"),
    "weights deleted": delete("weights-*"),
    "programs flipped": change_program,
    "programs cut": cut("*.onnx"),
    "programs deleted": delete("*.onnx"),
    "index cut": cut(onnx_cache.INDEX),
    "index deleted": delete(onnx_cache.INDEX),
    "index wrong": point_elsewhere,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_optimized_programs_are_made_again(folder_of, damage, caplog):
    folder = folder_of("onnxruntime")
    expected = prediction_of(load_pipeline(folder, threads=1), 0.5)
    DAMAGES[damage](derived(folder))
    np.testing.assert_array_equal(prediction_of(load_pipeline(folder, threads=1), 0.5), expected)
    beside = derived(folder)
    made = {path.name: path.stat().st_mtime_ns for path in beside.iterdir()}
    index = json.loads((beside / onnx_cache.INDEX).read_text())
    assert set(made) == {onnx_cache.LOCK, onnx_cache.INDEX, index["weights"], *index["programs"]}
    np.testing.assert_array_equal(prediction_of(load_pipeline(folder, threads=1), 0.5), expected)
    assert {path.name: path.stat().st_mtime_ns for path in beside.iterdir()} == made
    assert "cannot be written" not in caplog.text


def test_optimized_weights_are_not_compared_with_verify_off_but_never_missing(folder_of):
    folder = folder_of("onnxruntime")
    load = partial(load_pipeline, folder, threads=1, verify=False)
    expected = prediction_of(load(), 0.5)
    for damage in ("weights cut", "weights deleted", "programs flipped"):
        DAMAGES[damage](derived(folder))
        np.testing.assert_array_equal(prediction_of(load(), 0.5), expected)


def test_optimized_weights_of_another_export_are_not_used(folder_of):
    """Of the same size and time, as in images of containers, where all files may have the same time."""
    folder = folder_of("onnxruntime")
    prediction_of(load_pipeline(folder, threads=1), 0.5)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.weights")}
    become_another_model(folder)
    for path, time_ns in times.items():
        os.utime(path, ns=(time_ns, time_ns))
    shutil.copytree(folder, folder.with_name("copy"), ignore=shutil.ignore_patterns(OPTIMIZED))
    expected = prediction_of(load_pipeline(folder.with_name("copy"), threads=1), 0.5)
    np.testing.assert_array_equal(prediction_of(load_pipeline(folder, threads=1), 0.5), expected)


def test_nothing_is_derived_from_damaged_weights(folder_of):
    """Even if they are not compared when the folder is loaded: it would stay when they are repaired."""
    folder = folder_of("onnxruntime")
    flip(folder / "onnx" / "unet.weights", 0.5)
    with pytest.raises(ToMeExportError, match=r"unet.weights "):
        prediction_of(load_pipeline(folder, threads=1, verify=False), 0.5)


@pytest.fixture
def room(monkeypatch):
    """A function that lets the weights of optimized programs grow to a number of bytes, as a full disk does."""

    def limit(room):
        store = SharedWeights.store

        def limited(weights, data):
            if weights.path.stat().st_size + len(data) > room:
                with weights.path.open("ab") as file:
                    file.write(data[:1000])
                raise OSError(28, "No space left on device")
            return store(weights, data)

        monkeypatch.setattr(SharedWeights, "store", limited)

    return limit


def test_without_room_a_warning_says_so_and_nothing_is_left_behind(folder_of, room, monkeypatch, caplog):
    folder = folder_of("onnxruntime")
    expected = prediction_of(load_pipeline(folder_of("onnxruntime", "other"), threads=1), 0.5)
    room(0)
    np.testing.assert_allclose(prediction_of(load_pipeline(folder, threads=1), 0.5), expected, atol=1e-5)
    assert "optimized cannot be written ([Errno 28] No space left on device)" in caplog.text
    assert "make room, or make the folder writable" in caplog.text
    assert [path.name for path in derived(folder).iterdir()] == [onnx_cache.LOCK]


def test_a_program_without_room_leaves_the_others_as_they_are(folder_of, room, caplog):
    folder = folder_of("onnxruntime")
    pipe = load_pipeline(folder, threads=1)
    prediction_of(pipe, 0.5)
    before = {path.name: path.read_bytes() for path in derived(folder).iterdir()}
    room(0)
    pipe.vae.encode(paddle.zeros([1, 3, 32, 40]))
    assert "No space left on device" in caplog.text
    assert {path.name: path.read_bytes() for path in derived(folder).iterdir()} == before


def test_what_onnx_runtime_cannot_write_is_a_warning_too(folder_of, monkeypatch, caplog):
    """It raises an error of its own where a disk is full."""
    folder = folder_of("onnxruntime")

    def fail(*arguments):
        raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : Failed to write the external data")

    monkeypatch.setattr(onnx_cpu, "_write_optimized", fail)
    prediction_of(load_pipeline(folder, threads=1), 0.5)
    assert "optimized cannot be written ([ONNXRuntimeError] : 1 : FAIL : Failed to write" in caplog.text


# Threads and processes


def test_threads_that_call_one_pipeline_load_each_program_once(folder_of, monkeypatch):
    folder, loaded = folder_of("onnxruntime"), []
    load = OnnxRuntime.load

    def slow(runtime, exported, files):
        loaded.append(files.program)
        time.sleep(0.05)  # so that the threads meet
        return load(runtime, exported, files)

    monkeypatch.setattr(OnnxRuntime, "load", slow)
    pipe = load_pipeline(folder, threads=1)
    inputs = paddle.zeros([1, 4, 16, 20]), 10
    text = paddle.zeros([1, 24, 32])
    in_threads(3 * [lambda: pipe.unet(*inputs, encoder_hidden_states=text)] + [lambda: pipe.unet.load((32, 40), 0.5)])
    assert loaded == ["onnx/unet_40x32_0.5.onnx"] and pipe.unet.loads == 1


@pytest.mark.parametrize("runtime", ["onnxruntime", "paddle"])
def test_a_copy_of_a_model_loads_its_own_programs(folder_of, runtime):
    pipe = load_pipeline(folder_of(runtime), runtime=runtime, threads=1)
    pipe.set_progress_bar_config(disable=True)
    settings = {"height": 32, "num_inference_steps": 1, "output_type": "np"}
    settings["width"], images = pipe.unet.manifest.sizes[0].width, []
    for _ in range(2):
        paddle.seed(0)
        images.append(pipe("a fox", **settings).images)
        for name in ("unet", "vae", "text_encoder"):
            setattr(pipe, name, pickle.loads(pickle.dumps(getattr(pipe, name))))
        assert not pipe.unet.loaded
    np.testing.assert_array_equal(*images)


def test_paddle_programs_in_a_process_that_was_forked_are_an_error(folder_of, monkeypatch):
    """There, those of the parent hang with two threads, and new ones crash."""
    folder = folder_of("paddle")
    pipe = load_pipeline(folder, runtime="paddle", threads=1)
    prediction_of(pipe, 0.5)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    for ratio in (0.5, 0):
        with pytest.raises(ToMeExportError, match=r'forked .*"spawn"'):
            prediction_of(pipe, ratio)
    monkeypatch.setattr(Predictor, "_process", None)  # it was forked before a program was loaded
    prediction_of(pipe, 0.5)


@pytest.mark.parametrize("most", ["2", 1.5, [1]])
def test_max_programs_that_is_no_number_is_an_error(exported_folder, most):
    with pytest.raises(ToMeConfigError, match=r"max_programs=.* 1 or more, or None"):
        load_pipeline(exported_folder, max_programs=most)
