"""Files of what was measured: their folder, their lock, and that a reader never sees half of one."""

import fcntl
import os

import pytest

from blockshock_lib import cache


def test_the_folder_is_the_named_one_or_lies_in_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path / "named"))
    assert cache.folder() == tmp_path / "named"
    monkeypatch.delenv("BLOCKSHOCK_CACHE")
    monkeypatch.chdir(tmp_path)
    assert cache.folder() == tmp_path / ".cache" / "blockshock"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(monkeypatch, tmp_path):
    path = tmp_path / "file.json"
    cache.replace(path, "old")

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        cache.replace(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.json"]


def test_a_reader_that_has_begun_reads_the_old_file_to_its_end(tmp_path):
    path = tmp_path / "file.json"
    cache.replace(path, "old")
    with open(path) as reader:
        cache.replace(path, "new")
        assert reader.read() == "old" and path.read_text() == "new"


def test_only_one_holds_the_lock(tmp_path):
    path = tmp_path / "file.json"
    with cache.locked(path), open(path.with_suffix(".lock"), "w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(path.with_suffix(".lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_version_changes_with_any_of_its_sources(tmp_path):
    def version():
        cache.version_of.cache_clear()
        return cache.version_of(*files)

    files = tmp_path / "a.cu", tmp_path / "a.py"
    for file in files:
        file.write_text("x")
    seen = {version()}
    for file in files:
        file.write_text("y")
        seen.add(version())
    assert len(seen) == 3
    assert all(len(one) == 12 for one in seen)
