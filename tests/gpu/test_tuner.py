"""Tuning on a real GPU: what is chosen is right, kept and the fastest; what is wrong or crashes is not chosen."""

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from blockshock_lib.kernels.sparse24 import cslt, small, tune
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config
from blockshock_lib.kernels.tuning.child import Search

from .test_products import assert_right, backend_for, problem

KINDS = {"cslt": (Setting,), "small": (Config,), "tuned": (Setting, Config)}


def device():
    return torch.device("cuda", torch.cuda.current_device())


def kept(packed, rows):
    problem = tune.problem_of(packed.shape, rows, packed.dtype, device())
    return tune.STORE.find(problem, tune.versions(device()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "b"), [(512, 1024, 3), (1024, 512, 64), (192, 320, 128), (2048, 2048, 512)])
def test_a_tuned_product_is_right_and_one_search_is_kept_for_all_backends(n, k, b, dtype, monkeypatch):
    rows = -(-b // 8) * 8
    searches, real = [], tune.searched
    monkeypatch.setattr(tune, "searched", lambda *args: searches.append(args) or real(*args))
    for name, kinds in KINDS.items():
        backend = backend_for(name, dtype)
        if name == "small" and b > small.MOST_ROWS:
            continue
        x, weight, mask = problem(n, k, b, dtype)
        packed = backend.pack(weight, mask)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*(damaged|stale|not kept|default stays)")
            backend.tune(x, packed)
        found = kept(packed, rows)
        assert packed.extra == {rows: min((way for way in found if isinstance(way, kinds)), key=found.get)}
        for _ in range(5):  # some algorithms have been wrong now and then only
            x.copy_(torch.randn_like(x))
            assert_right(backend.linear(x, packed), x, weight, mask)
    assert len(searches) == 1


# Faults in both products; only the child that runs PLANTED is broken


def planted_library(x, buffer, shape, setting, out=None, bias=None):
    if setting.alg_id == 1:
        return x.new_empty(x.shape[0], shape[0]) if out is None else out  # what is in memory must not pass for a result
    if setting.alg_id == 2 and setting.split_k == 1:
        break_context(x.device)
    if setting.alg_id == 3 and setting.split_k == 1:
        time.sleep(600)
    return library(x, buffer, shape, setting, out, bias)


def planted_kernel(x, buffer, shape, config, out=None, bias=None):
    if config == small.candidates(shape, x.shape[0])[0]:
        break_context(x.device)
    if config.split == 1:  # zeros take less time than any product
        return (x.new_empty(x.shape[0], shape[0]) if out is None else out).zero_()
    return kernel(x, buffer, shape, config, out, bias)


def break_context(device):
    torch.arange(4, device=device)[torch.tensor([1 << 20], device=device)]  # a failed assertion on the GPU


def planted(problem, device, **options):
    cslt.multiply, small.multiply = planted_library, planted_kernel
    return tune.run(problem, device, **options)


library, kernel = cslt.multiply, small.multiply
PLANTED = Search("tests.gpu.test_tuner:PLANTED", tune.SEARCH.kinds, planted, tune.SECONDS, silence=10)


def test_wrong_crashing_and_hanging_ways_cost_a_candidate_each_and_this_process_nothing():
    backend_for("small")
    crashing = small.candidates((1024, 1024), 16)[0]
    found = PLANTED.find(tune.problem_of((1024, 1024), 16, torch.bfloat16, device()), device())
    PLANTED.close()
    assert not found.failed and found.best() is not None
    unsplit = [t for t in found.trials if isinstance(t.way, Config) and t.way.split == 1 and t.way != crashing]
    silent = [trial for trial in found.trials if isinstance(trial.way, Setting) and trial.way.alg_id == 1]
    assert unsplit and silent and all(trial.wrong for trial in unsplit + silent)
    assert found.trial(crashing).crashed and found.trial(Setting(2)).crashed
    assert "without a word" in found.trial(Setting(3)).crashed
    chosen = found.best(Config).way  # the planted child alone shows its fault: in this process it would be right
    assert chosen != crashing and chosen.split > 1
    x, weight, mask = problem(1024, 1024, 16)
    packed = cslt.pack(weight, mask)
    for kind in (Setting, Config):
        packed.extra[16] = found.best(kind).way
        assert_right(tune.linear(x, packed), x, weight, mask)


HELD = """
import json, torch
from blockshock_lib.kernels.sparse24 import tune
held, problem = [], {"N": 8192, "K": 8192, "B": 64, "dtype": "bfloat16"}
for _ in range(2):  # the first also allocates cuBLAS's lasting workspace
    tune.run(problem, torch.device("cuda", 0))
    held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
print(json.dumps(held))
"""


def test_a_search_gives_its_memory_back():
    backend_for("cslt")
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", HELD], cwd=root, stdout=subprocess.PIPE, check=True, timeout=300)
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first[1] < 2**27, "the probe's weights are still held"
    assert second[0] - first[0] < 2**20 and second[1] - first[1] < 2**24
