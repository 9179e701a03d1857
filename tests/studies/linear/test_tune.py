"""Tuning ahead of a run, with a made-up GPU and searches. Real ones: tests/gpu."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib import params
from blockshock_lib.__main__ import main
from blockshock_lib.kernels.sparse24 import cslt
from blockshock_lib.kernels.sparse24 import tune as search
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config
from blockshock_lib.kernels.tuning.search import Error, Found, Trial
from blockshock_lib.runs import machine
from blockshock_lib.studies.linear import tune
from blockshock_lib.studies.linear.tune import Product
from tests.studies.linear import measuring

CONFIG, CPU = Config(1, 2, 1, 4, 1), torch.device("cpu")
RIGHT, WRONG = Error(1.0, 1.0), Error(40.0, 9.0)
load = partial(measuring.load, hardware="cuda", n=[4096], b=[16, 64])
FOUND = Found((Trial(CONFIG, RIGHT, 0.02), Trial(Setting(17), RIGHT, 0.05), Trial(Setting(3), WRONG)))


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """The problems that were searched for, and what each search finds."""
    seen = SimpleNamespace(problems=[], found=FOUND)

    def searched(problem, device):
        seen.problems.append(problem)
        if kept := [best for kind in (Setting, Config) if (best := seen.found.best(kind))]:
            search.STORE.keep(problem, search.versions(device), {best.way: best.ms for best in kept})
        return seen.found

    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(cslt, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(search, "searched", searched)
    monkeypatch.setattr(search, "versions", lambda device: {"driver": "580"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    return seen


def tuned(products, gpu):
    said = []
    return tune.tune_products(products, CPU, said.append), said


def test_a_phase_asks_for_the_term_of_each_rank_and_batch_once_and_a_backward_for_the_transposed_one_where_it_may():
    assert tune.of_phase(load()) == [Product(4096, 4096, b, "bf16") for b in (16, 64)]
    assert tune.of_phase(load(hardware="cuda-4")) == [Product(4096, 2048, b, "bf16") for b in (16, 64)]
    both = [Product(4096, 2048, 16, "bf16"), Product(2048, 4096, 16, "bf16")]
    for mask, count in (("checkerboard", 2), ("random", 1)):
        assert tune.of_phase(load("phase2", hardware="cuda-4", b=[16], mask=mask)) == both[:count]


def test_the_ranks_sums_are_those_of_y_and_backward_of_dx_by_size_class():
    assert tune.sums_of_phase(load()) == [16 * 4096 * 2, 64 * 4096 * 2]
    wide = {"n": (), "sweep__n": [], "sweep__features": [[8192, 4096]], "b": [16]}
    assert tune.sums_of_phase(load(**wide)) == [1 << 17]
    assert tune.sums_of_phase(load("phase2", **wide)) == [1 << 17, 1 << 18]
    assert tune.sums_of_phase(load(hardware="cuda-1")) == []


def test_a_phase_of_another_study_has_nothing_to_tune(gpu, capsys):
    assert main(["tune", "--phase", "attention_speed"]) == 2 and not gpu.problems
    assert "--phase: attention_speed chooses its kernels as it runs; allowed: a phase" in capsys.readouterr().err


def test_a_product_is_searched_once_and_its_line_tells_the_best_of_each_kind(gpu):
    product = Product(4096, 4096, 13, "bf16")
    done, said = tuned([product], gpu)
    assert done and [problem["B"] for problem in gpu.problems] == [16]
    assert said[0] == (
        "4096x4096 B=16 bfloat16: small tiles 1 warpgroups 2 unroll 1 depth 4 split 1 0.0200 ms, "
        "cslt alg_id 17 split_k 1 split_k_mode -1 0.0500 ms "
        "[3 tried: 1 wrong, 0 refused, 0 crashed]"
    )
    assert said[1].endswith("sparse24.json")
    again, said = tuned([product], gpu)
    assert again and len(gpu.problems) == 1 and said[0].endswith("[kept before]") and "0.0200 ms" in said[0]


def test_a_machine_without_a_gpu_says_why_nothing_can_be_tuned(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["tune", "--phase", "phase3"]) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said == "error: nothing can be tuned on this machine: no CUDA device is available"


@pytest.mark.parametrize(("right", "status"), [(True, 0), (False, 1)])
def test_the_verbs_status_says_whether_all_that_the_phase_asks_for_is_right(gpu, monkeypatch, capsys, right, status):
    gpu.found = FOUND if right else Found((Trial(Setting(), WRONG),), failed="given up after 1 crashes")
    asked = load(hardware="cuda-1")
    monkeypatch.setattr(machine, "admit", lambda *_: None)
    monkeypatch.setattr(params, "load", lambda *_, **__: asked)
    assert main(["tune"]) == status
    own = {"N": 4096, "K": 4096, "dtype": "bfloat16", "gpu": "some GPU"}
    assert gpu.problems == [own | {"B": b} for b in (16, 64)]
    said = capsys.readouterr().out
    told = "nothing is right [1 tried: 1 wrong, 0 refused, 0 crashed; given up after 1 crashes]"
    assert said.count("4096x4096 B=") == 2 and said.count(told) == 2 * (not right)
