import subprocess
import sys

import pytest

from ppdiffusers_tome import UnsupportedVersionError
from ppdiffusers_tome.compatibility import check_paddle_version, check_ppdiffusers_version


@pytest.mark.parametrize("version", ["2.6.1", "2.6.2", "2.6.2.post118", "3.0.0", "3.3.1", "4.0.0", "0.0.0"])
def test_supported_paddle_is_accepted(version):
    check_paddle_version(version)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.6.0", "put_along_axis returns wrong values"),
        ("2.5.2", "never tested"),
        ("2.4.0rc1", "never tested"),
        ("1.8.5", "never tested"),
        ("unknown", "cannot read the version of PaddlePaddle: 'unknown'"),
    ],
)
def test_unsupported_paddle_is_rejected_in_one_sentence(version, reason):
    with pytest.raises(UnsupportedVersionError, match=reason) as caught:
        check_paddle_version(version)
    assert version in str(caught.value) and "\n" not in str(caught.value)


def test_old_ppdiffusers_is_rejected():
    check_ppdiffusers_version("0.29.0")
    check_ppdiffusers_version("0.0.0")
    with pytest.raises(UnsupportedVersionError, match=r"0\.24\.1 .* install ppdiffusers 0\.29\.0"):
        check_ppdiffusers_version("0.24.1")


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
    assert "needs PaddlePaddle: install paddlepaddle==2.6.2 (CPU) or paddlepaddle-gpu==2.6.2" in done.stderr
