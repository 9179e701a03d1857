"""The hybrid transformer block over ranks equals the block of one rank, forward and backward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from blockshock_lib import attention, clip_grad_norm_
from blockshock_lib.comm import Group, local
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.attention import hybrid
from tests.layers.ranks import in_process

WIDTH, HEADS, LENGTH = 256, 8, 70
BY_HEAD = attention.causal() & attention.by_head(
    [attention.full(), attention.window(9), attention.random(0.5, 1, 32), attention.block_diagonal(20)] * 2
)
CUT = {"q": 0, "k": 0, "v": 0, "up": 0, "out": 1, "down": 1}  # the dimension of W that the ranks share


def whole(kv_heads=HEADS, pattern=BY_HEAD, **options):
    torch.manual_seed(0)
    options = {"backend": "reference", "block": 32} | options
    return hybrid.HybridTransformerBlock(WIDTH, HEADS, pattern, kv_heads=kv_heads, **options).double()


def drawn():
    return torch.randn(2, 2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def passed(block):
    """(y, dX, gradients by name) of one pass."""
    x, upstream = drawn()
    x = x.clone().requires_grad_()
    y = block(x)
    y.backward(upstream)
    grads = {}
    for name, parameter in block.named_parameters():
        layer = block.get_submodule(name.rpartition(".")[0])
        sparse = name.endswith("weight") and isinstance(layer, hybrid.BlockShockLinear)
        grads[name] = (layer.part_dense(parameter.grad), layer) if sparse else parameter.grad
    return y.detach(), x.grad, grads


def share(name, grad, group):
    layer, kind = name.split(".")
    dim = CUT.get(layer)
    if dim is None or (dim and kind == "bias"):
        return grad
    return grad.chunk(group.world_size, dim)[group.rank]


def agree(group, mlp="dense", kv_heads=HEADS, change=lambda block: None):
    block = whole(kv_heads)
    share_of = hybrid.HybridTransformerBlock.of(block, group, mlp)
    change(share_of)
    right, mine = passed(block), passed(share_of)
    close = {"atol": 1e-10, "rtol": 0}
    torch.testing.assert_close(mine[:2], right[:2], **close)
    assert mine[2].keys() == right[2].keys() and len(right[2]) == 16
    for name, grad in mine[2].items():
        wanted = right[2][name]
        if isinstance(grad, tuple):  # a term of Block-Shock: what its mask keeps of this rank's columns
            grad, layer = grad
            wanted = layer.part_dense(layer.from_dense(wanted))
        elif mlp == "dense" or not name.startswith(("up", "down")):
            wanted = share(name, wanted, group)
        torch.testing.assert_close(grad, wanted, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mlp", hybrid.MLPS)
@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (4, 8), (8, 8)])
def test_ranks_equal_one(ranks, kv_heads, mlp):
    local.run(ranks, lambda group: agree(group, mlp, kv_heads))


def test_two_processes_equal_one_and_refuse_other_weights_or_patterns(pair):
    for mlp in hybrid.MLPS:
        pair.call(in_process, agree, mlp, seconds=600)
    pair.call(in_process, others, seconds=600)


def others(group):
    mask = torch.zeros(300, 300, dtype=torch.bool)
    mask[150, 150 + group.rank] = True
    odd = attention.documents([1000, 900 + group.rank, 1100 - group.rank]), attention.from_mask(mask)
    for seed, pattern, words in ((group.rank, BY_HEAD, "q.weight"), (0, odd[0], "pattern"), (0, odd[1], "pattern")):
        torch.manual_seed(seed)
        with pytest.raises(UnsupportedError, match=f"rank 1 was given another .*{words}"):
            hybrid.HybridTransformerBlock(WIDTH, HEADS, pattern, group)


@pytest.mark.long
def test_one_rank_passes_gradcheck():
    torch.manual_seed(0)
    block = hybrid.HybridTransformerBlock(8, 2, attention.causal(), hidden=8, backend="reference", block=32).double()
    names, given = zip(*block.named_parameters(), strict=True)
    x = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    call = lambda x, *each: torch.func.functional_call(block, dict(zip(names, each, strict=True)), x)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, *given))


def compiled(group):
    agree(group, change=lambda block: block.compile())
    agree(Group(), change=lambda block: block.compile())


@pytest.mark.long
def test_it_compiles_on_one_rank_and_on_two(pair):
    pair.call(in_process, compiled, seconds=600)


def test_each_rank_holds_its_share_of_the_preset():
    block = hybrid.HybridTransformerBlock(**attention.HYBRID_1024, pattern=attention.causal())
    mine = hybrid.HybridTransformerBlock.of(block, Group(1, 4))
    shapes = {name: tuple(parameter.shape) for name, parameter in mine.named_parameters()}
    assert shapes["q.weight"] == shapes["k.weight"] == (256, 1024) and shapes["out.weight"] == (1024, 256)
    assert shapes["up.weight"] == (1024, 1024) and shapes["down.weight"] == (1024, 1024)
    assert shapes["up.bias"] == shapes["down.bias"] == (1024,)
    assert torch.equal(mine.q.weight, block.q.weight[256:512])


def test_what_does_not_divide_is_named():
    make = hybrid.HybridTransformerBlock
    for words, arguments in (
        ("6 heads do not divide by 4 ranks", {"width": 48, "heads": 6, "group": Group(0, 4)}),
        ("2 kv_heads do not divide by 4 ranks", {"width": 64, "heads": 8, "kv_heads": 2, "group": Group(0, 4)}),
        ("50 hidden features do not divide by 4 ranks", {"width": 64, "heads": 8, "hidden": 50, "group": Group(0, 4)}),
        ("width 50 must be a multiple of 8 heads", {"width": 50, "heads": 8}),
        ("and these of 3 kv_heads", {"width": 64, "heads": 8, "kv_heads": 3}),
        ("of 0 kv_heads; none of them", {"width": 64, "heads": 8, "kv_heads": 0}),
        ("and of 0 hidden features may be below 1", {"width": 64, "heads": 8, "hidden": 0}),
        ("of 0 heads", {"width": 64, "heads": 0}),
        ("pattern is a Pattern.*not a str", {"width": 64, "heads": 8, "pattern": "causal"}),
        ("unknown mlp 'sparse'", {"width": 64, "heads": 8, "mlp": "sparse"}),
    ):
        with pytest.raises(ValueError, match=words):
            make(**{"pattern": attention.causal()} | arguments)
    with pytest.raises(ValueError, match="a pattern of 8 heads does not fit 4 heads"):
        make(64, 4, BY_HEAD)
    with pytest.raises(ValueError, match="a dense block of one rank, not of 2"):
        make.of(make.of(whole(), Group(0, 2)), Group())


def clipped(ctx):
    group, dense = Group.of(), whole()
    block = hybrid.HybridTransformerBlock.of(dense, group)
    for each in (dense, block):
        passed(each)
    norm = clip_grad_norm_(block, 0.5)
    right = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
    torch.testing.assert_close(norm, right.double())
    torch.testing.assert_close(block.q.bias.grad, dense.q.bias.grad.chunk(2)[ctx.rank])
    torch.testing.assert_close(clip_grad_norm_(copied := copy.deepcopy(block), 0.5), 0 * norm)  # it has no gradients
    passed(copied)
    torch.testing.assert_close(clip_grad_norm_(copied, 0.5), norm)
    with pytest.raises(UnsupportedError, match="use blockshock_lib"):
        torch.nn.utils.clip_grad_norm_(block.parameters(), 0.5)
    with pytest.raises(UnsupportedError, match="DistributedDataParallel over ranks"):
        DistributedDataParallel(nn.Sequential(block))


def test_it_is_clipped_as_the_whole_block_and_what_takes_a_share_for_the_whole_is_refused(pair):
    pair.call(clipped, seconds=600)
