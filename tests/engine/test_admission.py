"""No tensor of a training step passes unchecked: each planted fault is refused, and the row names the tensor."""

from dataclasses import replace

import pytest
import torch

from blockshock_lib import params
from blockshock_lib.comm import Group
from blockshock_lib.engine import capacity, curve, experiment, memory, work
from blockshock_lib.engine.timing import Clock
from blockshock_lib.engine.trial import Rows, Trial
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.layers.problem import LinearProblem
from blockshock_lib.layers.row_parallel import RowParallelLinear
from blockshock_lib.sparse24 import product
from tests.cases import case
from tests.engine.test_experiment import CPU, picked

SET = {"timing.samples": 2, "timing.warmup": 1, "profile": "none"}


@pytest.fixture(scope="module")
def quick():
    return params.load("phase3", SET | {"loss_steps": 4}, choose={"hardware": "cpu"})


def run(quick, tmp_path, smallest=False, last=False, **changes):
    changes = {"phase": "phase3", "methods": ("row_parallel",), "optimizer": "sgd", "in_features": 128} | changes
    problem = LinearProblem(case(**changes), CPU)
    return experiment.measure(problem, quick, group_index=0, traces=tmp_path, last=last, smallest=smallest)


def wrapped(monkeypatch, cls, name, change):
    right = getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda self, *args, **kwargs: change(self, right(self, *args, **kwargs)))


def without_a_rank(monkeypatch):
    monkeypatch.setattr(BlockShockLinear, "combine_dx", lambda self, partials: partials[0])


def backward_that(change):
    def plant(monkeypatch):
        from blockshock_lib.layers.emulated import Emulated

        right = Emulated.backward
        monkeypatch.setattr(
            Emulated, "backward", lambda self, dy, x, need=(True, True, True): change(*right(self, dy, x, need))
        )

    return plant


