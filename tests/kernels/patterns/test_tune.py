"""The search for settings, with a clock of its own in the place of a GPU's."""

import contextlib
import copy
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks import bsr_table
from blockshock_lib.kernels.patterns import blocks, dense, tune
from blockshock_lib.kernels.patterns.table import PATTERNS
from blockshock_lib.kernels.tuning.store import SCHEMA

MS = {(4, 4): 1.0, (2, 4): 0.5, (2, 1): 0.2}  # by SPLIT_N and GROUP_SIZE_ROW


class Faked(blocks.Bsr):
    """Multiplies as its setting says: the fastest wrongly for one of two inputs, some not at all."""

    def by(self, way, x):
        if way.num_stages == 5:
            raise OSError("out of shared memory")
        y = x @ self.dense().t()
        return y * torch.nan if way.GROUP_SIZE_ROW == 1 and way.SPLIT_N == 2 and x is self.wrong_for else y


@pytest.fixture
def probed(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    tried = []

    class Probe(tune.Probe):
        def __init__(self, packed, x):
            self.inputs, self.timings, self.step = [x, x.flip(0)], [(packed, x)], 1
            self.truths = [one @ packed.dense().t() for one in self.inputs]
            self.units = [(1e-2, 1e-2)] * 2
            self.clock = contextlib.ExitStack()

        def timed(self, way):
            tried.append(way)
            return contextlib.nullcontext(lambda: MS.get((way.SPLIT_N, way.GROUP_SIZE_ROW), 9.0))

    monkeypatch.setattr(tune, "Probe", Probe)
    monkeypatch.setattr(tune, "guarded", lambda device: contextlib.nullcontext())
    return tried


def test_the_fastest_right_setting_is_found_kept_and_found_again(probed):
    pattern, draw = PATTERNS["blocks"], torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, generator=draw) for size in ((64, 64), (64, 64)))
    packed = Faked(weight, pattern.mask(weight.abs(), 0.5, 16), 16)
    packed.wrong_for, ways = x, blocks.settings(64, 16)
    best = tune.choice(blocks.STORE, ways, packed, x, {"block": 16}, blocks._variants)
    assert (best.SPLIT_N, best.GROUP_SIZE_ROW) == (2, 4) and best.num_stages != 5
    timed = {(way.SPLIT_N, way.GROUP_SIZE_ROW) for way in probed}
    assert (2, 16) in timed and (2, 1) not in timed  # both vary a leader, and one is wrong
    probed.clear()
    assert tune.choice(blocks.STORE, ways, packed, x, {"block": 16}) == best and not probed
    with pytest.warns(UserWarning, match="nothing that was tried gave right values"):
        packed.by = lambda way, x: x * torch.nan
        assert tune.choice(blocks.STORE, ways, packed, x, {"block": 32}) == ways[0]


def test_what_was_found_here_ships_and_multiplies_a_weight_that_nobody_tuned(probed, monkeypatch, tmp_path):
    pattern, draw = PATTERNS["blocks"], torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, generator=draw) for size in ((64, 64), (64, 64)))
    packed, guess = Faked(weight, pattern.mask(weight.abs(), 0.5, 16), 16), blocks.settings(64, 16)[0]
    packed.wrong_for, table = x, tmp_path / "shipped.json"
    monkeypatch.setattr(blocks.Table, "path", table)
    blocks.tabled.cache_clear()
    assert packed.ways(x)[0] == guess
    best = tune.choice(blocks.STORE, packed.ways(x), packed, x, packed.about, blocks._variants)
    problem = tune.problem_of(packed, x, packed.about)
    other = {
        "problem": problem | {"gpu": "another"},
        "versions": {},
        "ways": [{"kind": "bsr", **guess._asdict(), "ms": 1.0}],
    }
    table.write_text(json.dumps({"schema": SCHEMA, "entries": [other]}))
    for _ in range(2):  # again: in place of the first
        (entry,) = bsr_table.ship([problem], table)
        assert len(json.loads(table.read_text())["entries"]) == 2 and entry["versions"]
    blocks.tabled.cache_clear()
    assert best != guess and packed.ways(x) == [best, *blocks.settings(64, 16)]
    assert packed.ways(x[:32])[0] == blocks.settings(32, 16)[0]  # of another batch
    asked = []
    packed.by = lambda way, x: asked.append(way) or x
    with mock.patch.object(torch.Tensor, "device", SimpleNamespace(type="cuda")):
        packed.product(x)
    assert asked == [best]
    table.write_text("{")
    blocks.tabled.cache_clear()
    assert packed.ways(x)[0] == guess
    blocks.tabled.cache_clear()


