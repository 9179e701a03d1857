"""Inputs come from independent seeds, and the truth is float64."""

from dataclasses import replace

import pytest
import torch

from blockshock_lib.layers.problem import LinearProblem, inputs
from blockshock_lib.sparse24 import product
from tests.cases import case

CPU = torch.device("cpu")


def test_same_case_gives_the_same_numbers():
    one, two = LinearProblem(case(), CPU), LinearProblem(case(), CPU)
    assert torch.equal(one.weight, two.weight) and torch.equal(one.x, two.x) and torch.equal(one.bias, two.bias)


def test_weight_and_input_do_not_share_a_seed():
    p = LinearProblem(case(batch=128, out_features=128, bias=False, dtype="fp32"), CPU)
    both = torch.stack([p.weight.flatten(), p.x.flatten()])
    assert abs(torch.corrcoef(both)[0, 1]) < 0.02


def test_another_draw_changes_the_input_and_not_the_weight():
    one, two = LinearProblem(case(), CPU, draw=0), LinearProblem(case(), CPU, draw=1)
    assert torch.equal(one.weight, two.weight) and not torch.equal(one.x, two.x)


def test_truth_is_float64_of_the_rounded_operands():
    p = LinearProblem(case(), CPU)
    want = torch.nn.functional.linear(p.x.double(), p.weight.double(), p.bias.double())
    assert p.truth.dtype == torch.float64
    torch.testing.assert_close(p.truth, want, rtol=1e-12, atol=1e-12)


def test_truth_is_the_same_in_chunks(monkeypatch):
    whole = LinearProblem(case(), CPU).truth
    monkeypatch.setattr("blockshock_lib.layers.reference.TRUTH_ROWS", 48)
    torch.testing.assert_close(LinearProblem(case(), CPU).truth, whole, rtol=1e-13, atol=1e-13)


def test_activation_inputs_have_heavy_tails_and_outlier_channels():
    x = inputs("activation", 4096, 256, torch.Generator().manual_seed(0), CPU)
    spread = x.abs().quantile(0.5, dim=0)
    assert (spread > 8 * spread.median()).sum() == 2
    calm = x[:, spread < 2 * spread.median()]
    assert calm.abs().max() > 8 * calm.std()


def test_uniform_inputs_stay_in_their_range():
    x = inputs("uniform", 64, 256, torch.Generator().manual_seed(0), CPU)
    assert x.min() >= -1 and x.max() <= 1 and x.std() == pytest.approx(3**-0.5, rel=0.05)


def test_unknown_distribution_is_named():
    with pytest.raises(ValueError, match="cauchy"):
        inputs("cauchy", 1, 64, torch.Generator(), CPU)


def test_a_term_that_the_2_4_library_multiplies_wrongly_is_unsupported_and_only_there(monkeypatch):
    names = ("masked_dense", "block_shock", "block_shock_torch")

    def refused(features=None, **changes):
        problem = LinearProblem(case(methods=names, **changes), CPU)
        return [name for name in names if "wrong values" in problem.too_large(name, features)]

    assert refused(65536, device="cuda") == [] and refused(65600, device="cuda") == ["block_shock", "block_shock_torch"]
    assert refused(device="cuda") == []  # 128x256, the case's own
    assert refused(65600, device="cuda", world_size=4) == []  # its terms have half of the columns
    assert refused(131072, device="cuda", product="reference") == ["block_shock_torch"]
    assert refused(131072) == ["block_shock_torch"]  # on a CPU "auto" is the reference
    problem = LinearProblem(case(methods=names, product="cslt"), CPU)
    everywhere = replace(product.BACKENDS["cslt"], unsupported=lambda device, dtype: "")
    monkeypatch.setitem(product.BACKENDS, "cslt", everywhere)
    assert problem.unsupported("block_shock") == problem.unsupported("block_shock", 65536) == ""
    assert "wrong values" in problem.unsupported("block_shock", 65600)