FAULTS = {
    "dX of one rank alone": ("block_shock", "dx", without_a_rank),
    "dX that ignores a scale": (
        "row_parallel",
        "dx",
        lambda patch: wrapped(patch, RowParallelLinear, "local_dx", lambda self, part: part * 1.5),
    ),
    "dX of the timed backward": ("row_parallel", "dx", backward_that(lambda dx, dw, db: (dx * 1.5, dw, db))),
    "dW of the other term": ("block_shock", "dw", backward_that(lambda dx, dw, db: (dx, dw[::-1], db))),
    "db counted twice": ("block_shock", "db", backward_that(lambda dx, dw, db: (dx, dw, 2 * db))),
    "transposed copy left behind": (
        "block_shock",
        "dx after 3 steps",
        lambda patch: patch.setattr(BlockShockLinear, "_refresh_transposed", lambda self: None),
    ),
    "packed copies left behind": (
        "block_shock_recompress",
        "y after 3 steps",
        lambda patch: patch.setattr(BlockShockLinear, "_compress", lambda self: None),
    ),
    "dX with NaN": (
        "row_parallel",
        "dx holds NaN",
        lambda patch: wrapped(patch, RowParallelLinear, "local_dx", lambda self, part: part * float("nan")),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_and_its_tensor_is_named(quick, tmp_path, monkeypatch, fault):
    method, tensor, plant = FAULTS[fault]
    plant(monkeypatch)
    rows = run(quick, tmp_path, methods=(method,))
    (row,) = picked(rows, method, "check")
    assert row["status"] == "failed" and row["reason"].startswith(f"rank 0: {tensor}")
    assert not [one for one in rows if one["method"] == method and one["unit"] == "ms"]


def test_an_optimizer_that_steps_the_wrong_way_is_refused(quick, tmp_path, monkeypatch):
    from blockshock_lib.engine.training import Trainer

    right = Trainer.assign
    monkeypatch.setattr(Trainer, "assign", lambda self, dw, db: right(self, [-one for one in dw], db))
    (row,) = picked(run(quick, tmp_path), "row_parallel", "check")
    assert row["status"] == "failed" and row["reason"].startswith("rank 0: weight")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_tensor_of_a_right_method_is_checked_and_weighed(quick, tmp_path, optimizer):
    rows = run(quick, tmp_path, methods=("block_shock", "permuted_dense"), optimizer=optimizer)
    for method in ("block_shock", "permuted_dense"):
        assert [row["value"] for row in picked(rows, method, "check")] == [1]
        assert [row["detail"] for row in picked(rows, method, "error_max_ratio")] == ["", "dx", "dw", "db", "weight"]
        for metric in memory.FORMULAS:
            (held,), (formula,) = picked(rows, method, metric), picked(rows, method, f"{metric}_formula")
            assert held["value"] == pytest.approx(formula["value"], rel=1e-3)


@pytest.mark.parametrize("mask", ["random", "transposable_random", "uniform_1010"])
def test_other_masks_train_too(quick, tmp_path, mask):
    rows = run(quick, tmp_path, methods=("block_shock", "block_shock_recompress"), mask=mask)
    for method in ("block_shock", "block_shock_recompress"):
        assert picked(rows, method, "check")[0]["value"] == 1
        way = "2:4" if mask == "transposable_random" else "dense masked"
        assert {row["detail"] for row in picked(rows, method, "dx_kernel")} == {way}


def test_a_step_is_timed_with_its_pieces(quick, tmp_path):
    rows = run(quick, tmp_path, methods=("block_shock", "block_shock_recompress"))
    both = {"step_kernel", "step_call", "backward_kernel", "dw_kernel", "optimizer_kernel", "forward_kernel"}
    both |= {"compute_kernel", "dx_kernel", "floor_step", "floor_dw", "floor_dx", "floor_optimizer"}
    for method, own in (("block_shock", {"refresh"}), ("block_shock_recompress", {"remask", "compress"})):
        times = {row["metric"] for row in rows if row["method"] == method and row["unit"] == "ms"}
        assert both | {f"{stage}_kernel" for stage in own} | {f"floor_{stage}" for stage in own} <= times
        assert not {f"{stage}_kernel" for stage in {"refresh", "remask", "compress"} - own} & times
        ways = picked(rows, method, "dw_strategy_kernel")
        assert {row["detail"] for row in ways} == {"full", "periodic", "exchange"}
        assert {row["detail"] for row in picked(rows, method, "dw_kernel")} == {"periodic"}


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_order_of_the_backward_is_taken_and_both_are_shown(quick, tmp_path, monkeypatch, faster):
    """The choice follows samples of its own: here they say that the order `faster` takes half of the other's time."""
    own, orders = Clock.interleave, []

    def interleave(self, tasks, **how):
        if set(tasks) != {True, False}:
            return own(self, tasks, **how)
        return {order: [1.0 + (order is not faster)] * how["samples"] for order in tasks}

    real = Emulated.backward

    def backward(self, dy, x, need=(True, True, True), overlap=None):
        orders.append(self.overlap if overlap is None else overlap)
        return real(self, dy, x, need, overlap)

    monkeypatch.setattr(Clock, "interleave", interleave)
    monkeypatch.setattr(work, "has_orders", lambda problem, name: True)
    monkeypatch.setattr(Emulated, "backward", backward)
    rows = run(quick, tmp_path)
    (taken,) = {row["detail"] for row in picked(rows, "row_parallel", "backward_kernel")}
    assert taken == work.ORDERS[faster]
    shown = {row["detail"] for row in picked(rows, "row_parallel", "backward_order_kernel")}
    assert shown == set(work.ORDERS.values()) and set(orders) == {True, False}


def test_a_method_without_ranks_of_its_own_has_one_order(quick, tmp_path):
    rows = run(quick, tmp_path)
    assert not picked(rows, "row_parallel", "backward_order_kernel")
    assert {row["detail"] for row in picked(rows, "row_parallel", "backward_kernel")} == {""}


def test_a_pass_is_timed_where_weights_are_frozen(quick, tmp_path):
    frozen = params.load("phase2", SET, choose={"hardware": "cpu"})
    rows = run(frozen, tmp_path, phase="phase2", optimizer="", methods=("block_shock",))
    times = {row["metric"] for row in rows if row["method"] == "block_shock" and row["unit"] == "ms"}
    assert {"pass_kernel", "pass_call", "backward_kernel", "dx_kernel", "forward_kernel", "floor_pass"} <= times
    assert not {"step_kernel", "dw_kernel", "optimizer_kernel"} & times
    assert [row["detail"] for row in picked(rows, "block_shock", "error_max_ratio")] == ["", "dx"]


def test_a_timed_step_with_a_wrong_gradient_gives_no_number(quick, tmp_path, monkeypatch):
    from blockshock_lib.engine.training import Trainer

    right, timed = Trainer.step, experiment.Session.time
    started = []
    monkeypatch.setattr(experiment.Session, "time", lambda self, runners: started.append(1) or timed(self, runners))

    def wrong(self, x, dy):
        y, dx, dw, db = right(self, x, dy)
        return y, dx, [one * 1.5 for one in dw] if started else dw, db

    monkeypatch.setattr(Trainer, "step", wrong)
    rows = run(quick, tmp_path)
    assert [row["status"] for row in picked(rows, "row_parallel", "check")] == ["ok", "failed"]
    assert "gradient of the timed step is off" in picked(rows, "row_parallel", "check")[1]["reason"]
    assert not picked(rows, "row_parallel", "step_kernel")


def test_a_step_that_does_not_fit_is_refused_before_it_is_built(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free", lambda device: 60_000)
    rows = run(quick, tmp_path, methods=("row_parallel", "block_shock"), optimizer="adamw")
    (row,) = picked(rows, "row_parallel", "check")
    assert row["status"] == "oom" and "a training step with adamw needs" in row["reason"]


def test_an_optimizer_state_that_runs_out_of_memory_is_a_row_and_the_others_go_on(quick, tmp_path, monkeypatch):
    from blockshock_lib.engine.training import Trainer

    right = Trainer.update

    def update(self):
        if len(self.weights) == 1:  # of the method that runs on one rank
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.13 GiB.")
        right(self)

    monkeypatch.setattr(Trainer, "update", update)
    rows = run(quick, tmp_path, methods=("dense", "row_parallel"), optimizer="adamw")
    (row,) = picked(rows, "dense", "check")
    assert row["status"] == "oom" and "3.13 GiB" in row["reason"] and not picked(rows, "dense", "step_kernel")
    assert picked(rows, "row_parallel", "step_kernel")


def test_a_loss_that_is_not_finite_stops_its_method_and_names_step_and_tensor(quick, tmp_path, monkeypatch):
    right = curve.one_step

    def poisoned(problem, trainer, step):
        if step == 2 and type(trainer.runner.owners[0]) is BlockShockLinear:
            trainer.weights[0].fill_(float("nan"))
        return right(problem, trainer, step)

    monkeypatch.setattr(curve, "one_step", poisoned)
    rows = run(quick, tmp_path, methods=("row_parallel", "block_shock"), smallest=True)
    assert [row["repeat"] for row in picked(rows, "row_parallel", "loss")] == [0, 1, 2, 3]
    assert picked(rows, "row_parallel", "step_kernel")
    assert [row["repeat"] for row in picked(rows, "block_shock", "loss")] == [0, 1]
    (row,) = [row for row in picked(rows, "block_shock", "check") if row["status"] == "failed"]
    assert "loss is NaN at step 2 (tensor y)" in row["reason"]
    assert not picked(rows, "block_shock", "step_kernel")


def test_the_loss_falls_and_packed_weights_follow_the_dense_ones(quick, tmp_path):
    rows = run(quick, tmp_path, methods=("dense", "block_shock", "block_shock_recompress"), smallest=True)
    curves = {m: [row["value"] for row in picked(rows, m, "loss")] for m in ("dense", "block_shock")}
    assert curves["dense"] == sorted(curves["dense"], reverse=True) and len(curves["dense"]) == 4
    assert curves["block_shock"] == pytest.approx(curves["dense"], rel=0.01)


def test_the_largest_weight_fits_and_the_next_does_not(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "total", lambda device: 16 * 2**30)
    rows = run(quick, tmp_path, methods=("dense", "block_shock"), last=True)
    problem = LinearProblem(case(phase="phase3", optimizer="sgd", in_features=128), CPU)
    for method in ("dense", "block_shock"):
        (row,) = picked(rows, method, "largest_n")
        n = int(row["value"])
        assert row["detail"] == "memory" and n % 4096 == 0 and n > 0
        room = 0.95 * 16 * 2**30
        needed = [problem.training_bytes(method, size).peak + 16 * size * 2 for size in (n, n + 4096)]
        assert needed[0] <= room < needed[1]


@pytest.mark.parametrize(("world_size", "most"), [(2, 65536), (4, 90112)])
def test_the_largest_weight_is_one_that_the_2_4_library_multiplies_rightly(monkeypatch, tmp_path, world_size, most):
    """Two terms of 2^32 weights; with 4 ranks a term has half of the columns, and N^2 / 2 <= 2^32 up to 92681."""
    monkeypatch.setitem(
        product.BACKENDS, "cslt", replace(product.BACKENDS["cslt"], unsupported=lambda device, dtype: "")
    )
    monkeypatch.setattr(memory, "total", lambda device: 4 << 40)
    problem = LinearProblem(
        case(phase="phase3", optimizer="sgd", in_features=128, product="cslt", world_size=world_size), CPU
    )
    trial = Trial(problem, Group.of(), Rows())
    capacity.largest(trial, ("dense", "block_shock"))
    (dense,), (ours,) = (picked(trial.rows.rows, name, "largest_n") for name in ("dense", "block_shock"))
    assert dense["detail"] == "memory" and dense["value"] > 2 * most
    assert (ours["value"], ours["detail"]) == (most, "2:4 library")
    monkeypatch.setattr(memory, "total", lambda device: 16 << 30)  # where memory ends first, it is what bounds
    capacity.largest(trial, ("block_shock",))
    assert picked(trial.rows.rows, "block_shock", "largest_n")[-1]["detail"] == "memory"


def test_a_case_that_the_2_4_library_multiplies_wrongly_is_unsupported_before_anything_is_built(
    quick, tmp_path, monkeypatch
):
    monkeypatch.setitem(
        product.BACKENDS, "reference", replace(product.BACKENDS["reference"], too_large=lambda shape: f"{shape}: no")
    )
    monkeypatch.setattr(LinearProblem, "build", lambda self, name, group: pytest.fail("it was built"))
    rows = run(quick, tmp_path, methods=("block_shock",))
    (row,) = picked(rows, "block_shock", "check")
    assert (row["status"], row["reason"]) == ("unsupported", "(128, 128): no")
