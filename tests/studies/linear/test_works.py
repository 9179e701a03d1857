"""Every piece of a method, and every way of a piece, is timed by its name on every copy of the weight."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine.timing import Timer
from blockshock_lib.kernels.patterns.dense import Way
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.layers import PermutedDenseLinear
from blockshock_lib.studies.linear import ways, works
from blockshock_lib.studies.linear.works import ORDERS
from tests.studies.linear import measuring
from tests.studies.linear.measuring import asked, details, measured, picked

TRAINED = asked("phase3", loss_steps=0)


def test_each_product_is_timed_on_every_copy_and_a_rank_that_stands_by_captures_nothing_but_has_the_same_works(
    monkeypatch,
):
    monkeypatch.setattr(ways, "products", lambda layer, x: {way: partial(layer, way, x) for way in ("cslt", "small")})
    layers = [mock.Mock(forms=(), gemm=mock.Mock(ways={})) for _ in range(2)]

    def found(device, active=True, emulated=False):
        place = SimpleNamespace(device=torch.device(device), x="x", case=SimpleNamespace(emulated=emulated))
        works = ways.of_product([SimpleNamespace(problem=place, layer=layer, active=active) for layer in layers])
        return works, [(work.metric, work.detail, work.heavy, len(work.calls)) for work in works]

    (_, small), products = found("cpu")
    assert products == [("product_by_kernel", way, True, 2) for way in ("cslt", "small")]
    for call_ in small.calls:
        call_()
    assert [layer.call_args.args for layer in layers] == [("small", "x")] * 2
    every, idle, alone = (found("cuda", *how)[1] for how in ((True,), (False,), (True, True)))
    assert every == idle == [*products, ("forward_graph_call", "", False, 2)] and alone == products
    assert [layer.graphed.return_value.call_args_list for layer in layers] == [[mock.call("x")]] * 2


def test_each_form_of_d_takes_the_library_that_it_names_and_only_one_is_said_to_be_searched(monkeypatch):
    layer = PermutedDenseLinear(torch.randn(64, 64), mask=MASKS["checkerboard"], group=Group(0, 2), frozen=True)
    x, layer.gemm.ways, libraries = torch.randn(8, 64), {"some": "operands"}, []
    monkeypatch.setattr(layer.gemm, "way", lambda *_: Way("cublaslt", 1))
    monkeypatch.setattr("torch.backends.cuda.preferred_blas_library", lambda *one: libraries.extend(one))
    for form in layer.FORMS:
        vars(layer)["form"], libraries[:] = form, []  # two of them are for GPUs
        layer.local_dgrad(layer.local(x).view(8, 64))
        assert ways.taken(layer, x) == form + ", cublaslt" * (form == "classes")
        assert (libraries.count("cublaslt") > 1) == ways.taken(layer, x).endswith(", cublaslt")


def test_each_reduction_starts_anew_before_a_sample():
    group = SimpleNamespace(reductions=lambda x: {"gloo": call_})
    layer = SimpleNamespace(collective="all-reduce", local=lambda x: x, group=group)
    own, call_ = SimpleNamespace(x="x", cost=lambda name: SimpleNamespace(sent=1)), SimpleNamespace(reset=object())
    (one,) = ways.reductions(SimpleNamespace(problem=own, layer=layer, name="block_shock", active=True))
    assert (one.calls, one.detail, one.before) == ([call_], "gloo", call_.reset)


def timed(rows, method):
    return {row["metric"] for row in rows if row["method"] == method and row["unit"] == "ms"}


def test_the_same_work_has_one_slot_and_shares_it_with_what_it_is_compared_with(monkeypatch):
    both = lambda layer, x: dict.fromkeys(("dense", "reference", "other"), lambda: layer.local(x))  # noqa: E731
    monkeypatch.setattr(ways, "products", both)
    rows = measured(asked("phase1"), methods=("dense", "block_shock"), bias=False)

    def times(method, metric, detail):
        return [row["value"] for row in picked(rows, method, metric) if row["detail"] == detail]

    for method, way in (("dense", "dense"), ("block_shock", "reference")):
        taken = times(method, "product_by_kernel", way)
        assert taken and taken == times(method, "compute_kernel", way), method
        others = set(details(rows, "product_by_kernel", method))
        assert others == {"dense", "reference", "other"} and times(method, "product_by_kernel", "other") != taken
    assert times("dense", "forward_kernel", "dense") == times("dense", "compute_kernel", "dense")
    assert times("block_shock", "forward_kernel", "") != times("block_shock", "compute_kernel", "reference")


def test_a_pass_is_timed_where_weights_are_frozen():
    rows = measured(asked("phase2"), methods=("block_shock",))
    times = timed(rows, "block_shock")
    assert {"pass_kernel", "pass_call", "backward_kernel", "dx_kernel", "forward_kernel", "floor_pass"} <= times
    assert not {"step_kernel", "dw_kernel", "optimizer_kernel"} & times
    assert details(rows, "error_max_ratio", "block_shock") == ["", "dx"]


def test_a_step_is_timed_with_its_pieces():
    rows = measured(TRAINED, methods=("block_shock", "block_shock_recompress"), optimizer="sgd", in_features=128)
    both = {"step_kernel", "step_call", "backward_kernel", "dw_kernel", "optimizer_kernel", "forward_kernel"}
    both |= {"compute_kernel", "dx_kernel", "floor_step", "floor_dw", "floor_dx", "floor_optimizer"}
    for method, own in (("block_shock", {"refresh"}), ("block_shock_recompress", {"remask", "compress"})):
        times = timed(rows, method)
        assert both | {f"{stage}_kernel" for stage in own} | {f"floor_{stage}" for stage in own} <= times
        assert not {f"{stage}_kernel" for stage in {"refresh", "remask", "compress"} - own} & times
        assert set(details(rows, "dw_strategy_kernel", method)) == {"full", "periodic", "exchange"}
        assert set(details(rows, "dw_kernel", method)) == {"periodic"}
        assert set(details(rows, "dx_kernel", method)) == {"2:4"}
    assert set(details(rows, "backward_kernel", "block_shock")) == {""}, "emulated ranks have one order"
    assert not details(rows, "backward_order_kernel", "block_shock")


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_order_of_the_backward_is_taken_and_both_are_shown(monkeypatch, faster):
    """The choice follows samples of its own: here they say that the order `faster` takes half of the other's time."""
    monkeypatch.setattr(Timer, "fastest", lambda self, works: faster)
    monkeypatch.setattr(works.Works, "has_orders", True)
    rows = measured(TRAINED, methods=("row_parallel",), optimizer="sgd", in_features=128)
    assert set(details(rows, "backward_kernel", "row_parallel")) == {ORDERS[faster]}
    assert set(details(rows, "backward_order_kernel", "row_parallel")) == set(ORDERS.values())


