"""A model is made sparse as planned, wholly or not at all, and made dense again."""

import copy
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from blockshock_lib import BlockSparse, Linear24, Sparse24, Unstructured, dense_, fake_sparsify_, sparsify_
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import masks, tune
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.layers.gpt import model as gpt
from blockshock_lib.layers.sparsify import plan
from tests.layers.sparsify.models import Conv1D, Model, same, state

BLOCK = ["q", "k", "up", "down"]
ALL = [f"blocks.{i}.{name}" for i in (0, 1) for name in BLOCK]
TOKENS = torch.arange(30).view(2, 15)


def test_a_model_is_pruned_by_magnitude_in_place_and_its_report_says_what_became_of_each_layer():
    model, dense = Model().eval(), Model().eval()
    report = sparsify_(model, Sparse24())
    why = "it shares a parameter with embed: give it one of its own first"
    assert report.converted == ALL and report.refused == {"head": why}
    for name, module in dense.named_modules():
        if name in ALL:
            weight = module.weight.detach()
            weight = (weight.t() if isinstance(module, Conv1D) else weight).contiguous()
            weight = torch.where(masks.make(Mask.named("magnitude"), tuple(weight.shape), weight=weight), weight, 0)
            module.weight = nn.Parameter(weight.t() if isinstance(module, Conv1D) else weight)
            layer = model.get_submodule(name)
            assert type(layer) is Linear24 and layer.path == name and not layer.training
    torch.testing.assert_close(model(TOKENS), dense(TOKENS))
    weights = sum(model.get_submodule(name).in_features * model.get_submodule(name).out_features for name in ALL)
    biases = sum(model.get_submodule(name).bias is not None and model.get_submodule(name).out_features for name in ALL)
    # The oracle's format: half of the values, and half a byte of metadata for four weights.
    assert report.nbytes == (4 * (weights + biases), 2 * weights + weights // 8 + 4 * biases)
    lines = str(report).splitlines()
    assert lines[0].startswith("8 of 9 layers converted, 0.19 MiB before, 0.10 MiB after") and len(lines) == 10
    assert lines[3].split() == ["blocks.0.up", "Conv1D", "128x64", "0.03", "MiB", "->", "0.02", "MiB"]


def test_made_dense_again_each_layer_is_of_its_old_kind_with_zeros_where_it_was_pruned():
    model, old = Model(), Model()
    report = sparsify_(model, Sparse24())
    y = model(TOKENS)
    model.again = model.blocks[0].q
    sparse, report = report, dense_(model)
    assert report.nbytes == sparse.nbytes[::-1]
    assert report.converted == ALL and model.again is model.blocks[0].q
    assert [type(m) for n, m in model.named_modules() if n in ALL] == [type(old.get_submodule(n)) for n in ALL]
    torch.testing.assert_close(model(TOKENS), y)
    del model.again
    assert model.state_dict().keys() == old.state_dict().keys()
    for name, value in model.state_dict().items():
        kept = value != 0
        assert torch.equal(value[kept], old.state_dict()[name][kept])
        assert kept.float().mean() == 0.5 or name.endswith(("bias", "embed.weight", "head.weight")), name
    with pytest.raises(UnsupportedError, match="no layer of this model is sparse"):
        dense_(model)


def test_what_is_pruned_already_is_packed_as_given_and_else_the_group_is_named():
    model = Model()
    sparsify_(model, Sparse24(), "blocks.0.*")
    dense_(model)
    y = model(TOKENS)
    report = sparsify_(model, Sparse24("given"))
    assert report.converted == ALL[:4] and set(report.refused) == {*ALL[4:], "head"}
    assert "the weight is not pruned 2:4: row 0, columns 0 to 3 hold 4 nonzeros" in report.refused["blocks.1.up"]
    torch.testing.assert_close(model(TOKENS), y)
    report = sparsify_(model, Sparse24())
    assert report.converted == ALL[4:] and "it is packed or sharded already" in report.refused["blocks.0.k"]


def test_frozen_layers_have_no_gradient_and_others_train():
    for frozen in (True, False):
        model = Model()
        sparsify_(model, Sparse24(frozen=frozen), lambda name, module: isinstance(module, Conv1D))
        model(TOKENS).sum().backward()
        layer = model.blocks[0].up
        assert layer.frozen is frozen and (layer.weight.grad is None) is frozen


def test_what_was_frozen_stays_so_and_an_optimizer_of_before_is_refused():
    model = Model()
    model.blocks[0].up.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    sparsify_(model, Sparse24(frozen=False), lambda name, module: isinstance(module, Conv1D))
    assert not model.blocks[0].up.weight.requires_grad and model.blocks[0].up.bias.requires_grad
    model(TOKENS).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"holds the parameters that blocks\.0\.\w+ had before"):
            optimizer.step()
    model = nn.Sequential(nn.Linear(64, 64))
    old, optimizer = model[0], torch.optim.SGD(model.parameters())
    sparsify_(model, Sparse24(frozen=False))
    model[0] = old
    optimizer.step()


