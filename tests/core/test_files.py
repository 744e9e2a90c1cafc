"""Files that are written as a whole: by several writers at once, through links, over modes and to pipes."""

import os
import stat
import threading
from pathlib import Path

import pytest

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.comparison.results import write_result
from ppdiffusers_tome.files import write_file


def test_writers_of_one_file_do_not_disturb_each_other_or_a_reader(tmp_path):
    path, contents = tmp_path / "shared", {letter * 20_000 for letter in "abcd"}
    write_file(path, "a" * 20_000)
    failures, seen, ended = [], set(), threading.Event()

    def write(content):
        try:
            for _ in range(20):
                write_file(path, content)
        except OSError as error:
            failures.append(error)

    def read():
        while not ended.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    reader.join()
    assert not failures and seen <= contents
    assert [entry.name for entry in tmp_path.iterdir()] == ["shared"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_names_the_file_that_is_written(tmp_path, exists):
    target, link, chain = tmp_path / "real" / "tome.json", tmp_path / "tome.json", tmp_path / "latest.json"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    link.symlink_to("real/tome.json")
    chain.symlink_to(link)
    ToMeConfig(ratio=0.5).save(chain)
    assert chain.is_symlink() and link.is_symlink() and not target.is_symlink()
    assert ToMeConfig.load(target) == ToMeConfig(ratio=0.5)
    assert [entry.name for entry in target.parent.iterdir()] == ["tome.json"]


def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_the_umask(tmp_path):
    private, new = tmp_path / "private", tmp_path / "new"
    private.write_text("old")
    private.chmod(0o640)
    before = os.umask(0o027)
    try:
        write_file(private, "new")
        write_file(new, "new")
        os.umask(0)
        write_file(private, "newest")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (private, new)] == [0o640, 0o640]
    assert private.read_text() == "newest"


def test_what_is_no_regular_file_is_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    contents = []
    reader = threading.Thread(target=lambda: contents.append(pipe.read_text()), daemon=True)
    reader.start()
    write_result(pipe, {"a": 1})
    reader.join(30)
    assert contents == ['{\n "a": 1\n}\n'] and stat.S_ISFIFO(pipe.stat().st_mode)
    output, into = os.pipe()
    write_file(Path(f"/dev/fd/{into}"), "text")  # as /dev/stdout is a link to a pipe
    write_file(Path("/dev/null"), "text")
    assert os.read(output, 10) == b"text" and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.close(output)
    os.close(into)


def test_an_error_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, "new")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    path = tmp_path / ("n" * 250 + ".json")
    write_file(path, "text")
    assert path.read_text() == "text"
