"""Which versions of Paddle and ppdiffusers the package accepts; checked once, when it is imported."""

from packaging.version import InvalidVersion, Version

from .errors import UnsupportedVersionError

OLDEST_PADDLE = Version("2.6.1")
OLDEST_PPDIFFUSERS = Version("0.29.0")
_DEVELOPMENT = Version("0.0.0")  # what Paddle's and ppdiffusers' nightly builds call themselves


def check_paddle_version(version: str) -> None:
    """Refuse Paddle versions that compute wrongly or were never tried.

    Args:
        version: `paddle.__version__`.

    Raises:
        UnsupportedVersionError: 2.6.0, whose `put_along_axis` returns wrong values (Paddle issue 61257), anything
            older than 2.6.1, and strings that are no version.
    """
    found = _parse("PaddlePaddle", version)
    if found == _DEVELOPMENT or found >= OLDEST_PADDLE:
        return
    reason = "its put_along_axis returns wrong values" if found == Version("2.6.0") else "it was never tested"
    raise UnsupportedVersionError(
        f"ppdiffusers_tome does not run on PaddlePaddle {version} ({reason}): "
        "install paddlepaddle 2.6.2 or a 3.x release."
    )


def check_ppdiffusers_version(version: str) -> None:
    """Refuse ppdiffusers versions older than 0.29.0.

    Args:
        version: `ppdiffusers.__version__`.

    Raises:
        UnsupportedVersionError: the version is older, or no version at all.
    """
    found = _parse("ppdiffusers", version)
    if found != _DEVELOPMENT and found < OLDEST_PPDIFFUSERS:
        raise UnsupportedVersionError(
            f"ppdiffusers_tome does not run on ppdiffusers {version} (it was never tested): "
            "install ppdiffusers 0.29.0."
        )


def _parse(package: str, version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise UnsupportedVersionError(f"ppdiffusers_tome cannot read the version of {package}: {version!r}.") from None
