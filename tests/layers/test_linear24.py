"""A pruned linear layer packed alone: its values, its mask, its state, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from blockshock_lib import launch
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import Linear24
from blockshock_lib.layers.linear24 import nonzero_places
from blockshock_lib.params import Mask
from blockshock_lib.sparse24 import compress, cslt, masks, metadata, product
from tests.layers import linear24_tasks
from tests.sparse24 import fake_cusparselt

N, K = 64, 128


def linear(seed=0, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    return nn.Linear(K, N, dtype=dtype, **options)


def pruned(seed=0, **options):
    """A layer of which a mask was taken with zeros among the kept, and that mask."""
    plain = linear(seed, **options)
    keep = masks.make(Mask.named("random"), (N, K), seed=seed)
    with torch.no_grad():
        plain.weight[~keep] = 0
        plain.weight[torch.rand(N, K) < 0.2] = 0
    return plain, keep


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_a_pruned_layer_packed_gives_what_it_gave(rows, bias):
    plain, _ = pruned(bias=bias)
    layer, x = Linear24.from_linear(plain), torch.randn(rows, K)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer(x.view(1, rows, 1, K)), plain(x.view(1, rows, 1, K)))


def test_it_holds_nine_sixteenths_of_the_dense_bytes():
    layer = Linear24.from_linear(linear(dtype=torch.bfloat16), mask="magnitude", frozen=True)
    assert layer.hold_bytes() == {"weights": N * K * 9 // 8, "copies": 0, "pattern": 0}


@pytest.fixture
def cusparselt(monkeypatch):
    """cslt as on a GPU, by a fake; what it returns sets why the library's order is not known."""
    monkeypatch.setattr(cslt, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(torch, "_cslt_compress", fake_cusparselt.compress_in_its_order)
    one = replace(product.BACKENDS["cslt"], unsupported=cslt.unsupported)
    monkeypatch.setitem(product.BACKENDS, "cslt", one)
    return lambda reason: monkeypatch.setattr(metadata, "known", lambda device: reason)


@pytest.mark.parametrize("reason", ["", "another order"])
def test_a_frozen_layer_by_magnitude_is_packed_in_one_pass_to_the_same_bytes(cusparselt, monkeypatch, reason):
    cusparselt(reason)
    plain = linear(dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.mul_(20).round_()  # many ties and zeros
    keep, options = masks.make(Mask.named("magnitude"), (N, K), weight=plain.weight), dict(product="cslt", frozen=True)
    wanted = Linear24.from_linear(plain, mask=keep, **options).packed
    passes, magnitude = [], compress.magnitude
    monkeypatch.setattr(compress, "magnitude", lambda weight: passes.append(1) or magnitude(weight))
    monkeypatch.setitem(product.BACKENDS, "cslt", replace(product.BACKENDS["cslt"], pack=None))
    layer = Linear24.from_linear(plain, mask="magnitude", **options)
    assert len(passes) == (reason == "") and layer.packed.shape == wanted.shape == (N, K)
    assert torch.equal(layer.packed.data[0].view(torch.uint8), wanted.data[0].view(torch.uint8))
    assert layer.weight.data_ptr() == layer.packed.values.data_ptr() and not layer.weight.requires_grad
    with torch.no_grad():
        plain.weight[3, 5] = torch.inf
    with pytest.raises(ValueError, match="finite"):
        Linear24.from_linear(plain, mask="magnitude", **options)


@pytest.mark.parametrize("options", [dict(mask="magnitude"), dict(mask="random", frozen=True)])
def test_a_layer_that_needs_its_mask_or_another_is_packed_by_it(cusparselt, monkeypatch, options):
    cusparselt("")
    monkeypatch.setitem(product.BACKENDS, "cslt", replace(product.BACKENDS["cslt"], pack_magnitude=pytest.fail))
    layer = Linear24.from_linear(linear(dtype=torch.bfloat16), product="cslt", **options)
    assert layer.packed.values.count_nonzero() == N * K // 2


@pytest.mark.parametrize("mask", ["magnitude", "checkerboard", Mask.named("uniform_1010"), "given"])
def test_a_dense_layer_is_pruned_by_the_mask(mask):
    plain = linear()
    keep = masks.make(Mask.named("random"), (N, K)) if mask == "given" else None
    layer = Linear24.from_linear(plain, mask=keep if mask == "given" else mask)
    if mask != "given":
        named = Mask.named(mask) if isinstance(mask, str) else mask
        keep = masks.make(named, (N, K), weight=plain.weight)
    assert torch.equal(layer.to_linear().weight, torch.where(keep, plain.weight, 0))
    assert torch.equal(layer.to_linear().bias, plain.bias)


def test_groups_with_fewer_nonzeros_keep_their_last_zeros():
    w = torch.tensor(
        [[0, 0, 0, 0], [5, 0, 0, 0], [0, 5, 0, 0], [0, 0, 5, 0], [0, 0, 0, 5], [5, 5, 0, 0], [-0.0, 5, 0, 5]]
    )
    kept = [[0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1]]
    assert nonzero_places(w.bfloat16()).int().tolist() == kept


def test_every_way_to_have_two_nonzeros_or_fewer_keeps_two_and_all_of_them():
    keep = nonzero_places(masks.PATTERNS.float().repeat(2, 3) * (torch.rand(12, 12) < 0.6))
    assert masks.first_bad_group(keep) is None
    w = masks.PATTERNS.float().repeat(1, 3)
    assert torch.equal(nonzero_places(w), w != 0)


def test_many_rows_are_looked_at_in_parts(monkeypatch):
    plain, _ = pruned()
    whole = nonzero_places(plain.weight)
    monkeypatch.setattr("blockshock_lib.layers.linear24._CHUNK", 3 * K)
    assert torch.equal(nonzero_places(plain.weight), whole)


def test_a_weight_that_is_not_pruned_is_refused_by_its_first_bad_group():
    plain, _ = pruned()
    with torch.no_grad():
        plain.weight[5, 8:12] = torch.tensor([1.0, 0, 2, 3])
        plain.weight[9] = 1
    with pytest.raises(ValueError, match=r"row 5, columns 8 to 11 hold 3 nonzeros.*magnitude"):
        Linear24.from_linear(plain)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(UnsupportedError, match="multiples of 64"):
        Linear24.from_linear(nn.Linear(96, 64), mask="magnitude")
    with pytest.raises(ValueError, match="multiple of 4"):
        Linear24.from_linear(nn.Linear(66, 64))
    with pytest.raises(ValueError, match="not 2:4"):
        Linear24.from_linear(linear(), mask=torch.ones(N, K, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="NVIDIA"):
        Linear24.from_linear(linear(dtype=torch.bfloat16), mask="magnitude", product="cslt")
    with pytest.raises(ValueError, match=r"x is torch.float64"):
        Linear24.from_linear(linear(), mask="magnitude")(torch.randn(2, K).double())


@pytest.mark.parametrize("frozen", [True, False])
def test_its_state_is_the_dense_layers_and_loads_both_ways(frozen):
    (plain, keep), x = pruned(), torch.randn(3, K)
    layer = Linear24.from_linear(plain, mask=keep, frozen=frozen)
    state = layer.state_dict()
    assert list(state) == ["weight", "bias"] and torch.equal(state["weight"], plain.weight)
    with torch.no_grad():
        plain.weight[keep] = torch.randn(int(keep.sum()))
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer(x), plain(x))
    other = linear(1)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, plain.weight)


def test_a_state_that_the_mask_would_drop_is_refused_and_changes_nothing():
    plain, keep = pruned()
    layer = Linear24.from_linear(plain, mask=keep)
    row, column = (~keep).nonzero()[70].tolist()
    wrong = plain.weight.detach().clone()
    wrong[row, column] = 1
    with pytest.raises(RuntimeError, match=rf"W\[{row}, {column}\] is not zero"):
        layer.load_state_dict({"weight": wrong, "bias": plain.bias})
    assert torch.equal(layer.to_linear().weight, plain.weight)
    with pytest.raises(ValueError, match=r"\[64, 128\]"):
        layer.load_dense(wrong[:, :64])


@pytest.mark.parametrize("update", ["packed", "recompress"])
@pytest.mark.parametrize("mask", ["checkerboard", "magnitude"])
def test_it_trains_as_the_masked_dense_layer(mask, update):
    plain = linear(dtype=torch.float64)
    layer = Linear24.from_linear(plain, mask=mask, update=update)
    keep = masks.make(Mask.named(mask), (N, K), weight=plain.weight)
    with torch.no_grad():
        plain.weight[~keep] = 0
    plain.weight.register_hook(lambda grad: grad * keep)
    for step in range(3):
        x = torch.randn(5, K, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        grads = []
        for model in (layer, plain):
            one = x.clone().requires_grad_()
            model.zero_grad()
            model(one).square().sum().backward()
            torch.optim.SGD(model.parameters(), lr=1e-3).step()
            grads.append(one.grad)
        torch.testing.assert_close(*grads)
    torch.testing.assert_close(layer.to_linear().weight, plain.weight)
    torch.testing.assert_close(layer.bias, plain.bias)


def test_it_moves_to_another_dtype_with_its_mask():
    plain, _ = pruned()
    layer = Linear24.from_linear(plain).double()
    torch.testing.assert_close(layer(x := torch.randn(3, K).double()), plain.double()(x))


def test_ranks_of_a_process_group_each_have_their_own(tmp_path):
    assert launch.call(linear24_tasks.apart, processes=2, logs=tmp_path, seconds=60) == [True, True]
