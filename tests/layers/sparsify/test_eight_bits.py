"""Sparse24(dtype=...): 2:4 weights of 8 bits with inputs that are quantized in each call, and their files."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockshock_lib import Sparse24, dense_, fake_sparsify_, load_sparse_, save_sparse, sparsify_
from blockshock_lib.errors import CheckpointError, UnsupportedError
from blockshock_lib.kernels.patterns import eight_bits
from blockshock_lib.layers.pattern_linear import PatternLinear
from tests.kernels.patterns.test_eight_bits import library  # noqa: F401
from tests.layers.sparsify.models import Conv1D, Model, same, state
from tests.layers.sparsify.test_convert import ALL, TOKENS
from tests.layers.sparsify.test_prune import BATCHES

EACH = pytest.mark.parametrize("dtype", list(eight_bits.DTYPES))


def made(dtype, seed=0, to=torch.bfloat16, **options):
    model = Model(seed).to(to)
    return model, sparsify_(model, Sparse24(dtype=dtype, **options))


def wrong(layer, dense, x):
    """Why a layer's y is not that of its dense weight, of x as it is quantized, in float64 but for y's rounding."""
    values, scale = eight_bits.quantized(x.flatten(0, -2), layer.packed.tensors["values"].dtype)
    truth = (values.double() * scale) @ dense.double().t()
    truth = truth if layer.bias is None else truth + layer.bias.double()
    return eight_bits.off(layer(x).flatten(0, -2), truth)


@EACH
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_autocast_does_not_round_the_product_of_quantized_values(dtype, half):
    layer = made(dtype, to=torch.float32)[0].blocks[1].up
    right = layer(x := torch.randn(4, layer.in_features))
    with torch.autocast("cpu", half):
        assert torch.equal(layer(x), right)


@EACH
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float32])
def test_a_model_computes_what_its_dense_form_does_of_quantized_inputs(dtype, to):
    model, report = made(dtype, to=to)
    whole = Model().to(to)
    assert report.converted == ALL and report.expected(5) == {}
    layers = [model.get_submodule(name) for name in ALL]
    weights, rows = sum(one.in_features * one.out_features for one in layers), sum(one.out_features for one in layers)
    biases = to.itemsize * sum(one.out_features for one in layers if one.bias is not None)
    assert report.nbytes == (to.itemsize * weights + biases, weights // 2 + weights // 8 + 4 * rows + biases)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).to(to)
    sparsify_(whole, Sparse24())
    for name in (name for name in ALL if not name.endswith("down")):
        layer, pruned = model.get_submodule(name), whole.get_submodule(name).to_dense()
        assert isinstance(layer, PatternLinear) and repr(layer).endswith(f"2:4 of torch.{dtype})")
        values, scales = eight_bits.quantized(pruned, eight_bits.DTYPES[dtype])
        assert not wrong(layer, values.double() * scales, x) and layer(x).shape == (2, 3, layer.out_features)
        assert layer(x[:0]).shape == (0, 3, layer.out_features) and layer(x).dtype == to
        torch.testing.assert_close(layer.to_dense(), (values.float() * scales).to(to))
    y, dense = model(TOKENS), copy.deepcopy(model)
    back = dense_(dense)
    assert back.nbytes == report.nbytes[::-1] and isinstance(dense.blocks[0].up, Conv1D)
    error = (dense(TOKENS).double() - y).norm() / y.double().norm()
    assert 0 < error < 0.05  # of quantizing the inputs, which the dense model does not


@EACH
def test_nan_and_infinity_come_through_in_their_row_alone_and_zeros_give_the_bias(dtype):
    layer = made(dtype)[0].blocks[0].k
    x = torch.randn(5, 64).bfloat16()
    y = layer(x)
    x[1, 7], x[2, 9], x[3] = torch.nan, torch.inf, 0
    found = layer(x)
    assert found[1].isnan().all() and not found[2].isfinite().any()
    assert torch.equal(found[3], layer.bias) and torch.equal(found[[0, 4]], y[[0, 4]])


@EACH
def test_a_compiled_model_is_one_graph(dtype):
    model, _ = made(dtype, to=torch.float32)
    fast = torch.compile(model.blocks, fullgraph=True, backend="aot_eager")
    for x in (torch.randn(3, 5, 64), torch.randn(0, 5, 64)):
        torch.testing.assert_close(fast(x), model.blocks(x))


@EACH
def test_calibrated_and_given_weights_are_quantized_as_they_were_pruned(dtype):
    for method, calibration in (("sparsegpt", BATCHES), ("given", None)):
        model, plain = Model(), Model()
        first = Sparse24("sparsegpt") if calibration else Sparse24()
        sparsify_(plain, first, "blocks.0.q", calibration=calibration)
        if not calibration:
            model.blocks[0].q.weight.data.copy_(plain.blocks[0].q.to_dense())
        sparsify_(model, Sparse24(method, dtype=dtype), "blocks.0.q", calibration=calibration)
        wanted = plain.blocks[0].q.to_dense()
        values, scales = eight_bits.quantized(wanted, eight_bits.DTYPES[dtype])
        torch.testing.assert_close(model.blocks[0].q.to_dense(), values.float() * scales)


@EACH
def test_a_file_holds_the_values_that_are_multiplied_and_brings_them_back(dtype, tmp_path):
    model, _ = made(dtype)
    save_sparse(path := tmp_path / "model.safetensors", model)
    tensors = load_file(path)
    assert tensors["blocks.0.q.compressed"].dtype == eight_bits.DTYPES[dtype]
    assert tensors["blocks.0.q.weight_scale"].shape == (64, 1) and "blocks.0.q.weight" not in tensors
    with torch.device("meta"):
        empty = Model(seed=1).bfloat16()
    for into in (Model(seed=2).bfloat16(), made(dtype, seed=3)[0], made("", seed=4)[0], empty):
        assert sorted(load_sparse_(into, path).converted) == sorted(ALL)
        assert torch.equal(into(TOKENS), model(TOKENS)) and into.head.weight is into.embed.weight
    dense_(empty)
    assert isinstance(empty.blocks[1].up, Conv1D)
    plain, _ = made("")
    save_sparse(path, plain)
    load_sparse_(other := Model(seed=5).bfloat16(), path, Sparse24(dtype=dtype))
    assert torch.equal(other(TOKENS), model(TOKENS))


@EACH
def test_a_file_with_one_scale_a_weight_opens_and_what_does_not_fit_is_refused_and_changes_nothing(dtype, tmp_path):
    model, _ = made(dtype)
    save_sparse(path := tmp_path / "model.safetensors", model)
    whole, q = load_file(path), "blocks.0.q"
    save_file(whole | {f"{q}.weight_scale": torch.full((1,), 0.25).bfloat16()}, path)
    load_sparse_(into := Model().bfloat16(), path)
    torch.testing.assert_close(into.blocks[0].q.to_dense().float(), 0.25 * model.blocks[0].q.packed.quantized().float())
    other = Model(seed=9).bfloat16()
    before = state(other)
    for words, change in (
        ("KeyError|weight_scale", lambda t: t.pop(f"{q}.weight_scale")),
        (
            "q is of torch.* with 63 scales",
            lambda t: t.update({f"{q}.weight_scale": torch.ones(63, 1)}),
        ),
        ("with a finite scale a row", lambda t: t.update({f"{q}.weight_scale": torch.full((64, 1), torch.nan)})),
        (r"q is of torch.uint8", lambda t: t.update({f"{q}.compressed": t[f"{q}.compressed"].view(torch.uint8)})),
    ):
        tensors = dict(whole)
        change(tensors)
        save_file(tensors, path)
        with pytest.raises(CheckpointError, match=words):
            load_sparse_(other, path)
        assert same(other, before)


@EACH
def test_a_packed_weight_takes_no_state_and_no_other_dtype_and_a_copy_has_its_own(dtype):
    model, _ = made(dtype)
    y, twin = model(TOKENS), copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"blocks.0.q.weight is packed for good: call dense_\(model\)"):
        model.load_state_dict(Model(seed=6).bfloat16().state_dict())
    dense_(model)
    model.load_state_dict(Model(seed=6).bfloat16().state_dict())
    sparsify_(model, Sparse24(dtype=dtype))
    assert torch.equal(model(TOKENS), made(dtype, seed=6)[0](TOKENS)) and torch.equal(twin(TOKENS), y)
    with pytest.raises(UnsupportedError, match=r"is packed for torch.bfloat16 on cpu"):
        torch.nn.Sequential(before := torch.nn.Linear(8, 8).bfloat16(), twin).float()
    assert before.weight.dtype == torch.bfloat16  # all or nothing
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.0.q.weight"):
        twin.load_state_dict({"blocks.0.k.bias": twin.blocks[0].k.bias})


@EACH
def test_a_layer_whose_product_the_library_gets_wrong_is_left_and_the_others_are_converted(dtype, library):  # noqa: F811
    library.wrong[0] = lambda y: y.roll(1, 0) if y.shape[1] == 128 else y
    model, report = made(dtype)
    assert report.converted == [name for name in ALL if not name.endswith("up")]
    assert f"cuSPARSELt does not multiply 2:4 in torch.{dtype}" in report.refused["blocks.0.up"]
    assert model.blocks[0].k.packed.fused and isinstance(model.blocks[0].up, Conv1D)
    dense = copy.deepcopy(model)
    dense_(dense)
    error = (dense(TOKENS).double() - model(TOKENS)).norm() / dense(TOKENS).double().norm()
    assert 0 < error < 0.05


def test_what_cannot_be_is_refused_by_name_and_leaves_the_model_as_it_was(monkeypatch):
    model = Model()
    before = state(model)
    for words, make in (
        ("dtype='int4': allowed: '', float8_e4m3fn, int8", lambda: Sparse24(dtype="int4")),
        ("dtype='int8' is for inference", lambda: Sparse24(dtype="int8", frozen=False)),
        ("dtype='int8' is for inference", lambda: Sparse24(dtype="int8", product="cslt")),
        ("train without it", lambda: fake_sparsify_(model, Sparse24(dtype="int8"))),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    monkeypatch.setattr(eight_bits, "by_library", lambda device: True)
    with pytest.raises(UnsupportedError, match=r"none of 9.*q: cuSPARSELt does not multiply 2:4 in torch.int8"):
        sparsify_(model, Sparse24(dtype="int8"))
    assert same(model, before)
