"""What phase 1 times beside the forward and its pieces: every way that a piece can run, and what a call costs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from blockshock_lib.engine.study import Runner
from blockshock_lib.engine.timing import Work
from blockshock_lib.kernels.sparse24 import cslt, small
from blockshock_lib.kernels.sparse24.backends import BACKENDS
from blockshock_lib.layers import BlockShockLinear, ShardedLinear

ONE_BUFFER = ("cslt", "small")  # what `tuned` chooses from: both multiply with cuSPARSELt's buffer


def of_product(copies: Sequence[Runner]) -> list[Work]:
    """Each product that the layer does not take, as a kernel; on GPUs the forward through its CUDA graph too."""
    problem, every = copies[0].problem, [products(one.layer, copies[0].problem.x) for one in copies]
    others = [way for way in every[0] if len(every[0]) > 1 and way != taken(copies[0].layer, problem.x)]
    found = [Work("product_by_kernel", [calls[way] for calls in every], way, heavy=True) for way in others]
    return [*found, _graphed(copies)] if problem.device.type == "cuda" and not problem.case.emulated else found


def products(layer: ShardedLinear, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Every way to make the product of `layer.local` on its one weight that this machine has, by name, tuned."""
    if not isinstance(layer, BlockShockLinear) or layer.backend.name not in (*ONE_BUFFER, "tuned"):
        return {taken(layer, x): lambda: layer.local(x)}
    x, found = x[:, layer.cols], {}
    for name in ONE_BUFFER:
        backend, few = BACKENDS[name], name != "small" or x.shape[0] <= small.MOST_ROWS
        if few and not backend.unsupported(x.device, x.dtype):
            form = replace(layer.packed, backend=name, extra={})
            backend.tune(x, form)
            found[name] = partial(backend.linear, x, form)
    return found


def taken(layer: ShardedLinear, x: Tensor) -> str:
    """Which of `products` the layer takes for x [B, K], and what a search found for it; "" where that is not known."""
    if not isinstance(layer, BlockShockLinear):
        form = layer.form if layer.forms else "dense"
        asked = layer.gemm.ways and not form.startswith(("batched", "transposed"))
        way = layer.gemm.way(*layer.factors(x)) if asked else None
        return form + (f", {way.library}" + f" in {way.splits} parts" * (way.splits > 1) if way else "")
    if layer.backend.name != "tuned":
        return layer.backend.name
    way = layer.packed.extra.get(cslt.padded(x.shape[0]))
    return "" if way is None else "small" if isinstance(way, small.Config) else "cslt"


def _graphed(copies: Sequence[Runner]) -> Work:
    """The forward as a user of the layer's CUDA graph calls it; each is captured here, before anything is timed."""
    x, graphs = copies[0].problem.x, [one.layer.graphed() for one in copies if one.active]
    for graph in graphs:
        graph(x)
    calls = [partial(graph, x) for graph in graphs] or [lambda: None] * len(copies)
    return Work("forward_graph_call", calls, eager=True, release=lambda: [graph.close() for graph in graphs])


def reductions(one: Runner) -> list[Work]:
    """Every way to add up the ranks' partial results, alone; nothing where a method joins them in another way."""
    layer = one.layer
    if not one.problem.cost(one.name).sent or not one.active or layer.collective != "all-reduce":
        return []
    ways = layer.group.reductions(layer.local(one.problem.x))
    return [Work("reduce_by_kernel", [call], way, before=call.reset) for way, call in ways.items()]
