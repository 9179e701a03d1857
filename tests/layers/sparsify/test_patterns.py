"""The other patterns: what a layer computes, its state, and what is refused."""

import copy
import functools
import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import prune

from blockshock_lib import (
    BlockSparse,
    PruneSchedule,
    ShuffledBlocks,
    Sparse24,
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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{type(config).__name__} {config.kernel}")
@pytest.mark.parametrize(("to", "half"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float16)])
def test_autocast_changes_the_dtype_of_no_pattern(config, to, half):
    model = Model().to(to)
    sparsify_(model, config)
    layer, x = model.blocks[1].up, torch.randn(5, 64, dtype=to, requires_grad=True)
    (right := layer(x)).sum().backward()
    wanted, x.grad = x.grad, None
    with torch.autocast("cpu", half):
        y = layer(x)
        y.sum().backward()
        with pytest.raises(ValueError, match=r"as the weight is, not torch.int64"):
            layer(torch.ones(5, 64, dtype=torch.int64))
    assert torch.equal(y, right) and torch.equal(x.grad, wanted) and y.dtype == to


@pytest.mark.parametrize("config", [*CONFIGS, Sparse24(dtype="int8")], ids=lambda config: type(config).__name__)
def test_what_a_layer_without_a_bias_gives_may_be_written_in_place(config):
    sparsify_(model := nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(inplace=True)), config)
    for shape in ((5, 64), (2, 3, 64)):
        x = torch.randn(shape, requires_grad=True)
        wanted = torch.autograd.grad(model[0](x).relu().sum(), x)[0]
        torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x)[0], wanted)


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


PRUNED = [config for config in CONFIGS if "given" in config.methods and not config.kernel]


@pytest.mark.parametrize("kind", ["once", "decay", "gradual"])
@pytest.mark.parametrize("config", PRUNED, ids=lambda config: type(config).__name__)
def test_a_fake_model_is_real_with_equal_values_once_its_schedule_has_ended_and_no_sooner(config, kind):
    model, schedule = Model().double(), PruneSchedule(kind, 4 * (kind != "once"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if isinstance(config, Unstructured):
        config = replace(config, sparsity=0.5)  # of more, training by tokens leaves outputs without a weight
    fake_sparsify_(model, config, schedule=schedule)
    for step in range(4):
        if kind != "once" and step in (1, 3):
            with pytest.raises(
                UnsupportedError, match=r"none of.*q: (.*it keeps \d+, and|the mask is not of shuffled)"
            ):
                sparsify_(model, replace(config, method="given"))
        model(TOKENS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    y = model(TOKENS)
    assert sparsify_(model, replace(config, method="given")).converted == ALL
    torch.testing.assert_close(model(TOKENS), y)


def test_given_is_what_leaves_out_as_much_as_the_pattern_asks():
    model = Model()
    with pytest.raises(UnsupportedError, match=r"q: its weight is not pruned: it keeps 4096, and sparsity=0.9 410"):
        sparsify_(model, Unstructured(sparsity=0.9, method="given"), "blocks.*")
    with torch.no_grad():
        for name in ("q", "k"):
            weight = model.blocks[0].get_submodule(name).weight
            weight.masked_fill_(weight.abs() <= weight.abs().flatten().kthvalue(2048).values, 0)
    assert sparsify_(model, Unstructured(sparsity=0.5, method="given"), "*.[qk]").converted == ALL[:2]


def test_one_layer_that_is_not_pruned_so_or_that_blocks_do_not_divide_leaves_the_others_converted():
    def made():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 96))
        fake_sparsify_(model, config)
        dense_(model)
        return model

    for config in (StructuredRows(sparsity=0.5), StructuredColumns(sparsity=0.5)):
        model, given = made(), replace(config, method="given")
        with torch.no_grad():
            model[0].weight.zero_()
            row, column = model[1].weight.nonzero()[0].tolist()
            model[1].weight[row, column] = 0  # by chance, inside what is kept
        report = sparsify_(model, given)
        assert report.converted == ["1", "2", "3"] and model[1].to_dense()[row, column] == 0
        assert "without a weight" in report.refused["0"] or "keeps nothing" in report.refused["0"]
    for block, left in ((32, []), (64, ["3"])):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 96))
        config = BlockSparse(block=block, sparsity=0.5, method="sparsegpt")
        assert list(sparsify_(model, config, calibration=[torch.randn(99, 64)]).refused) == left
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    for block in (48, 200, 256):
        with pytest.raises(UnsupportedError, match=f"none of 2 .*blocks of {block} do not divide"):
            sparsify_(model, BlockSparse(block=block, sparsity=0.5, method="sparsegpt"), None, [torch.randn(600, 512)])


