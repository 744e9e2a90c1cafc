"""The import of Paddle and ppdiffusers: which versions are supported, and what their import breaks."""

import sys
import warnings
import zlib  # noqa: F401 - before Paddle 2.6, whose own zlib otherwise crashes Pillow; see warn_if_zlib_is_replaced

from packaging.version import InvalidVersion, Version

from .errors import UnsupportedVersionError

# The oldest version of each package that gives right results, and what to install instead of an older version.
SUPPORTED = {
    "PaddlePaddle": (Version("2.6.1"), "paddlepaddle 2.6.2 or a 3.x release"),
    "ppdiffusers": (Version("0.29.0"), "ppdiffusers 0.29.0"),
}
PADDLE_LIBRARY = "paddle.base.libpaddle"
_DEVELOPMENT = Version("0.0.0")  # the version of Paddle's and ppdiffusers' nightly builds


def import_paddle_and_ppdiffusers() -> None:
    """Import both, without warnings that do not concern users of this package.

    Raises:
        ModuleNotFoundError: there is no Paddle; the message says what to install.
        UnsupportedVersionError: as `check_version`.

    Warns:
        RuntimeWarning: as `warn_if_zlib_is_replaced`.
    """
    try:
        with warnings.catch_warnings():  # for those who compile operators of their own
            warnings.filterwarnings("ignore", "No ccache found", UserWarning)
            import paddle
    except ModuleNotFoundError as error:
        if error.name != "paddle":  # Paddle is there, and lacks something itself
            raise
        raise ModuleNotFoundError(
            "ppdiffusers_tome needs PaddlePaddle: install paddlepaddle==3.3.1 for a CPU, or paddlepaddle-gpu for a "
            "GPU (2.6.2 up to RTX 30 and A100; for newer ones 3.3.1 from Paddle's own index), not both.",
            name="paddle",
        ) from error
    check_version("PaddlePaddle", paddle.__version__)
    warn_if_zlib_is_replaced()
    import_pip()

    import ppdiffusers

    check_version("ppdiffusers", ppdiffusers.__version__)


def check_version(package: str, version: str) -> None:
    """Reject versions that give wrong results or were never tested.

    Args:
        package: "PaddlePaddle" or "ppdiffusers".
        version: its `__version__`.

    Raises:
        UnsupportedVersionError: the version is older than those of `SUPPORTED`, as Paddle 2.6.0, whose
            `put_along_axis` returns wrong values (Paddle issue 61257), or it is not a valid version string.
    """
    try:
        parsed = Version(version)
    except InvalidVersion:
        raise UnsupportedVersionError(f"ppdiffusers_tome cannot read the version of {package}: {version!r}.") from None
    oldest, instead = SUPPORTED[package]
    if parsed != _DEVELOPMENT and parsed < oldest:
        is_wrong = package == "PaddlePaddle" and parsed == Version("2.6.0")
        reason = "its put_along_axis returns wrong values" if is_wrong else "it was never tested"
        raise UnsupportedVersionError(
            f"ppdiffusers_tome does not run on {package} {version} ({reason}): install {instead}."
        )


def import_pip() -> None:
    """Import pip, as paddlenlp does, without the warning of setuptools that this prints on Python 3.10 and 3.11.

    There setuptools, which Paddle imports, withdraws its distutils when pip is imported and warns that a later version
    may not. pip alone is imported here, because the import of ppdiffusers sets filters of warnings that must last.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setuptools is replacing distutils", UserWarning)
        import pip  # noqa: F401


def warn_if_zlib_is_replaced() -> None:
    """Warn where Paddle 2.6 was imported before zlib.

    Paddle 2.6 exports the functions of an older zlib that it contains. If the system's zlib is loaded because Paddle
    needs it, the loader connects the calls within zlib to Paddle's functions, which expect different structures:
    Pillow then crashes the process when it writes a PNG. If zlib is loaded before Paddle, its calls stay its own.

    Warns:
        RuntimeWarning: Paddle 2.6 came first; the message has the remedy.
    """
    modules = [*sys.modules]
    if sys.platform != "linux" or PADDLE_LIBRARY not in modules:
        return
    zlib_came_first = "zlib" in modules and modules.index("zlib") < modules.index(PADDLE_LIBRARY)
    if sys.modules["paddle"].__version__.startswith("2.6.") and not zlib_came_first:
        warnings.warn(
            "Paddle 2.6 was imported before ppdiffusers_tome and has replaced functions of zlib: Pillow may crash the "
            "process when it reads or writes a PNG. Import ppdiffusers_tome, or zlib, before paddle.",
            RuntimeWarning,
            stacklevel=4,
        )
