"""benchmarks/tomesd_quality.py: PyTorch replaces the UNet alone, and its settings become a part of the result."""

from contextlib import AbstractContextManager

import evaluate
import numpy as np
import paddle
import tomesd_quality
from lab.arm import PYTORCH, Arm
from lab.quality.image_generation import image_folder, read_images
from lab.quality.image_sets import PLAIN_IMAGES

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.comparison.results import read_json
from ppdiffusers_tome.comparison.sheets import image_paths


class PaddleProcess(AbstractContextManager):
    """PyTorch's process, but with Paddle's UNet, and without merging."""

    def __init__(self, python, folder, unet, threads):
        self._unet, self.versions = unet, {"python": python}

    def __exit__(self, *exception):
        pass

    def set_inputs(self, inputs):
        self._inputs = {name: paddle.to_tensor(value) for name, value in inputs.items()}

    @paddle.no_grad()
    def output(self, merging):
        assert merging == {"ratio": 0.5}
        return self._unet(**self._inputs).sample.numpy()


def test_tomesd_replaces_the_unet_alone(model, tmp_path, monkeypatch):
    options = ["--count", "2", "--steps", "2", "--size", "32", "--ratio", "0.25", "--threads", "1", "--batch", "1"]
    assert evaluate.main(["--model", str(model), *options, "--output", str(tmp_path)]) == 0
    monkeypatch.setattr(tomesd_quality, "TorchProcess", PaddleProcess)
    for _ in range(2):  # again: nothing is added twice
        tomesd_quality.add_tomesd(tmp_path, [0.5], "a python")
    result = read_json(tmp_path / "quality.json")
    assert result["torch"] == {"python": "a python"}
    ours, tomesd = result["settings"]
    assert (ours["name"], tomesd["name"], tomesd["arm"]["by"]) == ("default 0.25", "tomesd 0.5 (PyTorch)", PYTORCH)
    # The plain images are made in ONNX Runtime, so a value may round to its neighbour; None: not even one does.
    assert all(psnr is None or psnr > 80 for psnr in tomesd["pairs"]["psnr"]), "equal to the plain images"
    assert set(tomesd["kid"]) == set(ours["kid"]) and tomesd["kid"] != ours["kid"]
    folders = (image_folder(arm, tmp_path) for arm in (PLAIN_IMAGES, Arm(ToMeConfig(0.5, "tomesd"), PYTORCH)))
    plain, images = (read_images(image_paths(folder), 32) for folder in folders)
    np.testing.assert_allclose(images, plain, rtol=0, atol=1)
