"""Which versions of Paddle and ppdiffusers are supported, and what their import breaks: once, at import."""

import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from .errors import UnsupportedVersionError

# The oldest version of each package that gives right results, and what to install instead of an older one.
SUPPORTED = {
    "PaddlePaddle": (Version("2.6.1"), "paddlepaddle 2.6.2 or a 3.x release"),
    "ppdiffusers": (Version("0.29.0"), "ppdiffusers 0.29.0"),
}
PADDLE_LIBRARY = "paddle.base.libpaddle"
# An ELF library on x86_64: tags of its dynamic section, and relocations that hold the address of a function.
_STRINGS, _SYMBOLS, _TABLES = 5, 6, ((7, 8), (23, 2))  # _TABLES of relocations: where each is, and its size
_FUNCTION_RELOCATIONS = (6, 7)
_LINK_MAP = 2  # what dlinfo is asked for
_DEVELOPMENT = Version("0.0.0")  # the version of Paddle's and ppdiffusers' nightly builds


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


def repair_zlib() -> None:
    """Let the system's zlib call its own functions where Paddle 2.6, imported before it, has replaced them.

    Paddle exports the functions of an older zlib that it contains. If the system's zlib is loaded because Paddle needs
    it, the loader connects the calls within zlib to Paddle's functions, which expect other structures: Pillow then
    crashes the process when it writes a PNG. This restores the addresses that zlib has if it is loaded before Paddle.
    Where they are right, whatever the version of Paddle, nothing is written.

    Warns:
        RuntimeWarning: the addresses cannot be restored; the message has the remedy.
    """
    paddle, zlib = (getattr(sys.modules.get(name), "__file__", None) for name in (PADDLE_LIBRARY, "zlib"))
    names = [*sys.modules]
    if paddle is None or (zlib is not None and names.index("zlib") < names.index(PADDLE_LIBRARY)):
        return
    try:
        library = ctypes.CDLL("libz.so.1", mode=os.RTLD_NOLOAD)
        if _file_at(_address(ctypes.CDLL(paddle, mode=os.RTLD_NOLOAD), "inflate")) != paddle:
            return  # as of Paddle 3: it exports no zlib
    except (OSError, AttributeError):  # no zlib is loaded, or this is not Linux
        return
    try:
        if platform.machine() != "x86_64":
            raise OSError(f"{platform.machine()} has other relocations")
        memory = os.open("/proc/self/mem", os.O_RDWR)  # a wrong address is an OSError here
        try:
            for slot, address in _function_slots(library, memory):
                if _file_at(_read(memory, slot)) == paddle:
                    os.pwrite(memory, address.to_bytes(8, "little"), slot)
        finally:
            os.close(memory)
    except (OSError, AttributeError, KeyError) as error:
        warnings.warn(
            "paddle was imported before ppdiffusers_tome and has replaced functions of zlib, so that Pillow crashes "
            f"when it writes a PNG; this could not be repaired ({error!r}): import ppdiffusers_tome, or zlib, before "
            "paddle.",
            RuntimeWarning,
            stacklevel=3,
        )


def _function_slots(library: ctypes.CDLL, memory: int) -> Iterator[tuple[int, int]]:
    """Where a library holds the addresses of functions that it defines and calls, and what these should be."""
    link_map = ctypes.c_size_t()
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), _LINK_MAP, ctypes.byref(link_map)):
        raise OSError("dlinfo failed")
    base, section = _read(memory, link_map.value), _read(memory, link_map.value + 16)
    dynamic = {}
    while tag := _read(memory, section):
        dynamic[tag] = _read(memory, section + 8)
        section += 16
    for table, size in _TABLES:
        start = dynamic.get(table, 0)
        for relocation in range(start, start + dynamic.get(size, 0), 24):
            info = _read(memory, relocation + 8)
            symbol = dynamic[_SYMBOLS] + (info >> 32) * 24
            is_defined = _read(memory, symbol + 6, 2) != 0  # the section of the definition
            if info & 0xFFFFFFFF in _FUNCTION_RELOCATIONS and is_defined:
                name = os.pread(memory, 80, dynamic[_STRINGS] + _read(memory, symbol, 4)).split(b"\0")[0].decode()
                yield base + _read(memory, relocation), _address(library, name)


def _read(memory: int, address: int, size: int = 8) -> int:
    return int.from_bytes(os.pread(memory, size, address), "little")


def _address(library: ctypes.CDLL, function: str) -> int:
    return ctypes.cast(library[function], ctypes.c_void_p).value or 0


def _file_at(address: int) -> str | None:
    """The library that contains an address."""
    described = (ctypes.c_char_p * 4)()  # a Dl_info; the file's name comes first
    is_known = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), described)
    return os.fsdecode(described[0]) if is_known and described[0] else None
