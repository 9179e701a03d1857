"""Wanda and SparseGPT are the papers' algorithms, and a model is pruned by them layer by layer."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from blockshock_lib import BlockSparse, Sparse24, StructuredRows, sparsify_
from blockshock_lib.errors import DataError, UnsupportedError
from blockshock_lib.kernels.sparse24.masks import first_bad_group
from blockshock_lib.layers.sparsify import calibrate, prune
from tests.layers.sparsify.models import Model, same, state
from tests.layers.sparsify.test_convert import ALL

N, K = 48, 192  # a whole block of columns and a part of one
CONFIG = Sparse24("sparsegpt")


def problem(seed=0, rows=400, dtype=torch.float64):
    """A weight, and inputs of unlike sizes that are all correlated; input 9 is always zero."""
    draw = torch.Generator().manual_seed(seed)
    mixing = torch.eye(K, dtype=dtype) + 0.3 * torch.randn(K, K, generator=draw, dtype=dtype)
    x = (
        torch.randn(rows, K, generator=draw, dtype=dtype)
        @ mixing
        * torch.logspace(-0.5, 0.5, 5, dtype=dtype).repeat(K)[:K]
    )
    x[:, 9] = 0
    return torch.randn(N, K, generator=draw, dtype=dtype), x


def plain_sparsegpt(weight, hessian):
    """Algorithm 1 of arXiv:2301.00774 without its Cholesky factor: H is inverted anew for every column."""
    w, keep = weight.clone(), torch.ones(weight.shape, dtype=torch.bool)
    hessian = hessian.clone()
    for j in (hessian.diagonal() == 0).nonzero():
        hessian[j, j], w[:, j] = 1, 0
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)
    for j in range(w.shape[1]):
        if j % 4 == 0:
            inverses = [torch.linalg.inv(hessian[q:, q:])[0, 0] for q in range(j, j + 4)]
            scores = w[:, j : j + 4] ** 2 / torch.stack(inverses)
            keep[:, j : j + 4] = scores >= scores.sort(1).values[:, 2:3]
        inverse = torch.linalg.inv(hessian[j:, j:])[0]
        lost = torch.where(keep[:, j], 0, w[:, j])
        w[:, j:] -= torch.outer(lost / inverse[0], inverse)
    return torch.where(keep, w, 0), keep


def error(weight, pruned, x):
    return ((weight - pruned) @ x.t()).square().sum().item()


def test_sparsegpt_is_the_papers_algorithm_and_better_than_wanda_and_that_than_magnitude():
    weight, x = problem()
    pruned, keep = prune.sparsegpt(weight, x.t() @ x, CONFIG.keep, 4)
    wanted, kept = plain_sparsegpt(weight, x.t() @ x)
    rest = torch.arange(K) // 4 != 9 // 4  # where an input is always zero, what is kept of zeros is any
    assert torch.equal(keep[:, rest], kept[:, rest]) and first_bad_group(keep) is None
    torch.testing.assert_close(pruned, wanted, rtol=1e-9, atol=1e-9)
    by_wanda = torch.where(CONFIG.keep(prune.wanda(weight, x.square().sum(0))), weight, 0)
    by_size = torch.where(CONFIG.keep(weight), weight, 0)
    assert error(weight, pruned, x) < 0.7 * error(weight, by_wanda, x)
    assert error(weight, by_wanda, x) < 0.97 * error(weight, by_size, x)
    single, same_keep = prune.sparsegpt(weight.float(), (x.t() @ x).float(), CONFIG.keep, 4)
    assert single.dtype == torch.float32 and (same_keep == keep).float().mean() > 0.999
    assert error(weight, single.double(), x) == pytest.approx(error(weight, pruned, x), rel=1e-2)


def test_wanda_keeps_the_two_of_each_four_that_have_the_larger_product_of_weight_and_norm():
    weight, x = problem()
    keep = CONFIG.keep(prune.wanda(weight, x.square().sum(0)))
    scores = (weight.abs() * x.norm(dim=0)).unflatten(1, (-1, 4))
    assert torch.equal(keep.unflatten(1, (-1, 4)), scores >= scores.sort(-1).values[..., 2:3])


def test_moments_that_are_not_positive_definite_are_refused():
    weight, x = problem()
    with pytest.raises(DataError, match="not positive definite: give more rows"):
        prune.sparsegpt(weight, -(x.t() @ x), CONFIG.keep, 4)


BATCHES = [torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


@pytest.mark.parametrize("config", [CONFIG, BlockSparse(block=16, sparsity=0.5)], ids=["2:4", "blocks"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_each_layer_is_pruned_by_what_it_is_given_once_those_before_it_are_pruned(method, config):
    model, dense = Model().double(), Model().double()
    inputs, config = {}, replace(config, method=method)
    report = sparsify_(model, config, calibration=(batch for batch in BATCHES))
    assert report.converted == ALL and model.training
    for name in ALL:
        layer = model.get_submodule(name)
        handle = layer.register_forward_pre_hook(lambda _, args, name=name: inputs.setdefault(name, []).append(args[0]))
        for batch in BATCHES:
            model(batch)
        handle.remove()
        x, old = torch.cat([x.reshape(-1, layer.in_features) for x in inputs[name]]).detach(), dense.get_submodule(name)
        weight = old.weight.detach() if isinstance(old, nn.Linear) else old.weight.detach().t().contiguous()
        if method == "wanda":
            wanted = torch.where(config.keep(prune.wanda(weight, x.square().sum(0))), weight, 0)
        else:
            wanted, _ = prune.sparsegpt(weight, x.t() @ x, config.keep, 16 if isinstance(config, BlockSparse) else 4)
        torch.testing.assert_close(layer.to_dense(), wanted)


class Twice(nn.Module):
    """Calls `a` twice, the second time with what `c` is given too."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.a(h) + self.c(h)


