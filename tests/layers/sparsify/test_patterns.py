"""The other patterns: what a layer computes, its state, and what is refused."""

import copy
import io

import pytest
import torch

from blockshock_lib import (
    BlockSparse,
    ShuffledBlocks,
    Sparse24InBlocks,
    StructuredColumns,
    StructuredRows,
    Unstructured,
    dense_,
    fake_sparsify_,
    save_sparse,
    sparsify_,
)
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.patterns import unstructured
from blockshock_lib.layers.pattern_linear import PatternLinear
from tests.layers.sparsify.models import Model, same, state
from tests.layers.sparsify.test_convert import ALL, TOKENS
from tests.layers.sparsify.test_prune import BATCHES

CONFIGS = [
    Unstructured(sparsity=0.9),
    Unstructured(sparsity=0.9, kernel="coo"),
    BlockSparse(block=16, sparsity=0.125),
    ShuffledBlocks(block=16, sparsity=0.0625),  # more would leave a row of blocks of these small weights empty
    Sparse24InBlocks(block=64, sparsity=0.5),
    StructuredRows(sparsity=0.5),
    StructuredColumns(sparsity=0.25),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{type(config).__name__} {config.kernel}")
def test_a_model_in_any_pattern_computes_what_its_dense_form_does(config):
    model = Model()
    report = sparsify_(model, config)
    assert report.converted == [*ALL] and all(isinstance(model.get_submodule(name), PatternLinear) for name in ALL)
    before, after = report.nbytes
    assert after < before or isinstance(config, ShuffledBlocks | Sparse24InBlocks)
    dense = copy.deepcopy(model)
    back = dense_(dense)
    assert back.nbytes == (after, before) and back.expected(5) == {}
    assert [row.shape for row in back.rows] == [row.shape for row in report.rows if not row.refused]
    x = torch.randn(3, 5, 64, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    y, wanted = model.blocks(x), dense.blocks(again)
    torch.testing.assert_close(y, wanted)
    y.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(x.grad, again.grad)
    assert model.blocks(x[:0]).shape == (0, 5, 64)
    assert {k: v.shape for k, v in model.state_dict().items()}.keys() == dense.state_dict().keys()
    x.grad, y = None, model.blocks(x)
    del model
    y.sum().backward()
    torch.testing.assert_close(x.grad, again.grad)
    zeros = torch.cat([dense.get_submodule(name).weight.flatten() == 0 for name in ALL]).float().mean()
    assert zeros.item() == pytest.approx(config.sparsity, abs=0.01)


def test_a_compiled_model_in_a_pattern_is_one_graph_and_a_copy_multiplies_its_own_weights():
    model = Model()
    sparsify_(model, BlockSparse(block=16, sparsity=0.125))
    other = copy.deepcopy(model)
    one, two = ({layer.handle for layer in every.modules() if hasattr(layer, "handle")} for every in (model, other))
    assert len(one) == len(two) == len(ALL) and not one & two
    del model.blocks[0].q.packed.tensors["values"]
    fast = torch.compile(other.blocks, fullgraph=True, backend="aot_eager")
    for x in (torch.randn(3, 5, 64), torch.randn(0, 5, 64)):
        found = []
        for run in (fast, other.blocks):
            given = x.clone().requires_grad_()
            (y := run(given)).sum().backward()
            found.append([y, given.grad])
        torch.testing.assert_close(*found)
    assert found[0][0].shape == (0, 5, 64)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_calibration_multiplies_no_packed_weight_and_passes_what_is_pruned(method, monkeypatch):
    monkeypatch.setattr(unstructured.Csr, "product", lambda packed, x: pytest.fail("a slow product is calibrated by"))
    model, both = Model(), Model()
    sparsify_(model, Unstructured(sparsity=0.5, method=method), calibration=BATCHES)
    monkeypatch.undo()
    for name in ALL:  # one after another: each layer is given what the packed ones before it make
        sparsify_(both, Unstructured(sparsity=0.5, method=method), name, calibration=BATCHES)
    for name in ALL:
        assert isinstance(model.get_submodule(name), PatternLinear)
        torch.testing.assert_close(model.get_submodule(name).to_dense(), both.get_submodule(name).to_dense())


def test_unstructured_weights_of_16_bits_are_multiplied_in_fp32_and_stay_of_their_dtype():
    linear = torch.nn.Sequential(torch.nn.Linear(512, 64, dtype=torch.bfloat16))
    x = torch.randn(8, 512).bfloat16()
    sparsify_(linear, Unstructured(sparsity=0.5))
    layer = linear[0]
    assert layer.packed.tensors["values"].dtype == torch.float32 and layer.weight.dtype == torch.bfloat16
    exact = x.double() @ layer.to_dense().double().t() + layer.bias.double()
    y = linear(x)
    assert y.dtype == layer.to_dense().dtype == torch.bfloat16
    assert (y - exact).abs().max() <= 2 * (exact.bfloat16() - exact).abs().max()
    with pytest.raises(ValueError, match="bfloat16"):
        linear(x.float())


def test_fake_layers_of_a_pattern_become_real_with_equal_values():
    model = Model()
    fake_sparsify_(model, BlockSparse(block=16, sparsity=0.5))
    y = model(TOKENS)
    assert sparsify_(model, BlockSparse(block=16, sparsity=0.5, method="given")).converted == ALL
    torch.testing.assert_close(model(TOKENS), y)


def test_what_a_pattern_cannot_do_is_refused_by_name():
    model = Model()
    before = state(model)
    with torch.no_grad():
        model.blocks[0].k.weight[7] = 1e-9
    for words, config in (
        (r"leaves 1 outputs without a weight, as row 7", Unstructured(sparsity=0.5)),
        (r"blocks of 48 do not divide 64x64", BlockSparse(block=48, sparsity=0.5)),
    ):
        with pytest.raises(UnsupportedError, match=words):
            sparsify_(model, config, "blocks.0.k")
    with pytest.raises(ValueError, match=r"blocks.0.k: a sparsity of 0.99 leaves"):
        sparsify_(model, Unstructured(sparsity=0.99, method="wanda"), "blocks.0.k", calibration=BATCHES)
    model.blocks[0].k.weight.data.copy_(before[1]["blocks.0.k.weight"])
    assert same(model, before)
    for words, make in (
        ("did you mean 'magnitude'", lambda: Unstructured(sparsity=0.5, method="magnitud")),
        ("from 0 to below 1", lambda: BlockSparse(sparsity=1.0)),
        ("kernel='bsr': allowed", lambda: Unstructured(sparsity=0.5, kernel="bsr")),
        ("method='sparsegpt': allowed", lambda: StructuredRows(sparsity=0.5, method="sparsegpt")),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    sparsify_(model, BlockSparse(block=16, sparsity=0.5), "blocks.0.q")
    with pytest.raises(UnsupportedError, match=r"q is blocks, 0.500 sparse, and a file holds 2:4 layers alone"):
        save_sparse(io.BytesIO(), model)
    assert "packed or sharded already" in sparsify_(model, BlockSparse(block=16, sparsity=0.5)).refused["blocks.0.q"]
