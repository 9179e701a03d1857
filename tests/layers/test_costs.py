"""The costs that floors and memory formulas rest on are what the pieces really do."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from blockshock_lib.comm import Group
from blockshock_lib.layers.costs import Holding, Shape
from blockshock_lib.methods import METHODS
from blockshock_lib.params import Mask

N, K, B = 256, 512, 64
RUNNABLE = [name for name in METHODS if name != "block_shock_torch"]
DENSE = ("dense", "row_parallel", "column_parallel", "permuted_dense")


def shape(name, mask="checkerboard", world_size=2, itemsize=2):
    update = METHODS[name].update or "packed"
    return Shape(B, K, N, itemsize, world_size, Mask.named(mask), update=update)


def made(name, mask="checkerboard", world_size=2, dtype=torch.bfloat16):
    """Rank 0's layer, x and dy."""
    w, x, dy = (torch.randn(*size).to(dtype) for size in ((N, K), (B, K), (B, N)))
    options = METHODS[name].options("reference", frozen=False)
    return METHODS[name].load()(w, mask=Mask.named(mask), group=Group(0, world_size), **options), x, dy


def flops(fn):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


@torch.no_grad()
def peak(fn):
    """Most bytes that `fn` had allocated at once."""
    fn()
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profile:
        kept = fn()
    del kept
    sizes = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(sizes, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mask", ["checkerboard", "random", "uniform_1100"])
@pytest.mark.parametrize("name", RUNNABLE)
def test_flops_are_those_of_the_products(name, mask, world_size):
    cls, case = METHODS[name].load(), shape(name, mask, world_size)
    if METHODS[name].periodic_only and not case.mask.periodic:
        pytest.skip("the method does not take this mask")
    layer, x, dy = made(name, mask, world_size)
    # The reference product multiplies the holes too, a 2:4 product does not.
    packed = 2 if METHODS[name].product is not None else 1
    assert flops(lambda: layer.local(x)) == packed * cls.cost(case).flops
    assert flops(lambda: layer.local_dx(dy)) == (packed if layer.dx_by == "2:4" else 1) * cls.cost_dx(case).flops
    for by in layer.dw_strategies():
        assert flops(lambda by=by: layer.local_dw(dy, x, by)) == cls.cost_dw(case, by).flops


# In float64: the CPU's products of smaller types hold buffers of their own.
@pytest.mark.parametrize("mask", ["checkerboard", "uniform_1100"])
@pytest.mark.parametrize("name", DENSE)
def test_peaks_are_those_of_the_allocator(name, mask):
    cls, case = METHODS[name].load(), shape(name, mask, itemsize=8)
    layer, x, dy = made(name, mask, dtype=torch.float64)
    dx, dw = cls.cost_dx(case), cls.cost_dw(case, layer.dw_by)
    # The gathered dX of B1 is the collective's, which no process is there to make.
    joined = case.x if layer.transposed_dx else 0
    assert peak(lambda: layer.local_dx(dy)) == pytest.approx(dx.peak - dx.weights - joined, rel=0.01)
    assert peak(lambda: layer.local_dw(dy, x)) == pytest.approx(dw.peak, rel=0.01)


@pytest.mark.parametrize("mask", ["checkerboard", "uniform_1100"])
def test_gathered_products_of_a_packed_gradient_peak_as_the_formula_says(mask):
    case, (layer, x, dy) = shape("block_shock", mask, itemsize=8), made("block_shock", mask, dtype=torch.float64)
    want = type(layer).cost_dw(case, "periodic").peak
    assert peak(lambda: layer.local_dw(dy, x, "periodic")) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("name", ["masked_dense", "block_shock_recompress"])
def test_holes_are_cleared_in_the_dense_gradient_itself(name):
    cost, dense = METHODS[name].load().cost_dw(shape(name, "random"), "full"), N * K * 2
    product = B * N * 2 + B * K * 2  # dy and x
    assert (cost.read, cost.written, cost.peak) == (product + dense, 2 * dense, dense)


def test_a_step_holds_the_sum_of_its_parts():
    cls = METHODS["block_shock"].load()
    one = cls.training_bytes(shape("block_shock"), "adamw")
    kept = N * K / 2
    assert one == Holding(
        weights=kept * 2.25,
        copies=kept * 2.25,
        gradients=kept * 2,
        optimizer=kept * 4,
        activations=2 * B * N * 2 + B * K * 2,
        scratch=B * K / 2 * 2 + B * N * 2,
    )
    assert one.peak == sum(one)


@pytest.mark.parametrize("name", RUNNABLE)
def test_frozen_weights_have_no_gradient_and_no_optimizer_state(name):
    cls = METHODS[name].load()
    frozen, sgd, adamw = (cls.training_bytes(shape(name), optimizer) for optimizer in ("", "sgd", "adamw"))
    assert (frozen.gradients, frozen.optimizer, sgd.optimizer) == (0, 0, 0)
    assert adamw.optimizer == 2 * adamw.gradients == 2 * cls.entries(shape(name)) * 2


def test_the_exchange_sends_a_quarter_of_the_shards_entries():
    assert METHODS["block_shock"].load().cost_dw(shape("block_shock"), "exchange").sent == N * K / 4 * 2


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_dx_moves_what_its_collective_moves(world_size):
    whole = B * K * 2
    for name, times in (("row_parallel", 1), ("column_parallel", 2), ("masked_dense", 2), ("block_shock", 2)):
        sent = METHODS[name].load().cost_dx(shape(name, world_size=world_size)).sent
        assert sent == times * whole * (world_size - 1) / world_size
