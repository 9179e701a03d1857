"""A pruned linear layer packed alone, in all that torch does with modules: as the dense layer, or refused by name."""

import gc
import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.backends import Backend
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import BlockShockLinear, Linear24, RowParallelLinear
from blockshock_lib.layers.linear24 import nonzero_places
from tests.layers.ranks import B, K, N, draw

updates = pytest.mark.parametrize(
    "options", [{"update": "packed"}, {"update": "recompress"}, {"frozen": True}], ids=str
)


def linear(**options):
    torch.manual_seed(0)
    return nn.Linear(K, N, **options)


def sparse(**options):
    """A layer of which a mask was taken with zeros among the kept, and that mask."""
    plain, keep = linear(**options), masks.make(Mask.named("random"), (N, K))
    with torch.no_grad():
        plain.weight[~keep] = 0
        plain.weight[torch.rand(N, K) < 0.2] = 0
    return plain, keep


def pruned(**options):
    """A Linear24, and the dense layer that it is, whose gradient keeps to the mask."""
    layer = Linear24.from_linear(linear(), mask="transposable_random", **options)
    plain, keep = layer.to_linear(), layer.pattern.mask()
    plain.weight.register_hook(lambda grad: grad * keep)
    return layer, plain


def same(layer, plain):
    """y, dX, weight and bias are the dense layer's."""
    found = []
    for one in (layer, plain):
        x = draw(B, K, dtype=plain.weight.dtype).requires_grad_()
        y = one(x)
        found.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_a_pruned_layer_packed_gives_what_it_gave(rows, bias):
    plain, _ = sparse(bias=bias)
    layer, x = Linear24.from_linear(plain), torch.randn(rows, K)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer(x.view(1, rows, 1, K)), plain(x.view(1, rows, 1, K)))
    torch.testing.assert_close(layer.double()(x.double()), plain.double()(x.double()))  # moved with its mask


@pytest.mark.parametrize("mask", ["magnitude", "checkerboard", "random"])
def test_a_dense_layer_is_pruned_by_the_mask_as_a_name_a_mask_or_a_tensor(mask):
    plain = linear()
    keep = masks.make(Mask.named(mask), (N, K), weight=plain.weight)
    for given in (mask, Mask.named(mask), keep):
        again = Linear24.from_linear(plain, mask=given).to_linear()
        assert torch.equal(again.weight, torch.where(keep, plain.weight, 0)) and torch.equal(again.bias, plain.bias)


def test_every_way_to_have_two_nonzeros_or_fewer_keeps_two_and_all_of_them():
    with mock.patch.object(masks, "parts", return_value=[slice(0, 8), slice(8, 11)]) as parts:
        keep = nonzero_places(masks.PATTERNS.float().repeat(2, 3)[:11] * (torch.rand(11, 12) < 0.6))
    assert parts.call_count == 2 and masks.first_bad_group(keep) is None  # rows in any number, by parts
    assert torch.equal(nonzero_places(w := masks.PATTERNS.float().repeat(2, 3)), w != 0)


def test_what_cannot_be_packed_is_refused_as_is_what_is_not_pruned_by_its_first_bad_group():
    dense, _ = sparse()
    with torch.no_grad():
        dense.weight[5, 8:12] = torch.tensor([1.0, 0, 2, 3])
        dense.weight[9] = 1
    for kind, words, plain, options in (
        (ValueError, r"row 5, columns 8 to 11 hold 3 nonzeros.*magnitude", dense, {}),
        (UnsupportedError, "multiples of 64", nn.Linear(96, 64), {"mask": "magnitude"}),
        (ValueError, "a multiple of 4 input features", nn.Linear(66, 64), {}),
        (ValueError, "not 2:4", linear(), {"mask": torch.ones(N, K, dtype=torch.bool)}),
        (UnsupportedError, "NVIDIA", linear(dtype=torch.bfloat16), {"mask": "magnitude", "product": "cslt"}),
    ):
        with pytest.raises(kind, match=words):
            Linear24.from_linear(plain, **options)


def test_a_state_that_the_mask_would_drop_is_refused_and_changes_nothing():
    plain, keep = sparse()
    layer = Linear24.from_linear(plain, mask=keep)
    row, column = (~keep).nonzero()[70].tolist()
    wrong = plain.weight.detach().clone()
    wrong[row, column] = 1
    with pytest.raises(RuntimeError, match=rf"W\[{row}, {column}\] is not zero"):
        layer.load_state_dict({"weight": wrong, "bias": plain.bias})
    assert torch.equal(layer.to_linear().weight, plain.weight)
    with pytest.raises(ValueError, match=r"\[64, 128\]"):
        layer.load_dense(wrong[:, :64])