def test_what_a_cpu_multiplies_in_32_bits_alone_trains_there():
    model = nn.Sequential(nn.Linear(64, 64))
    assert fake_sparsify_(model, ShuffledBlocks(block=16, sparsity=0.25)).converted == ["0"]


def test_options_of_another_type_are_refused_by_name():
    for make, words in (
        (lambda: BlockSparse(block="8", sparsity=0.5), "block='8': it is a whole number from 1 on"),
        (lambda: BlockSparse(block=16.0, sparsity=0.5), "block=16.0: it is a whole number"),
        (lambda: StructuredRows(block=0, sparsity=0.5), "block=0: it is a whole number"),
        (lambda: Unstructured(sparsity="0.5"), "sparsity='0.5': it lies from 0 to below 1"),
        (lambda: Unstructured(sparsity=None), "sparsity=None: it lies"),
        (lambda: sparsify_(Model(), BlockSparse), "config is one of Sparse24.*, BlockSparse.*, made with its options"),
        (lambda: sparsify_(Model(), "2:4"), "config is one of .*not '2:4'"),
        (lambda: fake_sparsify_(Model(), Sparse24), "config is one of"),
        (lambda: sparsify_(Model(), Sparse24(), ["blocks.0.q"]), r"filter=\['blocks.0.q'\]: it is a pattern of names"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


@pytest.mark.parametrize("config", [BlockSparse(block=16, sparsity=0.25), Sparse24(dtype="int8")])
def test_a_packed_layer_takes_no_other_weight_and_is_neither_scripted_nor_looked_into(config):
    model, x, utils = nn.Sequential(nn.Linear(64, 64)), torch.randn(3, 64), nn.utils
    sparsify_(model, config)
    layer, wanted, names = model[0], model(x), vars(model[0]).keys()
    for make in (
        utils.weight_norm,
        utils.spectral_norm,
        utils.parametrizations.weight_norm,
        utils.parametrizations.spectral_norm,
        functools.partial(prune.l1_unstructured, name="weight", amount=0.5),
    ):
        with pytest.raises(UnsupportedError, match=r"^0: PatternLinear\(.*takes no FSDP1, pruning, weight_norm"):
            make(layer)
    for weight in (nn.Parameter(torch.ones(64, 64)), torch.ones(64, 64)):
        with pytest.raises(UnsupportedError, match=r"^0: PatternLinear\(.*no other weight.*dense_\(model\)"):
            layer.weight = weight
    with pytest.raises(UnsupportedError, match=r"^0: PatternLinear\(.*no other weight.*dict\(named_parameters\(\)\)"):
        torch.func.functional_call(model, model.state_dict(), (x,))
    with pytest.raises(UnsupportedError, match=r"look into 0: PatternLinear.*Tracer"):
        torch.fx.symbolic_trace(model)
    with pytest.raises(UnsupportedError, match=r"script takes no 0: PatternLinear.*to_linear\(\)"):
        torch.jit.script(model)
    assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), wanted)
    layer.scale = nn.Parameter(torch.ones(()))  # another parameter is the user's own
    assert torch.equal(model(x), wanted) and vars(layer).keys() == names and not layer._forward_hooks


