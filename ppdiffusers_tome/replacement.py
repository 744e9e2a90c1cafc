"""Replace a folder as a whole: after an error or a kill, the earlier folder is still complete."""

import fcntl
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .signals import signals_as_errors


@contextmanager
def replacing(folder: Path, overwrite: bool = True) -> Iterator[Path]:
    """A temporary folder beside `folder` that replaces it on success, and is deleted on any error.

    SIGTERM is such an error, as `signals_as_errors` describes.

    Without `overwrite` it only takes the place of a folder that is missing or empty then.

    The earlier folder is renamed to `.NAME.replaced`, the new folder takes its name, and only then the earlier folder
    is deleted. Between the two renames `folder` does not exist. If the process is killed there, the next process that
    replaces the folder renames the earlier folder back. Nobody else renames: they report where the earlier folder is,
    which `earlier_folder` finds.

    The next process that replaces the same folder deletes what a killed process left behind
    (`.NAME.xxxxxxxx.partial`), and tries again what could not be deleted. Temporary folders in use are locked. On
    file systems without locks nothing is deleted or restored this way.

    Raises:
        FileExistsError: another process has written `folder` in the meantime.
        OSError: a folder cannot be created or renamed.
    """
    target = Path(os.path.realpath(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    _restore(target)
    _delete_leftovers(target)
    with ExitStack() as stack:
        partial = stack.enter_context(_locked_partial(target))
        stack.enter_context(signals_as_errors())
        try:
            yield partial
            _swap(partial, target, overwrite)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _delete_earlier(partial, target)


def earlier_folder(folder: Path) -> Path | None:
    """The earlier folder, while `folder` does not exist because it is being replaced or that was interrupted."""
    target = Path(os.path.realpath(folder))
    return _aside(target) if not os.path.exists(target) and os.path.isdir(_aside(target)) else None


def check_replaceable(folder: Path, overwrite: bool = True) -> None:
    """Raise OSError if no folder can be created or renamed beside `folder`. Nothing is left behind.

    Without `overwrite`, also if another process is writing `folder` now, or was killed while it replaced it.
    """
    target = Path(os.path.realpath(folder))
    if not overwrite and target.parent.is_dir() and any(_is_in_use(path) for path in _partials(target)):
        raise OSError("another process is writing it now")
    if not overwrite and (earlier := earlier_folder(folder)) is not None:
        raise OSError(
            f"a process is replacing it now, or was killed while it did; the earlier one is {earlier}: rename it, or "
            "pass overwrite=True (--overwrite)"
        )
    if os.path.ismount(target):
        raise OSError("it is a mount point")
    parent = next(path for path in target.parents if path.exists())
    partial = _make_partial(parent / target.name)
    with suppress(FileNotFoundError):  # another process has taken it for a folder that is left behind
        os.rmdir(partial)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _make_partial(target: Path) -> Path:
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()  # not by `tempfile`, which makes private folders: umask and parent decide the mode of a new folder
    return partial


@contextmanager
def _locked_partial(target: Path) -> Iterator[Path]:
    """A new temporary folder, locked where the file system has locks."""
    while True:
        partial = _make_partial(target)
        with ExitStack() as stack:
            try:
                stack.enter_context(_locked(partial))
            except (BlockingIOError, FileNotFoundError):  # another process has taken it for a leftover
                shutil.rmtree(partial, ignore_errors=True)
                continue
            except OSError:  # a file system without locks
                pass
            if partial.exists():
                yield partial
                return


def _partials(target: Path) -> list[Path]:
    """The temporary folders of all processes that replace `target`, or were killed while they did."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.partial")
    return [path for path in target.parent.iterdir() if name.fullmatch(path.name)]


def _swap(partial: Path, target: Path, overwrite: bool) -> None:
    """Give `partial` the name `target`; then `partial` is the earlier folder, if there was a folder."""
    if not (overwrite and target.exists()):
        try:
            os.rename(partial, target)  # a folder that is not empty stays
        except OSError as error:
            if not target.exists():
                raise
            raise FileExistsError(
                f"{target} was written by another process in the meantime, and is unchanged: write to another folder."
            ) from error
        return
    aside = _aside(target)
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(_locked(target))  # so that no writer restores it between the renames
        os.rename(target, aside)
        try:
            os.rename(partial, target)
        except BaseException:
            if not target.exists():
                os.rename(aside, target)
            raise
        os.rename(aside, partial)


def _restore(target: Path) -> None:
    """Rename the earlier folder back if a process was killed while it replaced `target`; otherwise do nothing."""
    if not target.exists():
        with suppress(OSError), _locked(_aside(target)):
            os.rename(_aside(target), target)


def _delete_earlier(partial: Path, target: Path) -> None:
    try:
        if partial.exists():
            shutil.rmtree(partial)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)  # delete the rest
        warnings.warn(
            f"{target} is complete, but the earlier one cannot be deleted ({error}): delete {partial} yourself, or "
            f"write {target} again.",
            stacklevel=2,
        )


def _delete_leftovers(target: Path) -> None:
    """Delete the temporary folders that no process uses any more."""
    if target.exists():
        with suppress(OSError), _locked(_aside(target)):
            os.rename(_aside(target), _make_partial(target))
    for path in _partials(target):
        with suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    try:
        with _locked(folder):
            return False
    except OSError as error:
        return isinstance(error, BlockingIOError)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder until the context or the process ends; OSError if it is locked, missing, or cannot be locked.

    filelock locks no folders, only files, which it leaves behind: in an export or beside it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