@pytest.mark.parametrize("batch", [16, 48, 256, 50432])
def test_settings_are_of_whole_programs_of_a_power_of_two(batch):
    for block in (16, 64, 128):
        ways = blocks.settings(batch, block)
        assert len(set(ways)) == len(ways) <= 18 and ways
        assert all(batch % way.SPLIT_N == 0 and blocks._width(batch // way.SPLIT_N) for way in ways)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_dense_product_in_parts_is_the_dense_product_and_the_library_is_put_back(splits, monkeypatch):
    set_to = ["default"]
    library = lambda name=None: set_to.append(name) if name else set_to[-1]  # noqa: E731
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    weight, x = torch.randn(48, 64), torch.randn(8, 64)
    packed = dense.Searched(weight, torch.ones_like(weight, dtype=torch.bool))
    torch.testing.assert_close(packed.by(way := dense.Way("cublaslt", splits), x), x @ weight.t())
    lying = dense.multiplied(way, x.t().contiguous().t(), weight.t().contiguous().t())  # transposed views
    torch.testing.assert_close(lying, x @ weight.t())
    out, bias = torch.full((8, 48), torch.nan), torch.randn(8, 1)
    assert dense.multiplied(way, x, weight, out) is out
    torch.testing.assert_close(out, x @ weight.t())
    torch.testing.assert_close(dense.multiplied(way, x, weight, bias=bias), x @ weight.t() + bias)
    assert dense.fastest(x, weight) is None  # nothing is searched on a CPU
    assert set_to == ["default", *["cublaslt", "default"] * 4]


def test_a_product_takes_what_was_found_for_operands_that_lie_as_its_own(monkeypatch):
    found, taken = {}, []
    monkeypatch.setattr(dense, "fastest", lambda x, weight: found[dense._lies(x), dense._lies(weight)])
    monkeypatch.setattr(dense, "multiplied", lambda way, *_: taken.append(way))
    square, wide = torch.randn(64, 64), torch.randn(64, 128)
    cases = [
        (square, square),
        (square, square.t()),
        (square.t(), square),
        (wide[:, 64:], square),
        (square, wide[:, :64]),
    ]
    products = dense.Products()
    for place, case in enumerate(cases):
        found[tuple(map(dense._lies, case))] = dense.Way("cublaslt", 1) if place else dense.WAYS[0]
        products.search(*case)
    assert list(found) == [("N", "N"), ("N", "T"), ("T", "N"), ("Ns", "N"), ("N", "Ns")]
    for case in cases:
        products(*case)
    assert taken == [None, *[dense.Way("cublaslt", 1)] * 4], "PyTorch's own way is none"
    products.ways = dict.fromkeys(products.ways, dense.Way("cublaslt", 4))
    products(*cases[1])
    assert taken[-1] is None, "an eager call takes K whole"
    assert copy.deepcopy(products).ways == {}, "a copy may go to another device"
    found["N", "N"] = dense.Way("cublaslt", 4)
    products.search(square, square)
    assert taken[-1] == found["N", "N"], "parts are met in captures only, also by a rank that found them in the file"
    monkeypatch.setattr(dense, "fastest", mock.Mock(side_effect=torch.OutOfMemoryError))
    products.search(square, wide.t()[:64])


def test_a_search_leaves_the_generator_of_the_process_and_copies_what_is_larger_past_the_cache(monkeypatch):
    told = SimpleNamespace(L2_cache_size=1 << 15)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    monkeypatch.setattr(torch, "mm", lambda x, w, out_dtype: (x @ w).to(out_dtype))
    monkeypatch.setattr(tune, "Clock", lambda device: None)
    monkeypatch.setattr(tune, "ROWS", 16)
    few, many, before = torch.randn(8, 64), torch.randn(64, 64), torch.get_rng_state()
    for x, weight, copied in ((few, many, 0), (many, few, 1)):
        probe = tune.Probe(dense.Searched(weight, torch.ones_like(weight, dtype=torch.bool)), x)
        assert (
            len({id(pair[copied]) for pair in probe.timings}) == 4
            and len({id(p[1 - copied]) for p in probe.timings}) == 1
        )
        assert [len(truth) for truth in probe.truths] == [min(len(x), 16)] * 2
    assert torch.equal(torch.get_rng_state(), before)
    told.L2_cache_size = 0  # it is not told: a common one is taken
    assert len(tune.Probe(dense.Searched(weight, torch.ones_like(weight, dtype=torch.bool)), x).timings) == 16
