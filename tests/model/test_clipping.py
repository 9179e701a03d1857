"""clip_grad_norm_ gives every rank the dense model's norm, and the dense model's clipped update."""

import math

import pytest
import torch
from torch import nn

from blockshock_lib import clip_grad_norm_, launch
from tests import clipping
from tests.layers.test_training import CASES

EVERY = [("dense", "checkerboard", {}), *CASES]
NORMS = [1, 2, math.inf]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    with launch.WorkerGroup(request.param, logs=tmp_path_factory.mktemp("logs")) as group:
        group.size = request.param
        yield group


def test_norm_and_clipped_update_are_the_dense_models_for_every_method(ranks):
    assert ranks.call(clipping.like_dense, EVERY, NORMS, seconds=60) == [[]] * ranks.size


def test_layers_in_different_groups_are_joined_each_in_its_own(ranks):
    for wanted, norm, off in ranks.call(clipping.two_groups, seconds=60):
        assert norm == pytest.approx(wanted, rel=1e-12) and off < 1e-12


@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("norm_type", NORMS)
def test_dtensors_of_torchs_styles_count_beside_ours(norm_type, dtype, close, ranks):
    for wanted, norm, off in ranks.call(clipping.beside_torchs_styles, norm_type, dtype, seconds=60):
        assert norm == pytest.approx(wanted, rel=close) and off < close


@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_a_nan_on_one_rank_is_seen_by_all_and_can_be_an_error(norm_type, ranks):
    for norm, said, unchanged in ranks.call(clipping.not_finite, norm_type, seconds=60):
        assert math.isnan(norm) and "non-finite" in said and unchanged


def test_a_tied_weight_counts_once_and_no_gradient_is_no_norm(ranks):
    for none, wanted, norm in ranks.call(clipping.tied_and_bare, seconds=60):
        assert none == 0.0 and norm == pytest.approx(wanted, rel=1e-12)


def test_a_model_without_shared_layers_is_clipped_as_by_torch():
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    assert clip_grad_norm_(model, 1.0).item() == pytest.approx(20**0.5)
    assert nn.utils.get_total_norm([p.grad for p in model.parameters()]).item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("norm_type", [0, -1, math.nan])
def test_a_norm_that_zeros_would_change_is_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type must be over 0"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0, norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_a_norm_of_16_bit_gradients_is_not_rounded_to_16_bits(norm_type):
    model = torch.nn.Linear(256, 64, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    entries = torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])
    norm = clip_grad_norm_(model, 1e9, norm_type)
    assert norm.item() == pytest.approx(torch.linalg.vector_norm(entries, norm_type).item(), rel=1e-5)