def fake():
    with FakeTensorMode():
        return nn.Linear(K, N)


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("MultiheadAttention reads", lambda: nn.MultiheadAttention(K, 2).out_proj),
        ("own forward", lambda: Scaled(K, K)),
        ("only an nn.Linear", lambda: nn.Bilinear(K, K, K)),
        ("UninitializedParameter", lambda: nn.LazyLinear(N)),
        ("FakeTensor", fake),
        ("meta device", lambda: nn.Linear(K, K, device="meta")),
    ],
)
@pytest.mark.parametrize("kind", [Linear24, BlockShockLinear, RowParallelLinear])
def test_a_layer_is_made_of_a_plain_linear_alone_and_what_else_is_given_is_named(kind, words, make):
    with pytest.raises(UnsupportedError, match=words):
        kind.from_linear(make(), mask="random")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_is_tied_as_long_as_another_module_that_holds_it_lives(name, request):
    request.addfinalizer(gc.enable)
    gc.disable()
    head, other = nn.Linear(K, N), nn.Linear(K, N)
    setattr(head, name, getattr(other, name))
    other.itself = [other]  # when it is dead it waits in this cycle
    with pytest.raises(
        UnsupportedError, match=rf"another module holds the {name} of this Linear\(.*linear.{name} = nn.P"
    ):
        Linear24.from_linear(head, mask="random")
    del other
    others = [torch.optim.SGD(head.parameters()), dict(head.named_parameters())]
    assert Linear24.from_linear(head, mask="random") and others


@updates
def test_a_weight_that_is_tied_later_is_refused_and_not_pruned(options):
    (layer, _), embedding = pruned(**options), nn.Embedding(N, K)
    before = embedding.weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"cannot be tied.*load_dense"):
        layer.weight = embedding.weight
    layer(draw(B, K))
    assert torch.equal(embedding.weight, before)
    layer.weight = nn.Parameter(2 * layer.weight.detach())
    torch.testing.assert_close(layer(draw(B, K)), layer.to_linear()(draw(B, K)))


@updates
def test_writes_through_data_or_by_another_process_and_parameters_that_torch_swaps_are_seen(options):
    layer, plain = pruned(**options)
    same(layer.share_memory(), plain)
    layer.weight.detach().numpy()[:] *= 2  # as another process does in Hogwild
    plain.weight.data.mul_(2)
    same(layer, plain)
    for one in (layer, plain):
        one.weight.data.mul_(2)
        one(draw(B, K))
        one.weight.data.mul_(2)
    same(layer, plain)
    swapping = torch.__future__.set_swap_module_params_on_conversion
    swapping(True)
    try:
        layer.double(), plain.double()
    finally:
        swapping(False)
    same(layer, plain)
    other = nn.Parameter(layer.weight.detach() * 3, requires_grad=layer.weight.requires_grad)
    torch.utils.swap_tensors(layer.weight, other)
    with torch.no_grad():
        plain.weight.mul_(3)
    same(layer, plain)


@updates
def test_hooks_run_before_a_state_is_loaded_and_an_assigned_state_brings_its_dtype(options):
    layer, plain = pruned(**options)
    for module in (layer, plain):
        module.register_load_state_dict_pre_hook(
            lambda module, state, *_: (
                state.update(weight=state.pop("old.weight") * 2) if "old.weight" in state else None
            )
        )
    old = {"old.weight": plain.weight.detach(), "bias": plain.bias.detach()}
    for module in (layer, plain):
        module.load_state_dict(dict(old))
    same(layer, plain)
    state = {name: value.detach().double() for name, value in plain.state_dict().items()}
    for module in (layer, plain):
        module.load_state_dict(state, assign=True)
        assert module.weight.dtype == module.bias.dtype == torch.float64
    assert layer.weight.requires_grad != options.get("frozen", False)
    layer.load_state_dict(state)
    same(layer, plain)


HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook")


@pytest.mark.parametrize("kind", [*HOOKS, "state_dict_post_hook"])
def test_a_linear_with_hooks_of_its_own_is_refused_and_one_whose_weight_a_hook_makes_is_not(kind):
    plain, normed = linear(), nn.utils.spectral_norm(linear())
    handle = getattr(plain, f"register_{kind}")(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"this Linear\(.*: it has hooks \(_\w+\), which a new layer would lose"):
        Linear24.from_linear(plain, mask="random")
    handle.remove()
    assert Linear24.from_linear(plain, mask="random") and Linear24.from_linear(normed, mask="random")


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_each_kind_is_called_also_one_of_all_modules(kind, everywhere):
    layer, _ = pruned()
    place, name = (nn.modules.module, f"register_module_{kind}") if everywhere else (layer, f"register_{kind}")
    seen = []
    handle = getattr(place, name)(lambda *_: seen.append(1))
    layer(draw(B, K).requires_grad_()).sum().backward()
    handle.remove()
    layer(draw(B, K).requires_grad_()).sum().backward()
    assert seen == [1]
    layer._forward_pre_hooks.clear()  # as some tools do before they set their own
    layer.register_forward_pre_hook(lambda *_: seen.append(2))
    layer(draw(B, K))
    assert seen == [1, 2]


