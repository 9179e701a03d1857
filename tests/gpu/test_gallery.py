"""Compiled models that decode, on a real GPU: right inside a CUDA graph, and of fewer kernels than the eager ones."""

from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from blockshock_lib import studies
from blockshock_lib.comm import Group
from blockshock_lib.engine.case_run import judge
from blockshock_lib.kernels.graph import Graph
from blockshock_lib.params import load
from blockshock_lib.studies.gallery import decode
from blockshock_lib.studies.gallery.accuracy import opened
from blockshock_lib.studies.gallery.methods import DECODERS
from blockshock_lib.studies.gallery.params import expand

LAYERS = 4
SHAPE = {"layers": LAYERS, "width": 1024, "mlp": 2048, "heads": 8, "kv_heads": 2, "contexts": [128], "batches": [4]}
COMPILED = [name for name, method in DECODERS.items() if method.compiled]


@pytest.fixture
def problem(monkeypatch):
    """So small a model is compiled all the same."""
    monkeypatch.setattr(decode, "copies_past_cache", lambda *_: 1)
    settings = {"dtype": "bf16"} | {f"decode.{name}": value for name, value in SHAPE.items()}
    params = load(studies.load("gallery"), "gallery_decode", settings, choose={"hardware": "cpu"})
    with torch.no_grad():
        yield opened(expand(params)[0], params, device=torch.device("cuda", 0), group=Group())


def kernels(call):
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(str(event.device_type).endswith("CUDA") for event in seen.events())


@pytest.mark.parametrize("method", COMPILED)
def test_a_compiled_model_is_right_in_a_graph_and_its_caches_are_written_in_place(problem, method):
    if reason := problem.unsupported(method):
        pytest.skip(reason)
    runner = problem.build(method)
    runner.tune()
    assert runner.seconds > 0
    graph = Graph([partial(runner.make, "token")], problem.device)
    for _ in range(2):
        for check in runner.compared("token", graph.fresh()):
            assert not (check.fault or judge(check)[0])
    caches = [cache.clone() for cache in problem.caches]
    problem.model(problem.before, caches, problem.place)
    torch.testing.assert_close(runner.caches, caches, rtol=0, atol=0.2)  # of values of about 1 in bf16
    graph.release()
    eager = next(name for name, one in DECODERS.items() if not one.compiled and one.kernel == DECODERS[method].kernel)
    beside = problem.build(eager)
    few, many = (kernels(partial(one.make, "token")) for one in (runner, beside))
    print(f"{method}: {few / LAYERS:.1f} kernels a layer, {many / LAYERS:.1f} of {eager}")
    assert few <= 0.8 * many
