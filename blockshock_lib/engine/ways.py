"""What phase 1 times beside the forward and its pieces: every way that a piece can run, and what a call costs."""

from __future__ import annotations

from collections.abc import Callable

from blockshock_lib.comm import Group
from blockshock_lib.engine.protocol import Problem, Runner
from blockshock_lib.engine.work import Work


def of(problem: Problem, copies: list[Runner], name: str) -> dict[str, Work]:
    """By "metric way": each product alone, as a kernel and as the host's part of an eager call, and the forward through
    the layer's own CUDA graph.

    The last two are for GPUs: elsewhere the host does the product itself, and there are no graphs.
    """
    every = [one.products(problem.x) for one in copies]
    found: dict[str, Work] = {}
    for way in every[0]:
        calls = [products[way] for products in every]
        if len(every[0]) > 1:
            found[f"product_by_kernel {way}"] = Work(calls, heavy=True, detail=way)
        if problem.device.type == "cuda":
            found[f"host_us {way}"] = Work(calls, eager=True, host=True, detail=way)
    if problem.device.type == "cuda" and not problem.case.emulated:
        found["forward_graph_call"] = graphed(problem, copies)
    return found


def graphed(problem: Problem, copies: list[Runner]) -> Work:
    """The forward as a user of the layer's CUDA graph calls it; each is captured here, before anything is timed.

    It has its lead-in, as the plain call has: the host's times before it leave the GPU idle, and its clocks high.
    """
    if not copies[0].active:
        return Work([lambda: None] * len(copies), eager=True, heavy=True)
    graphs = [one.graphed() for one in copies]

    def call(graph: Callable) -> Callable:
        return lambda: graph(problem.x)

    def release() -> None:
        for graph in graphs:
            graph.close()

    calls = [call(graph) for graph in graphs]
    for one in calls:
        one()
    return Work(calls, eager=True, heavy=True, release=release)


def reductions(problem: Problem, runner: Runner, name: str) -> dict[str, Work]:
    """Every way to add up the ranks' partial results, alone; nothing where a method joins them in another way."""
    if not problem.cost(name).sent or not runner.active:
        return {}
    ways = runner.reductions(problem.x)
    return {f"reduce_by_kernel {way}": Work([call], before=call.reset, detail=way) for way, call in ways.items()}


def compressions(problem: Problem, name: str, group: Group) -> dict[str, Work]:
    """Every way to pack what this rank holds, for the forward and for dX; a weight's mask is known."""
    ways = problem.compressions(name, group)
    return {f"compress_by_kernel {way}": Work([call], heavy=True, detail=way) for way, call in ways.items()}
