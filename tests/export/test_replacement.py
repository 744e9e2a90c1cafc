"""A folder is replaced as a whole, whatever ends the process, and nothing stays behind."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ppdiffusers_tome import replacement
from ppdiffusers_tome.replacement import check_replaceable, earlier_folder, replacing
from ppdiffusers_tome.signals import TERMINATED

# Loads the module without its package, which takes no time, and ends the process before its nth rename or while it
# writes.
SCRIPT = """
import os, signal, sys, time, types
from pathlib import Path
sys.modules["package"] = types.ModuleType("package")
sys.modules["package"].__path__ = [str(Path(sys.argv[1]).parent)]
from package import replacement
renames_left, rename = int(sys.argv[3]), os.rename
def rename_or_die(*names):
    global renames_left
    if not renames_left:
        os.kill(os.getpid(), signal.SIGKILL)
    renames_left -= 1
    rename(*names)
os.rename = rename_or_die
with replacement.replacing(Path(sys.argv[2])) as partial:
    (partial / "content").write_text("new")
    if sys.argv[4] == "wait":
        print("writing", flush=True)
        time.sleep(60)
"""

FIRST_PROCESS = ["unshare", "--pid", "--fork", "--kill-child", "--map-root-user"]  # what follows is process 1


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "content").write_text("old")
    return tmp_path / "out"


def names(folder):
    return sorted(path.name for path in folder.parent.iterdir())


def content(folder):
    return (folder / "content").read_text()


def replace(folder, text="new"):
    with replacing(folder) as partial:
        (partial / "content").write_text(text)


def start(folder, renames=9, wait=""):
    arguments = [replacement.__file__, str(folder), str(renames), wait]
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("renames", "expected"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_kill_between_the_steps(folder, renames, expected):
    with start(folder, renames) as process:
        assert process.wait(30) == -signal.SIGKILL
    assert len(names(folder)) == 2, "something is left behind"
    assert (earlier_folder(folder) is not None) == (not folder.exists()) == (renames == 1)
    with suppress(KeyboardInterrupt), replacing(folder):
        assert content(folder) == expected
        raise KeyboardInterrupt
    assert content(folder) == expected and names(folder) == ["out"]
    replace(folder, "newest")
    assert content(folder) == "newest" and names(folder) == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_temporary_folder_is_deleted_at_once_or_by_the_next_run(folder, number):
    with start(folder, wait="wait") as process:
        assert process.stdout.readline() == "writing\n"
        replace(folder, "by another process")
        assert len(names(folder)) == 2, "what a process uses is not deleted"
        process.send_signal(number)
        assert process.wait(30) == (TERMINATED if number == signal.SIGTERM else -number)
    assert content(folder) == "by another process"
    assert (names(folder) == ["out"]) == (number == signal.SIGTERM)
    replace(folder)
    assert names(folder) == ["out"]


def test_sigterm_ends_the_first_process_of_a_container(folder):
    """For which the kernel ignores the default action."""
    command = [*FIRST_PROCESS, sys.executable, "-c", SCRIPT, replacement.__file__, str(folder), "9", "wait"]
    if subprocess.run([*FIRST_PROCESS, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow unshare")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(30) == TERMINATED
    assert content(folder) == "old" and names(folder) == ["out"]


@pytest.mark.parametrize("nth", [0, 1])
def test_a_rename_that_fails_changes_nothing(folder, monkeypatch, nth):
    rename, calls = os.rename, []

    def failing(*names):
        calls.append(names)
        if len(calls) == nth + 1:
            raise PermissionError("not permitted")
        rename(*names)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(PermissionError):
        replace(folder)
    assert content(folder) == "old" and names(folder) == ["out"]


def test_a_file_that_cannot_be_deleted_is_left_beside_the_new_folder(folder, monkeypatch):
    (folder / "immutable").write_text("old")
    unlink = os.unlink

    def refuse(path, **options):
        if os.path.basename(path) == "immutable":
            raise PermissionError(f"{path}: not permitted")
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.warns(UserWarning, match=r"immutable.*\.partial"):
            replace(folder)
        (left,) = (path for path in folder.parent.iterdir() if path != folder)
        assert [path.name for path in left.iterdir()] == ["immutable"]
        replace(folder, "newest")
        assert content(folder) == "newest" and left.is_dir()
    replace(folder)
    assert names(folder) == ["out"]


def test_an_error_while_it_is_written_changes_nothing(folder):
    with pytest.raises(KeyboardInterrupt), replacing(folder) as partial:
        assert partial.parent == folder.parent
        raise KeyboardInterrupt
    assert content(folder) == "old" and names(folder) == ["out"]


def test_other_folders_are_not_touched(folder):
    others = [".out.settings", ".out.old.partial", "out.replaced", ".other.abcdefgh.partial"]
    for name in others:
        (folder.parent / name).mkdir()
    replace(folder)
    assert names(folder) == sorted(["out", *others])


def test_a_link_stays_and_a_new_folder_is_created(folder):
    link = folder.parent / "latest"
    link.symlink_to(folder)
    replace(link)
    assert link.is_symlink() and content(folder) == "new"
    replace(folder.parent / "a" / "b")
    assert content(folder.parent / "a" / "b") == "new"


def test_an_earlier_folder_that_a_killed_process_has_left_needs_overwrite(folder):
    aside = folder.rename(folder.parent / ".out.replaced")
    check_replaceable(folder)
    with pytest.raises(OSError, match=f"killed .*{aside}: rename it"):
        check_replaceable(folder, overwrite=False)
    assert names(folder) == [".out.replaced"], "a check changes nothing"
    shutil.copytree(aside, folder)
    check_replaceable(folder, overwrite=False)
    assert earlier_folder(folder) is None and earlier_folder(folder.parent / "a" / "b") is None


def test_of_two_that_write_a_new_folder_one_fails(tmp_path):
    new = tmp_path / "new"
    message = "new was written by another process in the meantime"
    with pytest.raises(FileExistsError, match=message), replacing(new, overwrite=False) as first:
        (first / "content").write_text("first")
        with pytest.raises(OSError, match="another process"):
            check_replaceable(new, overwrite=False)
        check_replaceable(new)
        check_replaceable(tmp_path / "other", overwrite=False)
        with replacing(new, overwrite=False) as second:
            (second / "content").write_text("second")
    assert content(new) == "second" and names(new) == ["new"]
    with replacing(tmp_path / "empty", overwrite=False):
        (tmp_path / "empty").mkdir()
    check_replaceable(new, overwrite=False)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_temporary_folder_that_another_process_locks_first(folder, monkeypatch, is_deleted):
    """It takes a new one without a lock for one that a killed process has left behind."""
    make, made = replacement._make_partial, []

    def make_and_lock(target):
        partial = make(target)
        made.append(partial)
        if len(made) == 1:
            other.enter_context(replacement._locked(partial))
            if is_deleted:
                partial.rmdir()
        return partial

    monkeypatch.setattr(replacement, "_make_partial", make_and_lock)
    with ExitStack() as other:
        replace(folder)
    assert content(folder) == "new" and names(folder) == ["out"] and len(made) == 2


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_the_umask_decides_who_may_read_a_folder(folder, umask):
    """Also in a shared folder, whose group is that of all that is in it: the set-group-ID bit stays."""
    folder.parent.chmod(0o2770)
    before = os.umask(umask)
    try:
        replace(folder)
        replace(folder.parent / "new")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE((folder.parent / name).stat().st_mode) for name in ("out", "new")}
    assert modes == {0o2777 & ~umask}


def test_signals_are_left_to_the_program_that_handles_them(folder, monkeypatch):
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        before = signal.signal(signal.SIGTERM, handler)
        try:
            with replacing(folder):
                assert (signal.getsignal(signal.SIGTERM) == handler) == (handler == signal.SIG_IGN)
            assert signal.getsignal(signal.SIGTERM) == handler
        finally:
            signal.signal(signal.SIGTERM, before)


def test_a_folder_that_cannot_be_replaced(folder):
    check_replaceable(folder)
    check_replaceable(folder.parent / "a" / "b")
    for wrong in ("/proc", "/proc/x", folder / "content" / "x"):
        with pytest.raises(OSError):
            check_replaceable(wrong)
    assert names(folder) == ["out"] and [path.name for path in folder.iterdir()] == ["content"]
