import json
import warnings
from dataclasses import replace
from threading import Thread

import pytest

from blockshock_lib.sparse24 import choices
from blockshock_lib.sparse24.choices import Key
from blockshock_lib.sparse24.tuning import Setting

KEY = Key(N=4096, K=2048, B=16, dtype="bfloat16", gpu="NVIDIA H200", torch="2.11.0+cu130", cusparselt=800)
SETTING = Setting(17, 2, 1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "choices.json"


def silently(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args)


@pytest.mark.parametrize("change", [{"N": 64}, {"K": 64}, {"B": 8}, {"dtype": "float16"}, {"gpu": "NVIDIA H100"}])
def test_another_problem_does_not_get_this_choice(path, change):
    choices.keep(KEY, SETTING, 0.5, path)
    assert silently(choices.find, replace(KEY, **change), path) is None


@pytest.mark.parametrize("change", [{"torch": "2.13.0+cu130"}, {"cusparselt": 801}])
def test_a_choice_of_other_versions_is_stale_and_ignored_with_a_warning(path, change):
    choices.keep(KEY, SETTING, 0.5, path)
    with pytest.warns(UserWarning, match=r"stale: measured with torch 2\.11\.0\+cu130"):
        assert choices.find(replace(KEY, **change), path) is None


def damaged(text):
    sound = json.loads(text)
    entry = sound["choices"][0]
    return {
        "cut": text[: len(text) // 2],
        "not JSON": "hello",
        "a list": "[]",
        "empty": "",
        "other schema": json.dumps({**sound, "schema": 99}),
        "missing field": json.dumps({**sound, "choices": [{k: v for k, v in entry.items() if k != "split_k"}]}),
        "a string for a number": json.dumps({**sound, "choices": [{**entry, "alg_id": "17"}]}),
        "a negative algorithm": json.dumps({**sound, "choices": [{**entry, "alg_id": -1}]}),
        "no time": json.dumps({**sound, "choices": [{**entry, "ms": 0}]}),
    }


@pytest.mark.parametrize("fault", sorted(damaged(json.dumps({"schema": 1, "choices": [{}]}))))
def test_a_damaged_file_is_ignored_with_a_warning_and_mended_by_the_next_choice(path, fault):
    choices.keep(KEY, SETTING, 0.5, path)
    path.write_text(damaged(path.read_text())[fault])
    with pytest.warns(UserWarning, match="damaged"):
        assert choices.find(KEY, path) is None
    with pytest.warns(UserWarning, match="damaged"):
        choices.keep(KEY, Setting(3), 0.4, path)
    assert silently(choices.find, KEY, path) == Setting(3)


def test_a_failed_write_leaves_the_old_file_and_no_litter(path, monkeypatch):
    choices.keep(KEY, SETTING, 0.5, path)
    before = sorted(p.name for p in path.parent.iterdir())

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(choices.os, "fsync", full)
    with pytest.warns(UserWarning, match="no space left"):
        choices.keep(KEY, Setting(3), 0.4, path)
    assert choices.find(KEY, path) == SETTING
    assert sorted(p.name for p in path.parent.iterdir()) == before


def test_a_choice_waits_for_another_process_that_is_writing_and_loses_neither(path):
    choices.keep(KEY, SETTING, 0.5, path)
    other = replace(KEY, B=64)
    thread = Thread(target=choices.keep, args=(other, SETTING, 0.5, path))
    with choices._locked(path):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(10)
    assert set(choices.load(path)) == {KEY, other}


def test_the_file_lies_in_the_working_directory_or_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BLOCKSHOCK_CACHE", raising=False)
    assert choices.default_path() == tmp_path / ".cache" / "blockshock" / "choices.json"
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path / "elsewhere"))
    assert choices.default_path() == tmp_path / "elsewhere" / "choices.json"
