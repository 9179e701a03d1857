import json
import warnings
from dataclasses import replace
from threading import Thread

import pytest

from blockshock_lib import cache
from blockshock_lib.sparse24 import choices
from blockshock_lib.sparse24.choices import Key, Versions
from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import Setting

VERSIONS = Versions(driver="580.95", torch="2.11.0+cu130", cusparselt=800, kernel="0123456789ab")
KEY = Key(N=4096, K=2048, B=16, dtype="bfloat16", gpu="NVIDIA H200", versions=VERSIONS)
WAYS = {Config(1, 2, 1, 4, 2): 0.25, Setting(17, 2, 1): 0.5}
OTHER = {Setting(3): 0.4}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "choices.json"


def silently(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args)


@pytest.mark.parametrize("change", [{"N": 64}, {"K": 64}, {"B": 8}, {"dtype": "float16"}, {"gpu": "NVIDIA H100"}])
def test_another_problem_does_not_get_this_choice(path, change):
    choices.keep(KEY, WAYS, path)
    assert silently(choices.find, replace(KEY, **change), path) == {}


def test_ways_of_both_kinds_are_kept_with_their_times(path):
    assert silently(choices.find, KEY, path) == {}
    silently(choices.keep, KEY, WAYS, path)
    silently(choices.keep, replace(KEY, B=64), OTHER, path)
    assert silently(choices.find, KEY, path) == WAYS
    assert silently(choices.find, replace(KEY, B=64), path) == OTHER
    silently(choices.keep, KEY, OTHER, path)
    assert silently(choices.find, KEY, path) == OTHER


CHANGES = [{"torch": "2.13.0+cu130"}, {"cusparselt": 801}, {"driver": "590.1"}, {"driver": ""}, {"kernel": "fedcba"}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_file_of_other_versions_is_ignored_with_one_warning_and_replaced(path, change):
    choices.keep(KEY, WAYS, path)
    choices.keep(replace(KEY, B=64), WAYS, path)
    (name, now), now_key = *change.items(), replace(KEY, versions=replace(VERSIONS, **change))
    with pytest.warns(UserWarning, match="stale: measured with") as told:
        assert choices.find(now_key, path) == {}
    assert len(told) == 1 and f"{name} {getattr(VERSIONS, name)!r}, now {now!r}" in str(told[0].message)
    silently(choices.keep, now_key, OTHER, path)
    assert silently(choices.find, now_key, path) == OTHER
    assert len(json.loads(path.read_text())["choices"]) == 1  # nothing of the other versions is left in the file


def damaged(text):
    sound = json.loads(text)
    entry = sound["choices"][0]
    small, library = entry["ways"]

    def with_ways(*ways, **changes):
        return json.dumps({**sound, "choices": [{**entry, "ways": list(ways), **changes}]})

    return {
        "cut": text[: len(text) // 2],
        "not JSON": "hello",
        "a list": "[]",
        "empty": "",
        "the first schema": json.dumps({"schema": 1, "choices": []}),
        "versions that are none": json.dumps({**sound, "versions": "2.11.0"}),
        "a missing number": with_ways({k: v for k, v in library.items() if k != "split_k"}),
        "an unknown number": with_ways({**library, "tiles": 1}),
        "an unknown product": with_ways({**library, "product": "cutlass"}),
        "a string for a number": with_ways({**library, "alg_id": "17"}),
        "a string for a size": with_ways(library, N="4096"),
        "a negative algorithm": with_ways({**library, "alg_id": -1}),
        "a config of no tiles": with_ways({**small, "tiles": 0}),
        "no way": with_ways(),
        "two of a kind": with_ways(library, {**library, "alg_id": 3}),
        "no time": with_ways({**library, "ms": 0}),
    }


FAULTS = ["cut", "not JSON", "a list", "empty", "the first schema", "versions that are none", "a missing number"]
FAULTS += ["an unknown number", "an unknown product", "a string for a number", "a string for a size"]
FAULTS += ["a negative algorithm", "a config of no tiles", "no way", "two of a kind", "no time"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_ignored_with_a_warning_and_mended_by_the_next_choice(path, fault):
    choices.keep(KEY, WAYS, path)
    path.write_text(damaged(path.read_text())[fault])
    with pytest.warns(UserWarning, match="of another release: schema 1" if "schema" in fault else "damaged"):
        assert choices.find(KEY, path) == {}
    silently(choices.keep, KEY, OTHER, path)
    assert silently(choices.find, KEY, path) == OTHER


def test_a_failed_write_leaves_the_old_file_and_no_litter(path, monkeypatch):
    choices.keep(KEY, WAYS, path)
    before = sorted(p.name for p in path.parent.iterdir())

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.warns(UserWarning, match="no space left"):
        choices.keep(KEY, OTHER, path)
    assert choices.find(KEY, path) == WAYS
    assert sorted(p.name for p in path.parent.iterdir()) == before


def test_a_choice_waits_for_another_process_that_is_writing_and_loses_neither(path):
    choices.keep(KEY, WAYS, path)
    other = replace(KEY, B=64)
    thread = Thread(target=choices.keep, args=(other, OTHER, path))
    with cache.locked(path):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(10)
    assert (choices.find(KEY, path), choices.find(other, path)) == (WAYS, OTHER)


def test_the_file_lies_in_the_working_directory_or_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BLOCKSHOCK_CACHE", raising=False)
    assert choices.default_path() == tmp_path / ".cache" / "blockshock" / "choices.json"
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path / "elsewhere"))
    assert choices.default_path() == tmp_path / "elsewhere" / "choices.json"