def test_layers_with_one_input_share_a_pass_that_ends_at_the_first_and_one_called_twice_gets_all_its_inputs():
    model, passes = Model().double(), []
    model.blocks[1].down = model.blocks[0].down
    model.blocks.register_forward_hook(lambda *_: passes.append("whole"))
    model.blocks[0].register_forward_hook(lambda *_: passes.append("one"))
    groups = calibrate.survey(model, ["blocks.0.q", "blocks.0.k", "blocks.0.down", "blocks.1.q"], BATCHES, False)
    assert groups == {("blocks.0.q", "blocks.0.k"): True, ("blocks.0.down",): False, ("blocks.1.q",): True}
    passes.clear()
    for name, whole, ones in (("blocks.0.q", 0, 0), ("blocks.0.down", 2, 2), ("blocks.1.q", 0, 2)):
        found = calibrate.moments(model, name, groups.get((name,), True), BATCHES, full=True)
        assert passes.count("whole") == whole and passes.count("one") == ones
        passes.clear()
    x = model.embed(torch.cat(BATCHES)).detach()
    x = model.blocks[0](x).reshape(-1, 64)
    torch.testing.assert_close(found, x.t() @ x)
    groups = calibrate.survey(Twice(), ["a", "c"], [torch.randn(3, 64)], False)
    assert groups == {("a",): False, ("c",): True}


