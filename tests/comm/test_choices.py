"""The file of measured all-reduces."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

from blockshock_lib.comm import choices
from blockshock_lib.comm.choices import Key, Way

CPU = torch.device("cpu")
TIMES = {Way("one-shot", 16): 0.5, Way("nccl"): 0.75}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "all_reduce.json"


def test_what_is_kept_is_found_for_every_size_of_its_class(path):
    assert choices.load(path) == {} and choices.table(2, CPU, path) == {}
    choices.keep(Key.of(1000, 2, CPU), TIMES, path)
    choices.keep(Key.of(5000, 2, CPU), {Way("nccl"): 1.0}, path)
    choices.keep(Key.of(1000, 4, CPU), {Way("two-shot", 8): 1.0}, path)
    assert choices.table(2, CPU, path) == {1024: [Way("one-shot", 16), Way("nccl")], 8192: [Way("nccl")]}
    choices.keep(Key.of(1024, 2, CPU), {Way("nccl"): 1.0}, path)
    assert choices.table(2, CPU, path)[1024] == [Way("nccl")]


@pytest.mark.parametrize(("nbytes", "size"), [(1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048), (0, 1)])
def test_a_size_class_is_the_next_power_of_two(nbytes, size):
    assert choices.size_class(nbytes) == size


@pytest.mark.parametrize("field", ["driver", "torch", "nccl", "source"])
def test_what_another_version_measured_is_not_used_and_said_until_it_is_measured_anew(path, field):
    here = Key.of(1024, 2, CPU)
    choices.keep(replace(here, **{field: "other"}), TIMES, path)
    with pytest.warns(UserWarning, match="stale: measured with") as told:
        assert choices.load(path) and choices.table(2, CPU, path) == {}
    assert str(told[0].message).endswith(f"with {field} 'other', now {getattr(here, field)!r}")
    choices.keep(here, TIMES, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choices.table(2, CPU, path)


def test_what_another_gpu_or_number_of_ranks_measured_is_not_used_and_not_stale(path):
    choices.keep(replace(Key.of(1024, 2, CPU), gpu="other"), TIMES, path)
    choices.keep(Key.of(1024, 4, CPU), TIMES, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choices.table(2, CPU, path) == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace('"ms": 0.5', '"ms": -1'),
        lambda text: text.replace('"ms": 0.5', '"ms": NaN'),
        lambda text: text.replace('"blocks": 16', '"blocks": "16"'),
        lambda text: text.replace('"gpu"', '"card"'),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_then_replaced(path, damage):
    key = Key.of(1024, 2, CPU)
    choices.keep(key, TIMES, path)
    whole = path.read_text()
    path.write_text(damage(whole))
    with pytest.warns(UserWarning, match="damaged"):
        assert choices.load(path) == {}
    with pytest.warns(UserWarning, match="damaged"):
        choices.keep(key, TIMES, path)
    assert path.read_text() == whole


def test_a_file_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept"):
        choices.keep(Key.of(1024, 2, CPU), TIMES, tmp_path / "file" / "all_reduce.json")


def test_the_file_lies_in_the_named_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choices.keep(Key.of(1024, 2, CPU), TIMES)
    assert len(json.loads((tmp_path / "all_reduce.json").read_text())["choices"]) == 2


def test_a_key_belongs_to_the_kernels_to_their_launch_and_to_the_blocks_that_are_tried(monkeypatch):
    read = []
    monkeypatch.setattr(choices.cache, "version_of", lambda *sources: read.extend(sources) or "0" * 12)
    assert choices.Key.of(1 << 20, 2, torch.device("cpu")).source == "0" * 12
    assert [path.name for path in read] == ["all_reduce.cu", "symm.py", "all_reduce.py"]
    assert all(path.exists() for path in read)
