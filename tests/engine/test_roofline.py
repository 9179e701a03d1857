"""Floors follow from the cost and the measured ceilings."""

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine.phases import PHASES
from blockshock_lib.engine.roofline import Ceilings, compute, floors, link, measure, phase_floors
from blockshock_lib.layers.case_costs import CaseCosts
from blockshock_lib.layers.costs import Shape
from blockshock_lib.methods import METHODS
from blockshock_lib.params import Mask
from tests.cases import case

CEILINGS = Ceilings(copy_bandwidth=4300, gemm_rate=989, allreduce_bandwidth=302)


def cost(name, n, b, world_size=2):
    return METHODS[name].load().cost(Shape(b, n, n, 2, world_size, Mask.named("checkerboard")))


@pytest.mark.parametrize(
    "n, b, ms",
    [(4096, 4096, 0.0695), (8192, 4096, 0.278), (16384, 4096, 1.11), (40960, 4096, 6.95), (40960, 16, 0.391)],
)
def test_floor_of_the_dense_half_product(n, b, ms):
    # Arithmetic of the half product at 989 TFLOP/s, or its bytes at 4.3 TB/s.
    assert floors(cost("row_parallel", n, b), CEILINGS)["floor_compute"] == pytest.approx(ms, rel=0.01)


def test_two_to_four_has_the_arithmetic_floor_of_the_half_product_and_nine_eighths_of_its_weight_bytes():
    half, sparse = cost("row_parallel", 8192, 64), cost("block_shock", 8192, 64)
    assert sparse.flops == half.flops and sparse.weights / half.weights == 9 / 8


def test_an_all_reduce_of_two_ranks_sends_each_byte_once():
    assert cost("row_parallel", 4096, 16).sent == 4096 * 16 * 2
    assert cost("column_parallel", 4096, 16).sent == 4096 * 16


def test_the_parts_of_all_ranks_sum_to_the_dense_arithmetic():
    dense = cost("dense", 4096, 16)
    for name in ("row_parallel", "column_parallel", "block_shock", "permuted_dense"):
        for world_size in (2, 4, 8):
            assert cost(name, 4096, 16, world_size).flops * world_size == dense.flops, name


def test_the_dense_product_alone_has_no_floor_for_communication():
    found = floors(cost("dense", 4096, 16), CEILINGS)
    assert "floor_reduce" not in found and found["floor_forward"] == found["floor_compute"]


def test_the_forward_floor_is_the_sum_of_its_parts():
    found = floors(cost("row_parallel", 4096, 4096), CEILINGS)
    assert found["floor_forward"] == pytest.approx(found["floor_compute"] + found["floor_reduce"])


def test_a_cut_batch_hides_the_shorter_part_but_for_one_piece():
    whole, cut = (floors(cost("row_parallel", 4096, 4096), CEILINGS, chunks) for chunks in (1, 4))
    product, link_ = whole["floor_compute"], whole["floor_reduce"]
    assert link_ > product and cut["floor_forward"] == pytest.approx(link_ + product / 4)
    alone = floors(cost("dense", 4096, 4096), CEILINGS, 4)
    assert alone["floor_forward"] == alone["floor_compute"]


def test_packing_has_the_floor_of_its_bytes_in_both_orientations():
    _, found = trained("block_shock", "phase1", optimizer="")
    dense = 16384 * 16384 * 2
    assert found["floor_compress"] == pytest.approx((dense + 2 * dense * 9 / 16) / 4300 / 1e6)
    assert "floor_compress" not in trained("row_parallel", "phase1", optimizer="")[1]


def test_peak_of_block_shock_at_40960():
    # 1.758 GiB of packed weight and one [B, N] partial.
    found = cost("block_shock", 40960, 16)
    assert found.weights / 2**30 == pytest.approx(1.758, abs=1e-3)
    assert found.peak == found.weights + 16 * 40960 * 2


def test_ceilings_are_measured_on_a_cpu_too():
    found = measure(torch.device("cpu"), torch.float32, Group(), repeats=1)
    assert found.copy_bandwidth > 0 and found.gemm_rate > 0 and found.allreduce_bandwidth == 0


def trained(name, phase="phase3", **changes):
    fields = dict(phase=phase, in_features=16384, out_features=16384, batch=4096, emulated=False, optimizer="sgd")
    costs = CaseCosts(case(**fields | changes))
    return costs, phase_floors(costs, name, PHASES[phase], CEILINGS)


def test_a_steps_floor_hides_the_collective_of_dx_behind_dw():
    costs, found = trained("block_shock")
    assert found["floor_reduce_dx"] == link(costs.cost_dx("block_shock"), CEILINGS) < found["floor_dw"]
    parts = ("forward", "dx", "dw", "optimizer", "refresh")
    assert found["floor_step"] == pytest.approx(sum(found[f"floor_{part}"] for part in parts))
    assert not {"floor_remask", "floor_compress", "floor_pass"} & set(found)


def test_a_pass_has_the_floors_of_forward_and_dx():
    _, found = trained("row_parallel", "phase2", optimizer="")
    parts = ("floor_forward", "floor_dx", "floor_reduce_dx")
    assert found["floor_pass"] == pytest.approx(sum(found[part] for part in parts)) and "floor_dw" not in found


def test_recompression_has_floors_of_its_own():
    _, found = trained("block_shock_recompress")
    assert found["floor_remask"] > 0 and found["floor_compress"] > 0 and "floor_refresh" not in found


def test_adamw_moves_seven_tensors_and_sgd_three():
    plain, moments = (
        trained("row_parallel", optimizer=name)[0].cost_optimizer("row_parallel") for name in ("sgd", "adamw")
    )
    weight = 16384 * 16384 // 2 * 2
    assert (plain.read + plain.written, moments.read + moments.written) == (3 * weight, 7 * weight)
    # On two H200s a fused SGD step of this shard takes 0.19 ms.
    assert compute(plain, CEILINGS) == pytest.approx(0.187, rel=0.01)
