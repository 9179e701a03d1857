"""The file of what was measured: what is used from it, what is refused, and what several processes do to it."""

import json
import os
from threading import Thread
from unittest import mock

import pytest

from blockshock_lib import files
from blockshock_lib.kernels.tuning import store
from blockshock_lib.kernels.tuning.store import Store
from tests.kernels.tuning.test_search import KINDS, One, Two

pytestmark = pytest.mark.filterwarnings("error")  # but for those that are waited for
STORE = Store("products", KINDS)
PROBLEM = {"N": 4096, "B": 16, "gpu": "NVIDIA H200"}
VERSIONS = {"driver": "580.95", "torch": "2.11.0+cu130", "library": "800", "source": "0123456789ab"}
WAYS = {One(2): 0.25, Two(17): 0.5}
OTHER = {Two(3): 0.4}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path / "deep"))


def test_ways_of_several_kinds_are_kept_with_their_times_and_replaced():
    assert STORE.find(PROBLEM, VERSIONS) == {}
    STORE.keep(PROBLEM, VERSIONS, WAYS)
    STORE.keep(PROBLEM | {"B": 64}, VERSIONS, OTHER)
    assert STORE.find(PROBLEM, VERSIONS) == WAYS
    assert STORE.matching({"N": 4096}, VERSIONS) == [(PROBLEM, WAYS), (PROBLEM | {"B": 64}, OTHER)]
    STORE.keep(PROBLEM, VERSIONS, OTHER)
    assert STORE.find(PROBLEM, VERSIONS) == OTHER


@pytest.mark.parametrize("change", [{"torch": "2.13"}, {"library": "801"}, {"driver": ""}, {"source": "fedc"}], ids=str)
def test_what_other_versions_measured_is_not_used_and_said_until_it_is_measured_anew(change):
    STORE.keep(PROBLEM, VERSIONS, WAYS)
    ((name, now),) = change.items()
    with pytest.warns(UserWarning, match="stale: measured with") as told:
        assert STORE.find(PROBLEM, VERSIONS | change) == {}
    assert len(told) == 1 and str(told[0].message).endswith(f"with {name} {VERSIONS[name]!r}, now {now!r}")
    STORE.keep(PROBLEM, VERSIONS | change, OTHER)
    assert STORE.find(PROBLEM, VERSIONS | change) == OTHER
    assert STORE.find(PROBLEM, VERSIONS) == WAYS  # of a machine with the other versions, side by side


def with_entry(text, **fields):
    content = json.loads(text)
    return json.dumps(content | {"entries": [content["entries"][0] | fields]})


DAMAGES = {
    "cut": lambda text: text[: len(text) // 2],
    "not JSON": lambda text: "hello",
    "a list": lambda text: "[]",
    "another schema": lambda text: text.replace(f'"schema": {store.SCHEMA}', '"schema": 1'),
    "versions that are none": lambda text: with_entry(text, versions="2.11"),
    "no way": lambda text: with_entry(text, ways=[]),
    "no such way": lambda text: text.replace('"number": 17,', ""),  # more of them: test_search.py
    "no time": lambda text: text.replace('"ms": 0.5', '"ms": 0'),
    "no number for a time": lambda text: text.replace('"ms": 0.5', '"ms": NaN'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_a_warning_and_mended_by_the_next_choice(damage):
    STORE.keep(PROBLEM, VERSIONS, WAYS)
    whole = STORE.path.read_text()
    STORE.path.write_text(DAMAGES[damage](whole))
    assert STORE.path.read_text() != whole
    with pytest.warns(UserWarning, match="of another release: schema 1" if "schema" in damage else "damaged"):
        assert STORE.find(PROBLEM, VERSIONS) == {}
    STORE.keep(PROBLEM, VERSIONS, WAYS)
    assert STORE.path.read_text() == whole


def test_a_failed_write_costs_a_warning_and_leaves_the_old_file_and_no_litter(monkeypatch):
    STORE.keep(PROBLEM, VERSIONS, WAYS)
    before = sorted(os.listdir(store.folder()))
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError("no space left on device")))
    with pytest.warns(UserWarning, match="no space left"):
        STORE.keep(PROBLEM, VERSIONS, OTHER)
    assert STORE.find(PROBLEM, VERSIONS) == WAYS and sorted(os.listdir(store.folder())) == before
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(STORE.path))  # no folder can be made there
    with pytest.warns(UserWarning, match="not kept"):
        STORE.keep(PROBLEM, VERSIONS, WAYS)


def test_a_choice_waits_for_another_process_that_is_writing_and_loses_neither():
    STORE.keep(PROBLEM, VERSIONS, WAYS)
    other = PROBLEM | {"B": 64}
    thread = Thread(target=STORE.keep, args=(other, VERSIONS, OTHER))
    with files.locked(STORE.path):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(120)
    assert (STORE.find(PROBLEM, VERSIONS), STORE.find(other, VERSIONS)) == (WAYS, OTHER)


def test_a_version_changes_with_any_of_its_sources_and_libraries(tmp_path):
    sources = tmp_path / "a.cu", tmp_path / "a.py"
    for source in sources:
        source.write_text("x")
    seen = [store.versions(*sources, library="1"), store.versions(*sources, library="2")]
    for source in sources:
        source.write_text("y")
        seen.append(store.versions(*sources, library="1"))
    assert len({str(one) for one in seen}) == 4 and seen[0].keys() == {"driver", "torch", "library", "source"}