@pytest.mark.parametrize("backend", ["", "eager", "aot_eager"])
def test_a_gradient_of_the_gradient_is_refused(backend):
    (layer, _), x = pruned(), draw(B, K).requires_grad_()
    layer = torch.compile(layer, backend=backend) if backend else layer
    with pytest.raises((UnsupportedError, RuntimeError), match=r"gradient of|double"):
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        dx.square().sum().backward()


def test_a_weight_that_was_refreshed_by_hand_after_it_moved_is_still_packed_anew():
    (layer, plain), x = pruned(), draw(B, K, dtype=torch.float64)
    layer.double()
    with torch.no_grad():
        layer.refresh()
        torch.testing.assert_close(layer(x), plain.double()(x))


# What a frozen weight survives: an interrupted look at its mask, other threads, and its first backward


def frozen(mask="random"):
    return Linear24.from_linear(linear(), mask=mask, frozen=True)


@pytest.mark.parametrize("interruption", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("look", ["state_dict", "to_dense", "double"])
def test_an_interrupted_first_look_at_a_frozen_layers_mask_leaves_its_weight(interruption, look):
    layer, x = frozen(), draw(3, K)
    before = layer(x)
    with mock.patch.object(Backend, "unpacked", side_effect=interruption), pytest.raises(interruption):
        getattr(layer, look)()
        layer(x.double())
    layer.float()
    assert torch.equal(layer(x), before)
    torch.testing.assert_close(layer.to_linear()(x), before)


def test_a_forward_beside_the_first_look_at_the_mask_reads_the_weight(monkeypatch):
    layer, x = frozen(), draw(3, K)
    before, looked, seen = layer(x), Backend.unpacked, []

    def beside(self, *packed):
        thread = threading.Thread(target=lambda: seen.append(layer(x)))
        thread.start()
        thread.join()
        return looked(self, *packed)

    monkeypatch.setattr(Backend, "unpacked", beside)
    layer.state_dict()
    assert len(seen) == 1 and torch.equal(seen[0], before)


def test_a_transposed_copy_that_was_interrupted_is_not_kept():
    layer, dy = frozen("checkerboard"), draw(3, N)
    interrupted = mock.patch.object(type(layer.pattern), "transpose_values", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        layer.local_dgrad(dy)
    torch.testing.assert_close(layer.local_dgrad(dy), dy @ layer.to_dense())


def test_dx_of_a_frozen_layer_used_twice_is_made_the_same_way_before_and_after_its_first_backward():
    keep = torch.zeros(N, K, dtype=torch.bool)
    keep.view(N // 4, 4, K // 4, 4)[:, :2, :, :2] = keep.view(N // 4, 4, K // 4, 4)[:, 2:, :, 2:] = True
    for mask, by in ((keep, "2:4"), (Mask.named("checkerboard"), "2:4"), (Mask.named("magnitude"), "dense masked")):
        layer, found = frozen(mask), []
        for _ in range(2):
            found.append((layer.dgrad_by, layer.hold_bytes()["copies"] > 0))
            x = draw(3, K).requires_grad_()
            (layer(x) + layer(2 * x)).sum().backward()
            torch.testing.assert_close(x.grad, 3 * layer.to_dense().sum(0).expand(3, K))
            held = layer.store.packed_t
            layer.prepare(always=True)  # as where a graph is captured
            assert layer.store.packed_t is held
        assert found == [(by, False), (by, by == "2:4")]


def test_a_weight_that_functional_call_lends_is_not_written():
    layer, (weight, bias) = pruned(update="recompress")[0], linear().parameters()
    before = weight.clone()
    torch.func.functional_call(layer, {"weight": weight, "bias": bias}, draw(B, K))
    assert torch.equal(weight, before)


def test_a_weight_that_torch_sets_past_the_layer_is_its_own():
    layer, _ = pruned(update="recompress")
    state = {name: each.clone() for name, each in layer.state_dict().items()}
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)
    layer.weight.data.fill_(1)
    layer.prepare()
    assert (layer.weight == 0).any(), "holes"