def test_of_a_large_batch_on_ranks_every_cut_and_every_way_to_add_up_is_timed_and_the_taken_one_is_named(pair):
    for rows in pair.call(measuring.on_two_ranks, seconds=600):
        for method in ("row_parallel", "block_shock"):
            (taken,) = set(details(rows, "forward_kernel", method))
            assert taken in ("1", "2", "4")
            assert sorted(details(rows, "forward_chunks_kernel", method)) == sorted(["1", "2", "4"] * 2)
        assert set(details(rows, "compute_kernel", "permuted_dense")) < {"classes", "batched", "transposed"}
        assert details(rows, "forward_chunks_kernel", "dense") == []
        assert len(picked(rows, "row_parallel", "forward_torch_call")) == 2
        missed = [(row["method"], row["metric"], row["status"]) for row in rows if "forward_f" in row["metric"]]
        assert missed == [("row_parallel", f"forward_{line}_call", "unsupported") for line in ("fp8", "fused")]
        assert set(details(rows, "forward_kernel", "dense")) == {"dense"}
        found = [(row["method"], row["detail"]) for row in rows if row["metric"] == "reduce_by_kernel"]
        assert found == [("row_parallel", "gloo")] * 2
        assert set(details(rows, "reduce_kernel", "row_parallel")) == {"gloo"}


def test_row_parallel_as_pytorch_ships_it_is_waited_for(pair):
    assert pair.call(measuring.by_torch, seconds=100) == [True, True]


def test_memory_that_the_sums_share_is_told_of_each_rank(monkeypatch):
    monkeypatch.setattr(Group, "shared_bytes", lambda self, device: 4096)
    shared = picked(measured(asked("phase1"), methods=("row_parallel",)), "machine", "shared_bytes")
    assert [(row["rank"], row["value"]) for row in shared] == [(0, 4096), (1, 4096)]
