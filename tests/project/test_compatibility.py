"""Versions of Paddle and ppdiffusers are checked when the package is imported, with one sentence that helps."""

import re
import subprocess
import sys
from pathlib import Path

import paddle
import pytest
from packaging.requirements import Requirement

from ppdiffusers_tome import UnsupportedVersionError
from ppdiffusers_tome.compatibility import check_version

ROOT = Path(__file__).parents[2]
REQUIRED = re.search(r'"(ppdiffusers[<>=].*?)"', (ROOT / "setup.py").read_text())[1]


@pytest.mark.parametrize("version", ["2.6.1", "2.6.2", "2.6.2.post118", "3.0.0", "3.3.1", "4.0.0", "0.0.0"])
def test_supported_paddle_is_accepted(version):
    check_version("PaddlePaddle", version)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.6.0", "put_along_axis"),
        ("2.5.2", "never tested"),
        ("2.4.0rc1", "never tested"),
        ("1.8.5", "never tested"),
        ("unknown", "PaddlePaddle: 'unknown'"),
    ],
)
def test_unsupported_paddle_is_rejected_in_one_sentence(version, reason):
    with pytest.raises(UnsupportedVersionError, match=reason) as caught:
        check_version("PaddlePaddle", version)
    assert version in str(caught.value) and "\n" not in str(caught.value)


def test_old_ppdiffusers_is_rejected():
    for version in ("0.29.0", "0.29.1", "0.30.0", "0.0.0"):
        check_version("ppdiffusers", version)
        assert Requirement(REQUIRED).specifier.contains(version)
    assert not Requirement(REQUIRED).specifier.contains("0.31.0")
    with pytest.raises(UnsupportedVersionError, match=r"0\.24\.1 .* install ppdiffusers 0\.29\.0"):
        check_version("ppdiffusers", "0.24.1")


def test_import_checks_versions():
    """With Paddle 2.6.0 the import fails with one sentence."""
    code = "import paddle; paddle.__version__ = '2.6.0'; import ppdiffusers_tome"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "UnsupportedVersionError: ppdiffusers_tome does not run on PaddlePaddle 2.6.0" in done.stderr


def test_import_without_paddle_reports_what_to_install():
    code = "import sys; sys.modules['paddle'] = None; import ppdiffusers_tome"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    (locked,) = re.findall(r"^paddlepaddle==.*$", (ROOT / "requirements.txt").read_text(), re.M)
    assert f"needs PaddlePaddle: install {locked} for a CPU, or paddlepaddle-gpu for a GPU" in done.stderr


def test_a_library_that_paddle_lacks_is_no_missing_paddle():
    code = "import sys; sys.modules['paddle.base'] = None; import ppdiffusers_tome"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "paddle.base" in done.stderr.splitlines()[-1] and "needs PaddlePaddle" not in done.stderr


PADDLE_2_6 = paddle.__version__.startswith("2.6.") and sys.platform == "linux"
IMPORTS = [  # and whether Pillow is safe
    ("import paddle, ppdiffusers_tome", False),
    ("import paddle, zlib, ppdiffusers_tome", False),
    ("import zlib, paddle, ppdiffusers_tome", True),
    ("import ppdiffusers_tome, paddle", True),
]


SAVE_A_PNG = """
import io
import numpy as np
from PIL import Image
image = Image.fromarray(np.random.RandomState(0).randint(0, 255, (128, 128, 3), dtype=np.uint8))
image.save(file := io.BytesIO(), "PNG")
assert (np.asarray(Image.open(file)) == np.asarray(image)).all()
"""


@pytest.mark.skipif(not PADDLE_2_6, reason="about Paddle 2.6; with Paddle 3 a warning would end the collection")
@pytest.mark.parametrize(("imports", "is_safe"), IMPORTS)
def test_import_after_paddle_2_6_warns_of_its_zlib_which_breaks_pillow(imports, is_safe):
    command = [sys.executable, "-W", "ignore", "-W", "always::RuntimeWarning", "-c"]
    command.append(imports + SAVE_A_PNG if is_safe else imports)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("<string>:1: RuntimeWarning: ") == (not is_safe)
    assert is_safe or re.search("ppdiffusers_tome, or zlib, before paddle", done.stderr)
