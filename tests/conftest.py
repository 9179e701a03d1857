"""Fixtures of the tests that make whole runs, the order of the files, and Triton as its interpreter has it."""

import importlib.util
import inspect
import multiprocessing
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from blockshock_lib import files
from blockshock_lib.ranks import WorkerGroup, group, worker

QUICK = 1  # cases of each test; the rest are long: `make test` has something of every test

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    # Its own functions are made for the interpreter or for a GPU as it is imported, and torch.compile imports it too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.language")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    # Files with long tests come first, so that no worker is left alone with one of them at the end.
    long = {item.path for item in items if "long" in item.keywords or item.path.suffix == ".ipynb"}
    items.sort(key=lambda item: item.path not in long)
    cases = Counter()
    for item in items:
        cases[name := item.nodeid.partition("[")[0]] += 1
        if cases[name] > QUICK:
            item.add_marker(pytest.mark.long)


def pytest_generate_tests(metafunc):
    """Each function of the file whose first argument is `ctx`, as a rank calls it, is a `claim_of_ranks`."""
    if "claim_of_ranks" in metafunc.fixturenames:
        own = [one for one in vars(metafunc.module).values() if inspect.isfunction(one)]
        own = [one for one in own if one.__module__ == metafunc.module.__name__]
        claims = [one for one in own if [*inspect.signature(one).parameters][:1] == ["ctx"]]
        metafunc.parametrize("claim_of_ranks", claims, ids=[one.__name__ for one in claims])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    torch.manual_seed(0)  # what a test draws hangs neither on the tests before it nor on who runs them


@pytest.fixture(scope="module")
def outputs():
    """A folder for runs inside the project, as outputs/ is, but which `make list` does not show; removed afterwards."""
    place = files.ROOT / ".cache" / "tests"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def ranks_of(tmp_path_factory):
    """So many ranks on the CPU, which all tests of a process share: a group that one of them ended is made anew."""
    groups = {}

    def found(count):
        if count not in groups or not groups[count].alive:
            groups[count] = WorkerGroup(count, logs=tmp_path_factory.mktemp("logs"))
        return groups[count]

    yield found
    for one in groups.values():
        one.close()


@pytest.fixture
def pair(ranks_of):
    return ranks_of(2)


@pytest.fixture
def four(ranks_of):
    return ranks_of(4)


@pytest.fixture
def nothing_starts(monkeypatch):
    """Any process that is started, by whatever means, fails the test."""

    def refuse(*args, **_):
        raise AssertionError(f"a process was started: {args[1:]}")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


@pytest.fixture
def light(monkeypatch):
    """Ranks that are forked and load no torch: a group of any size starts at once, and is otherwise the real one."""

    monkeypatch.setattr(worker, "join", lambda *_: None)
    monkeypatch.setattr(group, "starter", lambda _: multiprocessing.get_context("fork"))