class Routed(nn.Module):
    """Calls `a` twice for a positive batch, else not at all; `b` and `c` are given one tensor only then."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        positive = bool(x[0, 0] > 0)
        h = self.a(x) + self.a(2 * x) if positive else x
        return self.b(h) + self.c(h if positive else h + 1)


def test_a_layer_called_twice_for_one_batch_and_never_for_another_gets_all_its_inputs():
    model, x = Routed(), torch.rand(3, 64) + 0.1
    batches = [-x, x]
    groups = calibrate.survey(model, ["a", "b", "c"], batches, False)
    assert groups == {("a",): False, ("b",): True, ("c",): True}
    found = calibrate.moments(model, "a", groups[("a",)], batches, full=True)
    torch.testing.assert_close(found, 5 * x.t() @ x)


def test_calibration_that_is_not_finite_too_short_missing_or_needless_is_refused_and_changes_nothing():
    model = Model()
    with torch.no_grad():
        model.embed.weight[5] = torch.nan
    before = state(model)
    short = [torch.arange(10, 20)[None]]
    for kind, words, method, given in (
        (DataError, "calibration gives 'blocks.0.q' inputs that are not finite", "wanda", [torch.tensor([[4, 5]])]),
        (DataError, "calibration gives 'blocks.0.q' 10 rows: it takes 64", "sparsegpt", short),
        (ValueError, "'wanda' needs calibration", "wanda", None),
        (ValueError, "'wanda' needs calibration", "wanda", []),
        (ValueError, "'magnitude' takes no calibration", "magnitude", short),
    ):
        with pytest.raises(kind, match=words):
            sparsify_(model, Sparse24(method), "blocks.*", given)
        modules, _ = before
        assert dict(model.named_modules()) == modules
        assert not any(module._forward_pre_hooks for module in model.modules())
    good = Model()
    before = state(good)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_passes", passes_that_turn_bad(calibrate._passes))
        with pytest.raises(DataError, match=r"blocks\.0\.up are not finite"):
            sparsify_(good, CONFIG, calibration=BATCHES)
    assert same(good, before) and good.training


def passes_that_turn_bad(right):
    def passes(model, names, batches, look):
        bad = names == ["blocks.0.up"]
        return right(model, names, batches, (lambda name, x: look(name, x * torch.inf)) if bad else look)

    return passes


def test_a_layer_that_no_batch_reaches_is_left_and_batches_may_be_mappings():
    model = Model()
    model.spare = nn.Linear(64, 64)
    report = sparsify_(model, Sparse24("wanda"), calibration=[{"tokens": BATCHES[0]}, (BATCHES[1],)])
    assert report.converted == ALL and report.refused["spare"] == "no batch of calibration reaches it"
    assert type(model.spare) is nn.Linear


@pytest.mark.parametrize(
    "config", [Sparse24("wanda"), Sparse24("sparsegpt"), StructuredRows(sparsity=0.5, method="wanda")]
)
def test_an_expert_that_gets_no_token_is_left(config):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x):
            return self.each[0](x) + self.each[1](x[:0]).sum()

    model = Experts()
    report = sparsify_(model, config, calibration=[torch.randn(100, 64)])
    assert report.converted == ["each.0"] and report.refused["each.1"] == "no batch of calibration reaches it"
    with pytest.raises(UnsupportedError, match="no batch of calibration reaches a layer"):
        sparsify_(Experts(), config, calibration=[torch.randn(0, 64)])


def test_a_call_without_rows_before_the_one_with_them_ends_no_pass():
    class Pieces(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x):
            return self.a(x[:0]).sum() + self.a(x)

    model, x = Pieces(), torch.randn(100, 64)
    (once,) = calibrate.survey(model, ["a"], [x], False).values()
    torch.testing.assert_close(calibrate.moments(model, "a", once, [x], False), x.square().sum(0))


class InPlace(nn.Module):
    """As residual streams are added to in place: `b` is given the same tensor as `a`, with other values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = x.clone()
        x += 10 * self.a(x)
        x += self.b(x)
        return x


@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_that_is_written_between_two_layers_is_two_inputs(inference):
    model, x = InPlace(), torch.randn(7, 64)
    with torch.inference_mode(inference):
        assert calibrate.survey(model, ["a", "b"], [x], False) == {("a",): True, ("b",): True}
    sparsify_(model, Sparse24("wanda"), calibration=[x])
    with torch.no_grad():
        given = x + 10 * model.a(x)
    keep = CONFIG.keep(prune.wanda(InPlace().b.weight.detach(), given.square().sum(0)))
    assert torch.equal(model.b.pattern.mask(), keep)


def test_calibration_is_a_list_of_batches_and_what_is_none_is_named():
    model, listed = InPlace(), InPlace()
    x = torch.randn(8, 64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)  # its batches are lists
    sparsify_(listed, Sparse24("wanda"), calibration=loader)
    sparsify_(model, Sparse24("wanda"), calibration=[(x[:4],), x[4:]])
    assert torch.equal(listed(x), model(x))
    for given, words in (
        ({"x": x}, r"calibration is one dict: put it into a list, \[batch\]"),
        (x, r"calibration is one Tensor: put it into a list"),
        ([x, None], "batch 1 of calibration is None"),
        ([x, "a text"], "batch 1 of calibration is 'a text'"),
        (3, "calibration is one int"),
    ):
        with pytest.raises(ValueError, match=words):
            sparsify_(InPlace(), Sparse24("wanda"), calibration=given)
