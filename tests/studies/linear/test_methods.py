"""The table of methods agrees with the layers that it names."""

import pytest
import torch
import torch.nn.functional as F

from blockshock_lib.kernels.sparse24 import mask, masks
from blockshock_lib.kernels.sparse24.mask import MASKS, PATTERNS, Mask
from blockshock_lib.layers.dense import RowParallelLinear
from blockshock_lib.layers.parts import Part
from blockshock_lib.runs import records
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.methods.dense import RowParallel
from blockshock_lib.studies.linear.report import FIGURES, TABLES
from tests.cases import case, write
from tests.studies.linear.measuring import asked, measured, picked


@pytest.mark.parametrize("name", METHODS)
def test_shards_are_those_of_the_layers_own_parts_and_a_method_that_needs_a_periodic_mask_says_so(name):
    method, size = METHODS[name], 1024
    layer = method.load()
    for world_size in (2, 4, 8):
        for rank in range(layer.ranks(world_size)):
            part = layer.part(rank, world_size, size, size)
            shards = size // (part.cols.stop - part.cols.start), size // (part.rows.stop - part.rows.start)
            assert shards == method.shards(world_size)
    asked_for = (Mask.named("random"), torch.device("cpu"), torch.bfloat16)
    assert method.periodic_only == ("periodic" in layer.unsupported(*asked_for, **method.options("auto")))


class InterleavedLinear(RowParallelLinear):
    """A method that a stranger might add: rank r holds every world_size-th input column, from column r on."""

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(None, slice(0, out_features), slice(rank, in_features, world_size))

    def local(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x[:, self.cols].contiguous(), self.weight)


LAYER = "tests.studies.linear.test_methods:InterleavedLinear"
ROW = RowParallel("interleaved", "I interleaved", "I", "#7A5195", ">", LAYER, "in")


def blocks(shape, weight, seed, device):
    """A mask that a stranger might add: tiles of 8x8, each two of four along rows and columns."""
    tile = masks.make(MASKS["checkerboard"], (8, 8))[[0, 2, 1, 3, 6, 5, 4, 7]]
    return tile.roll(seed % 2 * 2, 1).repeat(shape[0] // 8, shape[1] // 8).to(device)


@pytest.mark.parametrize("phase", ["phase0", "phase3"])
def test_rows_and_a_maker_are_enough_for_a_new_family_of_masks(monkeypatch, phase):
    monkeypatch.setitem(PATTERNS, "blocks", ("8x8",))
    monkeypatch.setattr(mask, "TRANSPOSABLE", {*mask.TRANSPOSABLE, "blocks"})
    monkeypatch.setitem(masks.MAKERS, ("blocks", "8x8"), blocks)
    monkeypatch.setitem(MASKS, "blocks", Mask("blocks", "blocks", "8x8"))
    kept = masks.make(MASKS["blocks"], (64, 64))
    assert masks.first_bad_group(kept) is masks.first_bad_group(kept.t()) is None
    methods = ("dense", "row_parallel", "masked_dense", "permuted_dense", "block_shock")
    rows = measured(asked(phase), mask="blocks", methods=methods, optimizer="sgd" if phase == "phase3" else "")
    checks = {row["method"]: row["status"] for row in rows if row["metric"] == "check"}
    twin = {"twin": "ok"} if phase != "phase0" else {}
    assert checks == dict.fromkeys(methods, "ok") | {"permuted_dense": "unsupported"} | twin
    assert all(row["value"] == 1 for row in rows if row["metric"] == "check" and row["status"] == "ok")
    (refused,) = picked(rows, "permuted_dense", "check")
    assert refused["reason"] == "mask blocks is not periodic: D permutes masks that repeat one 4x4 tile"


def test_one_file_and_one_row_are_enough_for_a_new_method(monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, "interleaved", ROW)
    one = case(phase="phase1", methods=("row_parallel", "interleaved"))
    rows = measured(asked("phase1"), methods=one.methods)
    context = {"code": {}, "machine": "m", "libraries": {}, "emulated": True}
    write(tmp_path, run="r", case=one, group=0, rows=rows, context=context)
    frame = records.load(tmp_path)
    assert TABLES["correctness"](frame)["I interleaved"].tolist() == ["pass"]
    assert "I interleaved" in TABLES["speed"](frame)["method"].tolist()
    (ax, *_), alt = (fig := FIGURES["time over B1"](frame)).axes, fig.alt
    drawn = [line for line in ax.lines if line.get_color() == "#7A5195" and line.get_marker() == ">"]
    assert any(len(line.get_xdata()) for line in drawn) and "I interleaved" in alt
