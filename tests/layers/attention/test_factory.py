"""create_block_sparse_attention: what each variant computes, and that each argument reaches the result."""

import warnings

import pytest
import torch

from blockshock_lib import attention
from blockshock_lib.comm import Group, local
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.attention.factory import VARIANTS
from tests.kernels.attention import dense
from tests.layers.attention.test_parallel import LENGTH, drawn
from tests.layers.ranks import in_process

PLAIN = {"segment_lengths": [96, 352], "dilation_rates": [1, 2], "sparsity_ratio": 0.5, "block_size": 32}
NAMES = "segment_lengths", "dilation_rates"
RANKS = 2


def make(variant, group=None, **changes):
    ring = {"length": LENGTH, "group": group} if group else {}
    return attention.create_block_sparse_attention(variant, **PLAIN | ring | {"backend": "reference"} | changes)


def passed(variant, **changes):
    """[out, dQ, dK, dV] of whole sequences; of a ring from the ranks' shares."""

    def on(group):
        module = make(variant, group, **changes)
        shard, gather = (module.ranks.shard, module.ranks.gather) if group else (torch.clone, torch.clone)
        q, k, v, upstream = map(shard, drawn(groups=2))
        given = [x.requires_grad_() for x in (q, k, v)]
        out = module(*given)
        out.backward(upstream)
        return [gather(x) for x in (out.detach(), *(x.grad for x in given))]

    return local.run(RANKS, on)[1] if variant.startswith("ring") else on(None)


