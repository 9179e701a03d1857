"""The table of methods agrees with the layers that it names."""

import subprocess
import sys

import pytest
import torch

from blockshock_lib import records
from blockshock_lib.engine import experiment
from blockshock_lib.layers.problem import LinearProblem
from blockshock_lib.methods import METHODS, Method
from blockshock_lib.params import Mask, load
from blockshock_lib.report import plots, tables
from tests.cases import case


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_shards_are_those_of_the_layers_own_parts(name, world_size):
    method, size = METHODS[name], 1024
    layer = method.load()
    for rank in range(layer.ranks(world_size)):
        part = layer.part(rank, world_size, size, size)
        shards = size // (part.cols.stop - part.cols.start), size // (part.rows.stop - part.rows.start)
        assert shards == method.shards(world_size)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_needs_a_periodic_mask_says_so_in_the_table(name):
    method = METHODS[name]
    reason = method.load().unsupported(
        Mask.named("random"), torch.device("cpu"), torch.bfloat16, **method.options("auto")
    )
    assert method.periodic_only == ("periodic" in reason)


def test_only_a_method_with_a_choice_of_product_takes_one():
    assert METHODS["dense"].options("cslt") == {"frozen": True}
    assert METHODS["block_shock"].options("cslt")["product"] == "cslt"
    assert METHODS["block_shock_torch"].options("cslt")["product"] == "torch"


def test_variants_of_training_are_rows_of_the_table():
    trained = METHODS["block_shock_recompress"].options("auto", frozen=False, dw="full")
    assert trained == {"frozen": False, "product": "auto", "update": "recompress", "dw": "full"}
    assert METHODS["block_shock"].options("auto")["update"] == "packed"


def test_the_table_and_the_parameters_import_no_torch():
    modules = "blockshock_lib.params, blockshock_lib.plan, blockshock_lib.report.labels"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_file_and_one_row_are_enough_for_a_new_method(monkeypatch, tmp_path):
    row = Method("interleaved", "I interleaved", "I", "tests.newcomer:InterleavedLinear", "in")
    monkeypatch.setitem(METHODS, "interleaved", row)
    asked = load("phase1", {"timing.samples": 2, "timing.warmup": 1, "profile": "none"}, choose={"hardware": "cpu"})
    one = case(phase="phase1", methods=("row_parallel", "interleaved"))
    rows = experiment.measure(
        LinearProblem(one, torch.device("cpu")), asked, group_index=0, traces=tmp_path, last=False
    )
    context = {"code": {}, "machine": "m", "libraries": {}, "emulated": True}
    records.write(tmp_path, run="r", case=one, group=0, rows=rows, context=context)
    frame = records.load(tmp_path)
    assert tables.correctness_table(frame)["I interleaved"].tolist() == ["pass"]
    assert "I interleaved" in tables.speed_table(frame)["method"].tolist()
    assert plots.time_vs_n(frame).axes
