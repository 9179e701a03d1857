"""On a real GPU. Compiled models that decode: right inside a CUDA graph, and of fewer kernels than the eager ones; 2:4
layers of 8 bits: right, in a graph too, or left with a reason.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from blockshock_lib import Sparse24, dense_, sparsify_, studies
from blockshock_lib.comm import Group
from blockshock_lib.engine.case_run import judge
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.graph import Graph
from blockshock_lib.kernels.patterns import eight_bits
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


@pytest.mark.parametrize("dtype", list(eight_bits.DTYPES))
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 24, 256])
def test_a_layer_of_8_bits_is_right_eager_tuned_and_in_a_graph(dtype, to, rows):
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 512)).to(device, to)
    try:
        sparsify_(model, Sparse24(dtype=dtype))
    except UnsupportedError as reason:
        pytest.skip(str(reason))
    layer, x = model[0], torch.randn(rows, 1024, device=device, dtype=to)
    print(f"{dtype}, {to}: cuSPARSELt applies the weight's scales: {layer.packed.fused}")
    values, scales = layer.packed.quantized(), layer.packed.tensors["scales"]
    x8, x_scale = eight_bits.quantized(x, values.dtype)
    made, by = eight_bits.by_kernel(x, values.dtype)
    assert torch.equal(made.view(torch.int8), x8.view(torch.int8)) and torch.equal(by, x_scale)
    truth = (x8.double() * x_scale) @ (values.double() * scales).t() + layer.bias.double()
    assert not eight_bits.off(layer(x), truth)
    layer.tune(x)
    assert not eight_bits.off(layer(x), truth)
    graph = Graph([lambda: layer(x)], device)
    assert not eight_bits.off(graph.fresh(), truth)
    graph.release()
    x[0, 5] = torch.nan
    assert layer(x)[0].isnan().all()
    dense_(model)
    torch.testing.assert_close(model[0].weight.float(), (values.float() * scales).to(to).float())
