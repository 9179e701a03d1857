"""The costs behind floors and memory formulas are what pieces do, what the engine records and what processes hold."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from blockshock_lib.comm import Group
from blockshock_lib.engine.roofline import Ceilings, link
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.runs import manifest, records
from blockshock_lib.runs.manifest import REFERENCE
from blockshock_lib.studies.linear import METHODS, STUDY, costs
from blockshock_lib.studies.linear.costs import CaseCosts
from blockshock_lib.studies.linear.methods.method import Shape
from tests import cases
from tests.layers.ranks import RUNNABLE
from tests.studies.linear.measuring import load as asked

CEILINGS = Ceilings(copy_bandwidth=4300, gemm_rate=989, allreduce_bandwidth=302)
N, K, B = 256, 512, 64
DENSE = ("dense", "row_parallel", "column_parallel", "permuted_dense")


def shape(name, mask="checkerboard", world_size=2, itemsize=2):
    return Shape(B, K, N, itemsize, world_size, Mask.named(mask), update=METHODS[name].update or "packed")


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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
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
    method, case = METHODS[name], shape(name, mask, world_size)
    if method.periodic_only and not case.mask.periodic:
        pytest.skip("the method does not take this mask")
    layer, x, dy = made(name, mask, world_size)
    # The reference product multiplies the holes too, a 2:4 product does not.
    packed = 2 if method.product is not None else 1
    dx_packed = packed if layer.dgrad_by == "2:4" else 1
    assert flops(lambda: layer.local(x)) == packed * method.cost(case).flops
    assert flops(lambda: layer.local_dgrad(dy)) == dx_packed * method.cost_dgrad(case).flops
    for by in layer.wgrad_strategies():
        assert flops(lambda by=by: layer.local_wgrad(dy, x, by)) == method.cost_wgrad(case, by).flops


# In float64: the CPU's products of smaller types hold buffers of their own.
@pytest.mark.parametrize("mask", ["checkerboard", "uniform_1100"])
@pytest.mark.parametrize("name", DENSE)
def test_peaks_are_those_of_the_allocator(name, mask):
    method, case = METHODS[name], shape(name, mask, itemsize=8)
    layer, x, dy = made(name, mask, dtype=torch.float64)
    dx, dw = method.cost_dgrad(case), method.cost_wgrad(case, layer.wgrad_by)
    # The gathered dX of B1 is the collective's, which no process is there to make.
    joined = case.x if layer.transposed_dgrad else 0
    assert peak(lambda: layer.local_dgrad(dy)) == pytest.approx(dx.peak - dx.weights - joined, rel=0.01)
    assert peak(lambda: layer.local_wgrad(dy, x)) == pytest.approx(dw.peak, rel=0.01)


def test_holes_are_cleared_in_place_an_exchange_sends_a_quarter_and_a_frozen_weight_has_no_gradient():
    dense = N * K * 2
    for name in ("masked_dense", "block_shock_recompress"):
        cost = METHODS[name].cost_wgrad(shape(name, "random"), "full")
        assert (cost.read, cost.written, cost.peak) == (B * (N + K) * 2 + dense, 2 * dense, dense)
    assert METHODS["block_shock"].cost_wgrad(shape("block_shock"), "exchange").sent == dense / 4
    assert not any(method.training_bytes(shape(name), "").gradients for name, method in METHODS.items())


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_parts_of_all_ranks_sum_to_the_dense_arithmetic_and_collectives_move_what_they_join(world_size):
    whole = METHODS["dense"].cost(shape("dense")).flops
    both = dict.fromkeys(("masked_dense", "permuted_dense", "block_shock"), (2, 2))
    for name, (y, dx) in {"row_parallel": (2, 1), "column_parallel": (1, 2), **both}.items():
        method, asked = METHODS[name], shape(name, world_size=world_size)
        dense = 2 if name == "masked_dense" else 1  # it multiplies the holes
        assert method.cost(asked).flops * world_size == dense * whole
        assert method.cost(asked).sent == y * B * N * 2 * (world_size - 1) / world_size
        assert method.cost_dgrad(asked).sent == dx * B * K * 2 * (world_size - 1) / world_size


def test_a_cut_batch_hides_the_shorter_part_but_for_one_piece_and_a_step_the_collective_of_dx_behind_dw():
    costs = CaseCosts(cases.case(phase="phase1", in_features=4096, out_features=4096, batch=4096, emulated=False))
    whole, cut = (costs.floors("row_parallel", CEILINGS, chunks) for chunks in (1, 4))
    product, link_ = whole["floor_compute"], whole["floor_reduce"]
    assert whole["floor_forward"] == pytest.approx(product + link_)
    assert link_ > product and cut["floor_forward"] == pytest.approx(link_ + product / 4)
    alone = costs.floors("dense", CEILINGS, 4)
    assert alone["floor_forward"] == alone["floor_compute"] and "floor_reduce" not in alone
    fields = dict(in_features=16384, out_features=16384, batch=4096, emulated=False)
    costs = CaseCosts(cases.case(phase="phase3", optimizer="sgd", **fields))
    found = costs.floors("block_shock", CEILINGS)
    assert found["floor_reduce_dx"] == link(costs.pieces("block_shock")["dx"], CEILINGS) < found["floor_dw"]
    no_link = CEILINGS._replace(allreduce_bandwidth=0)
    assert link(costs.pieces("block_shock")["dx"], no_link) == 0, "of a link that was not measured"
    parts = ("forward", "dx", "dw", "optimizer", "refresh")
    assert found["floor_step"] == pytest.approx(sum(found[f"floor_{part}"] for part in parts))
    assert not {"floor_remask", "floor_compress", "floor_pass"} & set(found)


@pytest.mark.parametrize("phase", ["phase1", "phase2", "phase3"])
def test_bytes_and_floors_are_those_that_the_engine_recorded(phase):
    folder, checked = REFERENCE / f"{phase}-cpu", 0
    effective = STUDY.params.model_validate(manifest.read(folder)["params"])
    frame = records.load(folder)
    frame = frame[frame["group"].eq(0) & frame["status"].eq("ok")].drop_duplicates(["case", "method", "metric"])
    values = frame.set_index(["case", "method", "metric"])["value"].sort_index()
    whole = {"phase1": "floor_forward", "phase2": "floor_pass", "phase3": "floor_step"}[phase]
    for case in STUDY.expand(effective):
        ceilings = Ceilings(*(values[case.id, "ceiling", name] for name in Ceilings._fields))
        for name in case.methods:
            if (case.id, name, whole) not in values.index:
                continue
            found, forward = values[case.id, name], CaseCosts(case).cost(name)
            assert (forward.read, forward.written, forward.sent, forward.flops) == tuple(
                found[key] for key in ("bytes_read", "bytes_written", "bytes_sent", "flops")
            )
            # A forward that cut its batch may hide a part of the shorter one; nobody knows beforehand what it chooses.
            least = CaseCosts(case).floors(name, ceilings)[whole]
            assert found[whole] <= least * (1 + 1e-12) and least == pytest.approx(found[whole], rel=0.5)
            parts = costs.floor_parts(CaseCosts(case).pieces(name), ceilings)
            assert max(parts.values()) <= least * (1 + 1e-12) <= sum(parts.values()) * (1 + 2e-12)
            checked += 1
    assert checked > 30


def test_a_step_holds_what_the_methods_formulas_say_and_adamws_state_costs_more():
    entries = 40960**2 / 2
    sgd, adamw = STUDY.expand(asked("phase3", "cuda", n=[40960]))
    for name in ("row_parallel", "block_shock"):
        small, large = (costs.need(case, {"unsupported": {}}).held[name]["step holds"] for case in (sgd, adamw))
        assert large == CaseCosts(adamw).training_bytes(name).peak and large - small == 2 * 2 * entries
    assert costs.rank_bytes(adamw, list(METHODS)) > costs.rank_bytes(sgd, list(METHODS))


def test_the_small_batch_product_is_judged_by_its_own_line_of_the_card():
    (case,) = STUDY.expand(asked(hardware="cuda", n=[4096], b=[16], product="small"))
    card = {"unsupported": {"small-batch product": "no compiler"}}
    assert [costs.cannot(case, name, card) for name in ("block_shock", "row_parallel")] == ["no compiler", ""]


@pytest.mark.parametrize(
    ("n", "changes", "said"),
    [
        (65536, {}, []),
        (65600, {}, ["block_shock", "block_shock_torch"]),
        (65600, {"world_size": 4}, []),  # its terms have half of the columns
        (131072, {"product": "reference"}, ["block_shock_torch"]),
        (131072, {"device": "cpu"}, ["block_shock_torch"]),  # there "auto" is the reference
    ],
)
def test_a_term_that_the_2_4_library_multiplies_wrongly_is_told_beforehand(n, changes, said):
    names = ("masked_dense", "block_shock", "block_shock_torch")
    fields = dict(methods=names, in_features=n, out_features=n, device="cuda") | changes
    asked_for = cases.case(**fields)
    assert [name for name in names if "2^32" in CaseCosts(asked_for).too_large(name)] == said
    assert not said or "2^32" in costs.cannot(asked_for, said[-1], {"unsupported": {}})
