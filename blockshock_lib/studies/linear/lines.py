"""Reference lines of phase 1: B1 as PyTorch ships it, compiled, in another precision, fused. They are no methods."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from blockshock_lib.comm import Group, all_reduce
from blockshock_lib.comm.symm import NO_MULTICAST
from blockshock_lib.engine.case_run import CaseRun, errors
from blockshock_lib.engine.study import Check, Problem
from blockshock_lib.engine.timing import Work
from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.files import environment
from blockshock_lib.layers import ShardedLinear
from blockshock_lib.studies.linear.reference import Reference

# Hopper's tensor cores add e4m3 products in 14 bits, 128 at a time (arXiv:2412.19437), of which the bf16 baseline knows
# nothing: of its own errors the line's may be so many times what the gate allows a method.
LOOSER = 2.0


def unsupported(line: str, group: Group, x: Tensor) -> str:
    """Why these ranks cannot run it for x [B, K]; "" where they can. The same on all of them."""
    if not group.connected:
        return "one process plays all ranks"
    if line == "fused":
        odd = x.shape[0] % group.world_size
        return all_reduce.reducer(group, x.device).why or f"{x.shape[0]} rows do not split over the ranks" * bool(odd)
    if line in ("torch", "compiled"):
        slow = line == "compiled" and x.device.type != "cuda"
        return "no time of a CPU counts, and each shape compiles for seconds" * slow
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (8, 9):
        return "fp8 products need a GPU of compute capability 8.9 or more"
    return "fp8 is compared with bf16 alone" * (x.dtype != torch.bfloat16)


def rowwise(layer: ShardedLinear, x: Tensor) -> Callable[[], Tensor]:
    """nn.Linear under RowwiseParallel on the layer's weight, given x [B, K] whole."""
    mesh = DeviceMesh.from_group(layer.group.handle, x.device.type)
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    for name, where in (("weight", Shard(1)), ("bias", Replicate())):
        if (own := getattr(layer, name)) is not None:
            setattr(linear, name, nn.Parameter(DTensor.from_local(own.detach(), mesh, [where])))
    module = parallelize_module(linear, mesh, RowwiseParallel(input_layouts=Replicate()))
    return lambda: collectives.wait_tensor(module(x))  # as whatever read it would: the sum is only started


def _by_hand(x: Tensor, cols: slice, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    y = collectives.all_reduce(F.linear(x[:, cols], weight), "sum", group)
    return y if bias is None else y + bias


def compiled(layer: ShardedLinear, x: Tensor) -> Callable[[], Tensor]:
    """B1 as its equation, whose product, sum and bias torch.compile takes whole."""
    forward = torch.compile(_by_hand, fullgraph=True, dynamic=False)
    call = partial(forward, x, layer.cols, layer.weight, layer.bias, layer.group.handle.group_name)
    call()  # a graph of one shape serves all layers; what it cannot be shows before any rank waits for the others
    return call


def quantized(t: Tensor) -> tuple[Tensor, Tensor]:
    """t [m, n] in bf16 -> e4m3 [m, n] and their one fp32 scale, a power of two: bf16 holds each e4m3 * scale."""
    most = torch.linalg.vector_norm(t, torch.inf, dtype=torch.float32)
    scale = torch.exp2(torch.log2(most).ceil() - 8)
    return (t / scale).to(torch.float8_e4m3fn), scale


def fp8(layer: ShardedLinear, x: Tensor) -> Callable[[], Tensor]:
    """B1 in e4m3 into bf16, and then its own all-reduce: x is quantized in each call, the weight was before."""
    weight, of_weight = quantized(layer.weight)  # [N, k]

    def product() -> Tensor:
        mine, scale = quantized(layer.columns(x))
        how = {"scale_a": scale, "scale_b": of_weight, "out_dtype": x.dtype, "out": layer.workspace(x)}
        return torch._scaled_mm(mine, weight.t(), **how)

    product()  # what this machine's library cannot do shows before any rank waits for the others
    return lambda: layer.reduce(product())


def fused(layer: ShardedLinear, x: Tensor) -> Callable[[], Tensor]:
    """B1's product pipelined with a reduce-scatter of y's rows in PyTorch's symmetric memory; then an all-gather."""

    def forward() -> Tensor:
        weight, name = layer.weight.t(), layer.group.handle.group_name
        share = torch.ops.symm_mem.fused_matmul_reduce_scatter(layer.columns(x), weight, "sum", 0, name)
        y = layer.group.all_gather(share)
        return y if layer.bias is None else y.add_(layer.bias)

    with environment(**{NO_MULTICAST: "1"}):  # the op's own workspace is made and mapped in the first call
        forward()
    return forward


MAKERS = {"torch": rowwise, "compiled": compiled, "fp8": fp8, "fused": fused}


def _calls(line: str, problem: Problem, layers: list[ShardedLinear]) -> dict[ShardedLinear, Callable[[], Tensor]]:
    if reason := unsupported(line, problem.group, problem.x):
        raise UnsupportedError(reason)
    if line == "compiled":
        torch.compiler.reset()  # of the shapes of earlier cases; past eight PyTorch compiles none
    try:
        return {layer: MAKERS[line](layer, problem.x) for layer in layers}
    except torch.OutOfMemoryError:
        raise
    # What PyTorch's own Python says of shapes it does not take, or what its release lacks, ends no other method.
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise UnsupportedError(first_line(error)) from error


def fp8_reference(problem: Problem, name: str) -> Reference:
    """Of y from what e4m3 keeps of W and x, each rank's columns by scales of their own: proves the kernel, not fp8."""
    weight, x = problem.weight.clone(), problem.x.clone()
    for part in problem.parts(name):
        for whole in (weight, x):
            kept, scale = quantized(whole[:, part.cols])
            whole[:, part.cols] = kept.to(whole.dtype) * scale
    return Reference(weight, problem.bias, x)


def _fp8_checks(run: CaseRun, one: Any, reference: Callable[[], Reference], y: Tensor) -> Iterator[Check]:
    yield from one.compared({"y": y}, run.agree(reference), record=False, looser=LOOSER)
    if run.once("fp8_error_rms"):
        (error,) = run.group.max_over_ranks([errors(y, one.problem.reference.y)[1]], run.device)
        run.add(one.name, "fp8_error_rms", error)


def works(own: Any) -> Iterator[Work]:
    """Of B1's `works.Works`: each line's call, and its kernels where they can be captured in a CUDA graph."""
    run, one, name, reference = own.run, own.one, own.name, cache(partial(fp8_reference, own.problem, own.name))
    for line in (one for one in MAKERS if one in own.problem.params.lines):
        metric, make = f"forward_{line}_call", partial(_calls, line, own.problem, own.layers)
        if (calls := run.attempt(name, partial(run.agree, make), metric)) is None:
            continue
        call = lambda layer, calls=calls: calls[layer]()  # noqa: E731
        how = {"recheck": partial(_fp8_checks, run, one, reference) if line == "fp8" else own.made, "aside": True}
        yield own.work(metric, call, eager=True, **how)
        kernel = f"forward_{line}_kernel"
        if line != "torch" and run.captured(name, kernel, calls[own.layer]):
            yield own.work(kernel, call, heavy=True, **how)