def planted():
    """(why it is left, the layer) for each kind of layer that cannot be converted."""
    hooked, patched, pruned, normed = (nn.Linear(64, 64) for _ in range(4))
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x
    prune.l1_unstructured(pruned, "weight", 0.5)
    parametrizations.weight_norm(normed)
    watched, odd, conv = nn.Linear(64, 64), nn.Linear(64, 64), Conv1D(64, 64)
    watched.bias.register_hook(lambda grad: grad)
    odd.weight.data[3, 4] = torch.nan
    conv.forward = lambda x: x
    quantized = nn.Linear(64, 64)
    quantized.weight = nn.Parameter(quantized.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    other = type("QuantLinear", (nn.Module,), {})()
    yield "multiples of 64, not 64x96", nn.Linear(96, 64)
    yield "hooks (_forward_hooks)", hooked
    yield "only an nn.Linear with nn.Linear's own forward", patched
    yield "made anew in each pass", pruned
    yield "made anew in each pass", normed
    yield "its bias has hooks", watched
    yield "not finite", odd
    yield "it holds its weight as [K, N]", conv
    yield "quantized, torch.float8_e4m3fn", quantized
    yield "only an nn.Linear with", other
    yield "on the meta device: load it first", nn.Linear(64, 64, device="meta")
    yield "UninitializedParameter", nn.LazyLinear(64)
    yield "nn.MultiheadAttention reads this weight", nn.MultiheadAttention(64, 2).out_proj
    yield "its model reads this weight", gpt.MLP(gpt.GPTConfig(64, 2, 64, 8)).out


def test_each_layer_that_cannot_be_converted_is_left_and_told_why():
    reasons, layers = zip(*planted(), strict=True)
    model = nn.ModuleList([*layers, nn.Linear(64, 64)])
    model.append(model[-1])
    model.append(nn.Linear(64, 64))
    report = sparsify_(model, Sparse24())
    assert report.converted == [str(len(model) - 1)] and list(report.refused) == list(map(str, range(len(layers) + 1)))
    for number, reason in enumerate((*reasons, f"used twice, as {len(layers)} and {len(layers) + 1}")):
        assert reason in report.refused[str(number)], number
    assert all(model[number] is layer for number, layer in enumerate(layers))


def test_a_model_of_which_nothing_is_taken_or_nothing_can_be_is_refused():
    model = Model()
    before = state(model)
    for kind, words, given, config, which in (
        (ValueError, r"no linear layer of the model is taken by filter='blocks.\*.v'", model, Sparse24(), "blocks.*.v"),
        (ValueError, "no linear layer", nn.Sequential(nn.ReLU()), Sparse24(), None),
        (UnsupportedError, "none of 1 layers can be converted; head: it shares", model, Sparse24(), "head"),
        (UnsupportedError, "none of 9.*blocks.0.q: .*NVIDIA", model, Sparse24(product="cslt"), None),
        (UnsupportedError, "converted; the model: it is the whole model", nn.Linear(64, 64), Sparse24(), None),
    ):
        with pytest.raises(kind, match=words):
            sparsify_(given, config, which)
    assert same(model, before)
    for options, words in (({"method": "magnitud"}, "did you mean 'magnitude'"), ({"product": "x"}, "allowed: auto")):
        with pytest.raises(ValueError, match=words):
            Sparse24(**options)


def test_a_model_inside_distributed_data_parallel_is_refused(monkeypatch):
    wrapper = type("Wrapper", (nn.Module,), {})
    monkeypatch.setattr(plan, "DistributedDataParallel", wrapper)
    model = wrapper()
    model.module = Model()
    with pytest.raises(UnsupportedError, match="wrap it afterwards"):
        sparsify_(model, Sparse24())


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_conversion_that_is_interrupted_leaves_every_layer_as_it_was(error):
    model = Model()
    before, layer = state(model), Sparse24.layer

    def fails(config, *given):
        fails.left -= 1
        if not fails.left:
            raise error("midway")
        return layer(config, *given)

    fails.left = 6
    with mock.patch.object(Sparse24, "layer", fails), pytest.raises(error):
        sparsify_(model, Sparse24())
    assert fails.left == 0 and same(model, before)
    sparsify_(model, Sparse24())
    before = state(model)
    broken = mock.patch.object(Linear24, "to_dense", side_effect=[torch.ones(64, 64), error("midway")])
    with broken, pytest.raises(error):
        dense_(model)
    assert same(model, before)


def test_the_expected_time_is_what_was_tuned_here_for_the_padded_batch_and_else_none(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    model = Model()
    report = sparsify_(model, Sparse24())
    assert report.expected(5) == {}  # nothing is tuned on a CPU
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(tune, "versions", lambda device: {"torch": "1"})
    on_gpu = type(report)(tuple(replace(row, device=torch.device("cuda")) for row in report.rows))
    problem = {"N": 128, "K": 64, "B": 8, "dtype": "float32", "gpu": "a GPU"}
    tune.STORE.keep(problem, {"torch": "1"}, {Setting(1): 0.25, Setting(2): 0.5})
    assert on_gpu.expected(5) == {"blocks.0.up": 0.25, "blocks.1.up": 0.25} and on_gpu.expected(9) == {}
    other = sparsify_(Model(), Unstructured(sparsity=0.5))
    other = type(report)(tuple(replace(row, device=torch.device("cuda")) for row in other.rows))
    assert other.converted == ALL and other.expected(5) == {}  # it is not multiplied as 2:4


@pytest.mark.parametrize("convert", [sparsify_, fake_sparsify_])
@pytest.mark.parametrize("config", [Sparse24(), Unstructured(sparsity=0.5), BlockSparse(block=16, sparsity=0.5)])
def test_a_transformers_layer_in_eval_mode_calls_its_sparse_layers(convert, config):
    """It reads the weights of layers without hooks by itself."""
    model = nn.TransformerEncoderLayer(128, 2, 256, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(2, 3, 128, dtype=torch.float64)
    convert(model, config)
    with torch.no_grad():
        read = model(x)
    torch.testing.assert_close(read, model(x.requires_grad_()))
    with torch.no_grad():
        dense_(model)
        torch.testing.assert_close(model(x), read)
    assert not model.linear1._forward_pre_hooks


@pytest.mark.parametrize("config", [Sparse24(), Sparse24(frozen=False), BlockSparse(block=16, sparsity=0.5), None])
def test_made_dense_again_a_model_trains_what_it_trained_and_an_optimizer_of_before_is_refused(config):
    model = Model()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].k.bias.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    convert, optimizers = sparsify_ if config else fake_sparsify_, [torch.optim.SGD(model.parameters())]
    convert(model, config or Sparse24(), "blocks.*")
    optimizers.append(torch.optim.SGD(model.parameters()))
    dense_(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    model(TOKENS).sum().backward()
    for optimizer in optimizers[: 1 if isinstance(config, BlockSparse) else 2]:  # whose layers have no parameters
        with pytest.raises(UnsupportedError, match=r"holds the parameters that blocks\.\d\.\w+ had before"):
            optimizer.step()


@pytest.mark.parametrize("convert", [sparsify_, fake_sparsify_])
def test_hooks_of_a_sparse_layer_are_not_lost_without_a_word(convert):
    model = Model()
    convert(model, Sparse24(), "blocks.*")
    handle, before = model.blocks[1].k.register_forward_hook(lambda *_: None), state(model)
    with pytest.raises(UnsupportedError, match=r"blocks.1.k: it has hooks \(_forward_hooks\)"):
        dense_(model)
    assert same(model, before)
    handle.remove()
    dense_(model)


def test_what_a_new_layer_would_lose_of_a_linear_leaves_it_dense():
    class Named(nn.Linear):
        def norm(self):
            return self.weight.norm()

    scaled, buffered, parent = (nn.Linear(64, 64) for _ in range(3))
    scaled.scale, parent.child = nn.Parameter(torch.ones(1)), nn.Linear(64, 64)
    buffered.register_buffer("seen", torch.zeros(1), persistent=False)
    for convert in (sparsify_, fake_sparsify_):
        model = nn.Sequential(*map(copy.deepcopy, (Named(64, 64), scaled, buffered, parent, nn.Linear(64, 64))))
        report = convert(model, Sparse24())
        assert report.converted == ["3.child", "4"]
        for name, words in (("0", "it is a Named, and"), ("1", "and scale"), ("2", "and seen"), ("3", "and child")):
            assert words in report.refused[name]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.router, self.place = nn.Parameter(torch.ones(8, 128, 64)), nn.Linear(64, 64), None
        self.token, self.conv = nn.Parameter(torch.ones(1, 64, 64)), nn.Conv1d(64, 64, 32)


def test_the_report_names_what_is_linear_and_no_nn_linear():
    model = nn.ModuleDict({"experts": Experts(), "quantized": nn.Sequential(nn.Linear(64, 64))})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model["quantized"] = torch.ao.quantization.quantize_dynamic(model["quantized"], {nn.Linear})
    report = sparsify_(model, Sparse24())
    assert report.converted == ["experts.router"] and report.refused.keys() == {"experts.up", "quantized.0"}
    assert report.refused["experts.up"] == "it is weights in one parameter of Experts, and no nn.Linear"
    assert "only an nn.Linear" in report.refused["quantized.0"]
    assert "experts.up      Parameter 8x128x64  left: it is weights" in str(report)
    assert sparsify_(Model(), Sparse24(), "blocks.*").converted == ALL


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_was_not_trained_is_not_of_the_dense_layer_either(name, frozen):
    plain = nn.Linear(64, 64)
    getattr(plain, name).requires_grad_(False)
    layer = Linear24.from_linear(plain, mask="magnitude", frozen=frozen)
    dense_(model := nn.Sequential(layer))
    for dense in (layer.to_linear(), model[0]):
        assert [key for key, parameter in dense.named_parameters() if not parameter.requires_grad] == [name]
    sparsify_(packed := nn.Sequential(plain), Unstructured(sparsity=0.5))
    dense = packed[0].to_linear()
    assert [key for key, parameter in dense.named_parameters() if not parameter.requires_grad] == [name]
    assert dense.bias.data_ptr() != packed[0].bias.data_ptr(), "training it must not train the packed one"


def test_a_weight_that_is_trained_and_that_a_module_outside_of_the_model_holds_too_is_tied():
    model, outside, dead = Model(), nn.Linear(64, 64), nn.Linear(64, 64)
    outside.weight, dead.weight, dead.itself = model.blocks[0].q.weight, model.blocks[1].q.weight, dead
    del dead
    report = sparsify_(model, Sparse24(frozen=False))
    assert "another module holds the weight" in report.refused["blocks.0.q"] and "blocks.1.q" in report.converted


def test_parameters_over_one_storage_are_tied():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    report = sparsify_(model, Sparse24())
    assert report.converted == ["2"] and "shares a parameter with 1" in report.refused["0"]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("made", [False, True])
def test_under_inference_mode_a_model_of_before_is_trained_afterwards_and_one_of_its_own_is_converted(frozen, made):
    with torch.inference_mode(made):
        model = nn.Sequential(nn.Linear(64, 64))
    with torch.inference_mode():
        sparsify_(model, Sparse24(frozen=frozen))
        y = model(x := torch.randn(3, 64))
        dense_(model)
        torch.testing.assert_close(model(x), y)
    if not made:
        model(torch.randn(3, 64)).sum().backward()
        assert model[0].weight.grad.any()