def base_mask(causal=True):
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    kept = attention.random(0.5, 0, 32).sees(i, j, LENGTH, LENGTH)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for length, rate in zip(PLAIN["segment_lengths"], PLAIN["dilation_rates"], strict=True):
        mask |= (i // length == j // length) & ((kept & (j // 32 % rate == rate - 1)) | (i // 32 == j // 32))
    return mask & ((j <= i) | (not causal))


@pytest.mark.parametrize("causal", [True, False])
def test_base_sees_every_rth_block_of_its_segments(causal):
    *given, _ = drawn(groups=2)
    right = dense.attention(*given, base_mask(causal), 8**-0.5)[0]
    torch.testing.assert_close(make("base", causal=causal)(*given), right)


def test_dilated_is_longnets_with_thinned_segments():
    *given, _ = drawn(groups=2)
    pattern = attention.causal() & (attention.random(0.5, 0, 32) | attention.block_diagonal(32))
    right = attention.dilated_attention(*given, [96, 352], [1, 2], pattern=pattern, block=32)
    torch.testing.assert_close(make("dilated")(*given), right)
    whole = make("dilated", sparsity_ratio=1.0)(*given)
    torch.testing.assert_close(whole, attention.dilated_attention(*given, [96, 352], [1, 2]))


@pytest.mark.parametrize("variant", ["base", "dilated"])
@pytest.mark.parametrize("changes", [{}, {"causal": False, "dilation_rates": [1, 3]}], ids=str)
def test_a_ring_computes_what_one_rank_does(variant, changes):
    ring = {"base": "ring", "dilated": "ring_dilated"}[variant]
    torch.testing.assert_close(passed(ring, **changes), passed(variant, **changes), atol=1e-10, rtol=0)


def test_dilated_over_ranks_runs_on_dense_kernels_where_all_blocks_are_kept():
    made = passed("ring_dilated", sparsity_ratio=1.0, backend="sdpa")
    torch.testing.assert_close(made, passed("dilated", sparsity_ratio=1.0), atol=1e-10, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_argument_changes_the_values(variant):
    seen = [passed(variant)[0]]
    for changes in (
        {"segment_lengths": [64, 352]},
        {"dilation_rates": [1, 3]},
        {"sparsity_ratio": 0.2},
        {"block_size": 64, "length": LENGTH} if variant.startswith("ring") else {"block_size": 64},
        {"causal": False},
        {"seed": 3},
    ):
        seen.append(passed(variant, **changes)[0])
        assert all((seen[-1] - other).abs().max() > 1e-3 for other in seen[:-1]), changes


def test_variants_differ_and_the_ratio_is_the_share_of_blocks():
    assert (passed("base")[0] - passed("dilated")[0]).abs().max() > 1e-3
    options = {"segment_lengths": [8192], "dilation_rates": [1], "causal": False}
    for ratio in (0.05, 0.5, 1.0):
        lists = make("base", sparsity_ratio=ratio, **options).pattern.lists(8192, block=32)
        assert lists.block_density == pytest.approx(ratio + (1 - ratio) / 256, abs=0.005)


def test_projections_make_it_a_layer():
    made = []
    for heads in (2, 4):
        torch.manual_seed(0)
        made.append(make("base", width=32, heads=heads))
    x = torch.randn(2, LENGTH, 32)
    q, k, v = made[0].qkv(x).view(2, LENGTH, 3, 2, 16).permute(2, 0, 3, 1, 4)
    right = made[0].out(make("base")(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(made[0](x), right)
    assert (made[1](x) - right).abs().max() > 1e-3


def compressed(group):
    whole = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = {}
    for variant, density in (("dilated", None), ("ring_dilated", None), ("ring_dilated", 0.01)):
        torch.manual_seed(0)
        ring = group if variant.startswith("ring") else None
        module = make(variant, ring, width=32, heads=4, gradient_compression=density).double()
        ddp = module.distributed() if variant.startswith("ring") else module
        x = module.ranks.shard(whole, 1) if variant.startswith("ring") else whole
        for step in range(3):  # the first two are summed whole
            ddp.zero_grad()
            ddp(x).square().sum().backward()
            grads[variant, density, step] = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    right = grads["dilated", None, 2] / group.world_size
    for key, grad in grads.items():
        if key[0] != "dilated" and (key[1] is None or key[2] < 2):
            torch.testing.assert_close(grad, right, atol=1e-10, rtol=1e-10)
    assert 0 < (grads["ring_dilated", 0.01, 2] != 0).sum() <= 2 * round(0.01 * len(right))


def test_over_two_processes_gradients_are_the_whole_sequences_and_compression_sends_the_largest(pair):
    pair.call(in_process, compressed, seconds=600)


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("rings", {}, "unknown variant 'rings'.*did you mean 'ring'"),
        ("base", {"length": 330}, "these alone, take the whole length"),
        ("dilated", {"group": Group(), "length": LENGTH}, "these alone, take the whole length"),
        ("ring", {"length": None}, "these alone, take the whole length"),
        ("base", {"dilation_rates": [1]}, "as many positive segment lengths"),
        ("base", {"sparsity_ratio": 1.5}, "a density lies between 0 and 1"),
        ("base", {"width": 32}, "given together"),
        ("base", {"width": 30, "heads": 4}, "a multiple of heads"),
        ("base", {"gradient_compression": 0.1}, "needs width and heads"),
        ("base", {"gradient_compression": 7.0, "width": 32, "heads": 4}, "gradient_compression lies in"),
        ("base", {"width": 0, "heads": 4}, "width is a positive whole number, not 0"),
        ("base", {"width": 32, "heads": 0}, "heads is a positive whole number, not 0"),
        ("base", {"length": 0}, "these alone, take the whole length"),
        ("ring", {"length": 0}, "length is a positive whole number, not 0"),
        *((variant, {"device": "cpu"}, "nothing of variant") for variant in ("base", "dilated")),
    ],
)
def test_what_has_no_meaning_is_refused(variant, changes, words):
    with pytest.raises(ValueError, match=words):
        make(variant, **{"group": Group()} | changes if variant == "ring" else changes)


@pytest.mark.parametrize("variant", ["base", "dilated"])
def test_projections_lie_on_the_device(variant):
    module = make(variant, width=32, heads=4, device="meta")
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    with pytest.raises(RuntimeError, match="nowhere"):
        make(variant, width=32, heads=4, device="nowhere")


def test_a_call_that_does_not_fit_the_projections_is_refused():
    x = torch.randn(1, LENGTH, 32)
    for module, given in ((make("base", width=32, heads=4), (x, x, x)), (make("base"), (x[None],))):
        with pytest.raises(ValueError, match="is called with x alone, one without with q, k and v"):
            module(*given)


@pytest.mark.parametrize(("variant", "size", "block"), [("dilated", [256, 1024], 128), ("base", [64, 32], 32)])
def test_a_ratio_that_no_segment_is_long_enough_for_is_told(variant, size, block):
    with pytest.warns(UserWarning, match=r"sparsity_ratio 0.5 takes (none|all) of the blocks beside the diagonal"):
        make(variant, segment_lengths=size, dilation_rates=[1, 4], block_size=block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(variant, segment_lengths=[256, 1024], dilation_rates=[1, 4], block_size=32)  # that of docs/attention.md
        make(variant, segment_lengths=size, dilation_rates=[1, 4], block_size=block, sparsity_ratio=1.0)


def test_ranks_with_other_pairs_are_told_so_where_their_patterns_are_equal():
    each = ([64, 64], [1, 1]), ([64], [1])
    with pytest.raises(UnsupportedError, match="rank 1 was given another segment_lengths and dilation_rates than"):
        local.run(2, lambda group: make("ring_dilated", group, **dict(zip(NAMES, each[group.rank], strict=True))))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_backend_the_device_and_the_length_are_used(variant):
    with pytest.raises(ValueError, match="unknown backend 'flax'"):
        passed(variant, backend="flax")
    if variant.startswith("ring"):
        with pytest.raises(RuntimeError, match="nowhere"):
            passed(variant, device="nowhere")
        with pytest.raises(ValueError, match="rank 0 holds 250 positions"):
            make(variant, Group(), length=250)(*drawn(groups=2)[:3])
