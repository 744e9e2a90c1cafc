"""Which versions of Paddle and ppdiffusers are supported; checked once, when the package is imported."""

from packaging.version import InvalidVersion, Version

from .errors import UnsupportedVersionError

OLDEST_PADDLE = Version("2.6.1")
OLDEST_PPDIFFUSERS = Version("0.29.0")
_DEVELOPMENT = Version("0.0.0")  # the version of Paddle's and ppdiffusers' nightly builds


def check_paddle_version(version: str) -> None:
    """Reject versions of Paddle that give wrong results or were never tested.

    Args:
        version: `paddle.__version__`.

    Raises:
        UnsupportedVersionError: the version is 2.6.0, whose `put_along_axis` returns wrong values (Paddle issue
            61257), older, or not a valid version string.
    """
    parsed = _parse("PaddlePaddle", version)
    if parsed == _DEVELOPMENT or parsed >= OLDEST_PADDLE:
        return
    reason = "its put_along_axis returns wrong values" if parsed == Version("2.6.0") else "it was never tested"
    raise UnsupportedVersionError(
        f"ppdiffusers_tome does not run on PaddlePaddle {version} ({reason}): "
        "install paddlepaddle 2.6.2 or a 3.x release."
    )


def check_ppdiffusers_version(version: str) -> None:
    """Reject versions of ppdiffusers older than 0.29.0.

    Args:
        version: `ppdiffusers.__version__`.

    Raises:
        UnsupportedVersionError: the version is older, or not a valid version string.
    """
    parsed = _parse("ppdiffusers", version)
    if parsed != _DEVELOPMENT and parsed < OLDEST_PPDIFFUSERS:
        raise UnsupportedVersionError(
            f"ppdiffusers_tome does not run on ppdiffusers {version} (it was never tested): "
            "install ppdiffusers 0.29.0."
        )


def _parse(package: str, version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise UnsupportedVersionError(f"ppdiffusers_tome cannot read the version of {package}: {version!r}.") from None
