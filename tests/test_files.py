"""Writes that happen whole or not at all, and locks that one process holds."""

import os

import pytest

from blockshock_lib import files
from blockshock_lib.errors import RecordError


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(monkeypatch, tmp_path):
    path = tmp_path / "file.json"
    files.write_atomic(path, "old")

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="disk full"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.json"]


def test_a_reader_that_has_begun_reads_the_old_file_to_its_end(tmp_path):
    path = tmp_path / "file.json"
    files.write_atomic(path, "old")
    with path.open() as reader:
        files.write_atomic(path, "new")
        assert reader.read() == "old" and path.read_text() == "new"


@pytest.mark.parametrize("name", ["file.json", "."])
def test_only_one_holds_the_lock_of_a_file_or_a_folder(tmp_path, name):
    path = tmp_path / name
    with files.locked(path), pytest.raises(BlockingIOError), files.locked(path, 0.05):
        pass
    with files.locked(path, 0):
        pass