def test_a_packed_layer_is_not_exported_and_takes_no_other_kind_of_derivative():
    model = nn.Sequential(nn.Linear(64, 64))
    sparsify_(model, BlockSparse(block=16, sparsity=0.25))
    x = torch.randn(3, 64)
    with pytest.raises(Exception, match="export cannot take a packed layer along"):
        torch.export.export(model, (x,))
    for transform in (torch.vmap(model), torch.func.jacrev(model), torch.func.jacfwd(model)):
        with pytest.raises(UnsupportedError, match=r"torch\.func and"):
            transform(x)
    with (
        forward_ad.dual_level(),
        pytest.raises(UnsupportedError, match="forward-mode derivatives take no packed layer"),
    ):
        model(forward_ad.make_dual(x, torch.ones_like(x)))
    assert torch.compile(model, fullgraph=True, backend="aot_eager")(x).shape == (3, 64)


@pytest.mark.parametrize("config", [*CONFIGS, Sparse24(dtype="int8"), Sparse24(), Sparse24(frozen=False)], ids=str)
def test_without_values_a_packed_model_gives_shapes_and_keeps_its_own_values(config):
    model, x = Model(), torch.randn(3, 5, 64, requires_grad=True)
    sparsify_(model, config)
    wanted = y, _ = model.blocks(x), torch.autograd.grad(model.blocks(x).sum(), x)[0]
    again = copy.deepcopy(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = again.blocks(given := torch.randn(3, 5, 64, requires_grad=True))
        shapes.sum().backward()
        torch.optim.SGD(again.parameters()).step()
        state = {name: (type(one), one.shape) for name, one in again.state_dict().items()}
    assert {type(one) for one in (shapes, given.grad)} == {FakeTensor} and (shapes.shape, shapes.dtype) == (
        y.shape,
        y.dtype,
    )
    assert all(p.grad is None or p.grad.shape == p.shape for p in again.parameters())
    assert state == {name: (FakeTensor, one.shape) for name, one in model.state_dict().items()}
    again.zero_grad()
    torch.testing.assert_close((again.blocks(x), torch.autograd.grad(again.blocks(x).sum(), x)[0]), wanted)
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="FakeTensorMode is on: convert it before"):
        sparsify_(Model(), config)


@pytest.mark.parametrize("config", [Unstructured(sparsity=0.9), Sparse24(), Sparse24(frozen=False)], ids=str)
def test_values_and_the_meta_device_never_meet_in_a_packed_layer(config):
    model, x = nn.Sequential(nn.Linear(64, 128)), torch.randn(3, 64)
    sparsify_(model, config)
    layer, y, state = model[0], model(x), {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(UnsupportedError, match=r"0: \w+\(.*meta|meta.* 0: Linear24\(.*to\('meta'\)"):
        model(x.to("meta"))
    if isinstance(layer, PatternLinear):
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            pytest.raises(UnsupportedError, match=r"64, torch.float32.*63"),
        ):
            model(torch.randn(3, 63))
        return
    empty = copy.deepcopy(model).to("meta")
    made = empty(given := x.to("meta").requires_grad_())
    made.sum().backward()
    assert made.is_meta and made.shape == y.shape and given.grad.is_meta and given.grad.shape == x.shape
    assert all(p.grad is None or (p.grad.is_meta and p.grad.shape == p.shape) for p in empty.parameters())
    assert {name: one.shape for name, one in empty.state_dict().items()} == {k: v.shape for k, v in state.items()}
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        empty(x.to("meta").half())
    for use in (empty, lambda _: empty[0].load_dense(layer.to_dense())):
        with pytest.raises(UnsupportedError, match=r"^0: Linear24\(.*has no values.*to_empty.*load_state_dict"):
            use(x)
    empty.to_empty(device="cpu").load_state_dict(state)
    torch.testing.assert_close(empty(x), y)
    for use in (torch.nn.functional.embedding, torch.nn.functional.embedding_bag):
        with pytest.raises(
            UnsupportedError, match=r"^embedding.* of the weight of 0: Linear24\(.*packed.*to_dense\(\)"
        ):
            use(torch.zeros(1, 1, dtype=torch.long), layer.weight)
