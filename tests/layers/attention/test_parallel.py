"""Attention over ranks equals attention on one, forward and backward, by every strategy and placement."""

import itertools
import math
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from blockshock_lib import attention
from blockshock_lib.comm import Group, local
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.attention import backends, reference
from blockshock_lib.layers import watch
from blockshock_lib.layers.attention import parallel, placement
from tests.comm import fake_symm

LENGTH = 330  # eleven blocks of 32, the last one short: they divide by no number of ranks
PATTERNS = {
    "causal": attention.causal(),
    "strided": attention.causal() & attention.strided(128, 40, 32),
    "by head": attention.by_head(
        [attention.full(), attention.random(0.2, 1, 32), attention.random(0.0), attention.window(9)]
    ),
    "documents": attention.documents([100, 1, 200, 29]),
}
OPTIONS = {"block": 32, "backend": "reference"}


def drawn(heads=4, groups=1):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, count, LENGTH, 8) for count in (heads, heads // groups, heads // groups, heads)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def whole(pattern, q, k, v, upstream):
    made = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention.sparse_attention(*made, pattern, "reference", block=32)
    return [out.detach(), *torch.autograd.grad(out, made, upstream)]


def shared(group, pattern, q, k, v, upstream, **options):
    layer = attention.ContextParallelAttention(pattern, LENGTH, group, **OPTIONS | options)
    made = [layer.shard(x).clone().requires_grad_(x.is_floating_point()) for x in (q, k, v)]
    out = layer(*made)
    out.backward(layer.shard(upstream))
    return [layer.gather(x) for x in (out, *(x.grad for x in made))]


def agree(pattern, ranks, made, run=local.run, **options):
    right = whole(pattern, *made)
    for mine in run(ranks, lambda group: shared(group, pattern, *made, **options)):
        torch.testing.assert_close(mine, right, atol=1e-10, rtol=0)


@pytest.mark.parametrize("strategy", parallel.STRATEGIES)
@pytest.mark.parametrize("name", PATTERNS)
def test_ranks_equal_one(name, strategy):
    agree(PATTERNS[name], 2, drawn(), strategy=strategy)


@pytest.mark.parametrize("strategy", parallel.STRATEGIES)
def test_a_key_that_is_no_number_is_seen_by_ranks_where_it_is_attended_and_nowhere_else(strategy):
    made = drawn()
    right, at = whole(attention.causal(), *made), LENGTH // 2
    made[1][:, :, at] = math.nan
    for mine in local.run(2, lambda group: shared(group, attention.causal(), *made, strategy=strategy)):
        for got, want in zip(mine[:2], right[:2], strict=True):  # out and dq
            torch.testing.assert_close(got[:, :, :at], want[:, :, :at], atol=1e-10, rtol=0)
        assert mine[0][:, :, at:].isnan().all()


@pytest.mark.parametrize("strategy", [*parallel.STRATEGIES, "dilated"])
def test_padding_of_no_numbers_that_the_loss_leaves_out_gives_no_gradient(strategy):
    made, at = drawn(), LENGTH - 40
    made[3][:, :, at:] = 0
    right = whole(attention.causal(), *made)
    for x in made[:3]:
        x[:, :, at:] = math.nan
    if strategy == "dilated":
        given = [x.requires_grad_() for x in made[:3]]
        out = attention.dilated_attention(*given, [LENGTH], [1])
        mine = [[out, *torch.autograd.grad(out, given, made[3])]]
    else:
        mine = local.run(2, lambda group: shared(group, attention.causal(), *made, strategy=strategy))
    for each in mine:
        for got, want in zip(each, right, strict=True):
            torch.testing.assert_close(got[:, :, :at], want[:, :, :at], atol=1e-10, rtol=0)


@pytest.mark.parametrize("where", placement.PLACEMENTS)
@pytest.mark.parametrize("strategy", ["pull", "gather"])
def test_ranks_that_read_each_other_s_memory_equal_one_and_those_that_send(strategy, where):
    options = {"strategy": strategy, "placement": where}
    agree(PATTERNS["strided"], 3, drawn(groups=2), fake_symm.run, **options)
    made = [x.bfloat16() for x in drawn()]

    def on(group):
        found = shared(group, PATTERNS["causal"], *made, **options)
        return found, [one.space.nbytes for one in getattr(group, "kept", ())]

    for (read, held), (sent, _) in zip(fake_symm.run(4, on), local.run(4, on), strict=True):
        assert held and all(map(torch.equal, read, sent))  # by the same kernels, and summed in the same order


def test_the_memory_that_peers_read_is_told_of_who_reads_alone():
    def on(group):
        told = []
        for strategy in parallel.STRATEGIES:
            layer = attention.ContextParallelAttention(
                PATTERNS["causal"], LENGTH, group, strategy, "contiguous", **OPTIONS
            )
            q, k, v = map(layer.shard, drawn()[:3])
            layer(q, k, v)
            told.append(layer.shared_bytes(k))
        return dict(zip(parallel.STRATEGIES, told, strict=True))

    # Keys and values, batch 2, 4 heads of 8 in float64: of 192 positions, of all that the second rank gives back.
    row, none = 2 * 2 * 4 * 8 * 8, dict.fromkeys(parallel.STRATEGIES, 0)
    assert fake_symm.run(2, on)[0] == none | {"gather": 192 * row, "pull": LENGTH * row} and local.run(2, on)[1] == none


class HostNeverWaits(TorchDispatchMode):
    """What a CUDA graph allows: no operator whose result the host must read."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in self.READS:
            raise RuntimeError(f"the host waits for {operator}")
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("strategy", parallel.STRATEGIES)
def test_after_its_first_call_a_cuda_graph_can_hold_it(strategy, monkeypatch):
    def apart(name):  # the kernels are not what is looked at
        def run(*given):
            with _disable_current_modes():
                return getattr(reference, name)(*given)

        return run

    row = SimpleNamespace(refuse=lambda call: "", **{name: apart(name) for name in ("attend", "forward", "backward")})
    monkeypatch.setitem(backends.BACKENDS, "apart", row)
    q, k, v, dout = drawn()

    def on(group):
        options = {"block": 32, "backend": "apart"}
        layer = attention.ContextParallelAttention(PATTERNS["by head"], LENGTH, group, strategy, **options)
        made = [layer.shard(x).requires_grad_() for x in (q, k, v)]
        step = lambda: torch.autograd.grad(layer(*made), made, layer.shard(dout))  # noqa: E731
        first = step()
        with HostNeverWaits():
            again = step()
        torch.testing.assert_close(again, first)

    (fake_symm.run if strategy == "pull" else local.run)(2, on)


def test_a_backend_that_asks_the_pattern_itself_is_told_of_the_ranks_own_heads():
    *given, _ = (x.float() for x in drawn())
    right = attention.sparse_attention(*given, PATTERNS["by head"], "reference", block=32)

    def on(group):
        layer = attention.ContextParallelAttention(
            PATTERNS["by head"], LENGTH, group, "heads", block=32, backend="flex"
        )
        return layer.gather(layer(*map(layer.shard, given)))

    torch.testing.assert_close(local.run(2, on)[1], right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("where", placement.PLACEMENTS)
@pytest.mark.parametrize("strategy", ["pull", "ring"])
def test_any_placement_on_any_number_of_ranks(strategy, where):
    agree(PATTERNS["strided"], 3, drawn(groups=2), strategy=strategy, placement=where)
    agree(PATTERNS["causal"], 5, drawn(groups=4), strategy=strategy, placement=where)
    agree(PATTERNS["strided"], 2, drawn(groups=2), strategy="heads", placement=where)


def test_pull_fetches_the_visited_blocks_alone():
    pattern = attention.causal() & attention.window(33)

    def fetched(group):
        layer = attention.ContextParallelAttention(pattern, LENGTH, group, "pull", "contiguous", **OPTIONS)
        return layer.needed[group.rank].tolist()

    assert local.run(3, fetched) == [[0, 1, 2, 3], [3, 4, 5, 6, 7], [7, 8, 9, 10]]


def test_placements_balance_work():
    def spread(pattern, where):
        lists = pattern.lists(4096, block=32)
        work = (lists.rows.full_at + lists.rows.partial_at).diff()
        held = placement.placed(lists, 4, where).blocks
        assert sorted(torch.cat(held).tolist()) == list(range(128)) and {len(each) for each in held} == {32}
        each = torch.stack([work[blocks].sum() for blocks in held]).double()
        return (each.max() / each.mean()).item()

    assert spread(PATTERNS["causal"], "contiguous") > 1.7
    for pattern in (attention.causal(), attention.documents([1000, 2000, 96, 1000]) & attention.causal()):
        assert spread(pattern, "cost") < 1.05
    assert spread(PATTERNS["causal"], "zigzag") < 1.01


@pytest.mark.parametrize(
    "pattern, name",
    [
        (attention.window(65), "contiguous"),  # as much work everywhere: the neighbours' blocks alone are needed
        (attention.causal(), "zigzag"),
        (attention.documents([1000, 2000, 96, 1000]) & attention.causal(), "cost"),
    ],
)
def test_the_placement_is_chosen_by_work_and_then_by_bytes_and_is_shown(pattern, name):
    lists = pattern.lists(4096, block=32)
    each = {one: placement.loads(lists, placement.placed(lists, 4, one)) for one in placement.PLACEMENTS}
    assert each[name][0] <= 1.05 * min(work for work, _ in each.values())
    assert all(each[name][1] <= need for work, need in each.values() if work <= each[name][0])
    layer = local.run(4, lambda group: attention.ContextParallelAttention(pattern, 4096, group, block=32))[0]
    assert f"strategy=pull, placement={name}" in repr(layer)


def test_what_ranks_visit_and_need_is_counted():
    lists = (attention.causal() & attention.window(33)).lists(LENGTH, block=32)  # 11 blocks, each with the one before
    assert placement.loads(lists, placement.placed(lists, 3, "contiguous")) == (8, 1)
    assert placement.placed(lists, 6, "auto").name != "zigzag", "11 blocks do not do for it"
    documents = (attention.documents([1000, 2000, 96, 1000]) & attention.causal()).lists(4096, block=32)
    assert placement.placed(documents, 4, "auto", "ring").name == "zigzag", "each step waits for its busiest rank"
    with pytest.raises(ValueError, match="11 blocks of 32 positions do not do for 12 ranks placed by auto"):
        placement.placed(lists, 12, "auto")


def test_shares_that_do_not_fit_are_named():
    one, given = Group(), (PATTERNS["causal"], LENGTH)
    with pytest.raises(ValueError, match="11 blocks of 32 positions do not do for 6 ranks placed by zigzag"):
        local.run(6, lambda group: attention.ContextParallelAttention(*given, group, "pull", "zigzag", **OPTIONS))
    with pytest.raises(ValueError, match="unknown strategy 'rings'"):
        attention.ContextParallelAttention(PATTERNS["causal"], LENGTH, one, "rings")
    layer = attention.ContextParallelAttention(PATTERNS["causal"], LENGTH, one, **OPTIONS)
    with pytest.raises(ValueError, match="rank 0 holds 330 positions"):
        layer(*[x[:, :, 1:] for x in drawn()[:3]])
    with pytest.raises(UnsupportedError, match="deals whole heads to 3 ranks"):
        local.run(3, lambda group: shared(group, PATTERNS["causal"], *drawn(), strategy="heads"))
    for name, words in (("flex", "no backward that takes the logsumexp"), ("sdpa", "this is a part of a sequence")):
        how = {"strategy": "ring", "backend": name}
        with pytest.raises(UnsupportedError, match=words):
            local.run(2, lambda group, how=how: shared(group, attention.full(), *drawn(), **how))


@pytest.mark.parametrize("strategy", parallel.STRATEGIES)
@pytest.mark.parametrize(
    ("change", "heads", "words"),
    [
        (lambda q, k, v: (q[:1], k, v), 1, "batches and head dimensions must be equal"),
        (lambda q, k, v: (q, k[:1], v[:1]), 1, "batches and head dimensions must be equal"),
        (lambda q, k, v: (q[:, :3], k[:, :2], v[:, :2]), 1, "q's heads a multiple of k's"),
        (lambda q, k, v: (q, k, v[..., :4]), 1, "are needed, none empty"),
        (lambda q, k, v: (q.half(), k, v), 1, "one floating dtype"),
        (lambda *x: [each.long() for each in x], 1, "one floating dtype"),
        *(
            (lambda *x: x, heads, f"a pattern of 1 batch elements and {heads} heads does not fit")
            for heads in (2, 3, 8)
        ),
    ],
)
def test_operands_that_do_not_fit_each_other_or_the_pattern_are_refused(change, heads, words, strategy):
    pattern = attention.by_head([attention.window(9 + head) for head in range(heads)])
    with pytest.raises(ValueError, match=words):
        local.run(2, lambda group: shared(group, pattern, *change(*drawn()[:3]), drawn()[3], strategy=strategy))


@pytest.mark.parametrize("strategy", parallel.STRATEGIES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.half(), "dtype"),
        (lambda x: x.bfloat16(), "dtype"),
        (lambda x: x[:1], "shape"),
        (lambda x: x[:, :2], "shape"),
        (lambda x: x[:, :, 1:], "shape"),
    ],
)
def test_ranks_that_are_given_other_operands_are_told_so_in_the_first_call_of_a_kind(change, words, strategy):
    def on(group):
        layer = attention.ContextParallelAttention(PATTERNS["causal"], LENGTH, group, strategy, **OPTIONS)
        given = [layer.shard(x) for x in drawn()[:3]]
        layer(*given)
        layer(*map(change, given)) if group.rank else layer(*given[:2], given[2][:1])

    with pytest.raises(UnsupportedError, match=f"Attention: rank 1 was given another .*{words}.* than rank 0"):
        local.run(2, on)


def test_threads_that_disagree_about_the_pattern_are_told_so():
    with pytest.raises(UnsupportedError, match="rank 1 was given another pattern than rank 0"):
        local.run(2, lambda group: attention.ContextParallelAttention(attention.window(9 + group.rank), LENGTH, group))


def test_later_calls_compare_nothing(monkeypatch):
    def on(group):
        layer = attention.ContextParallelAttention(PATTERNS["causal"], LENGTH, group, "gather", **OPTIONS)
        given = [layer.shard(x) for x in drawn()[:3]]
        layer(*given)
        return layer, given

    made = local.run(2, on)
    monkeypatch.setattr(parallel, "refuse_unequal", lambda *_, **__: pytest.fail("they met again"))

    def again(group):
        layer, given = made[group.rank]
        layer.group = group
        layer(*given)

    local.run(2, again)


def test_what_is_no_pattern_or_no_group_is_refused():
    with pytest.raises(ValueError, match=r"pattern is a Pattern.*not a NoneType"):
        local.run(2, lambda group: attention.ContextParallelAttention(None, LENGTH, group))
    with pytest.raises(ValueError, match=rf"a whole tensor has {LENGTH} positions along 2, not {LENGTH + 1}"):
        longer, causal = torch.ones(1, 1, LENGTH + 1, 8), PATTERNS["causal"]
        local.run(2, lambda group: attention.ContextParallelAttention(causal, LENGTH, group).shard(longer))
    with pytest.raises(ValueError, match=r"group is a Group of ranks.*not a NoneType"):
        attention.ContextParallelAttention(PATTERNS["causal"], LENGTH, None)


def as_a_style(ctx):
    pattern, made = attention.causal() & attention.window(40), [x.float() for x in drawn()[:3]]
    mesh = init_device_mesh("cpu", (2,))
    model = nn.ModuleDict({"attention": attention.SparseAttention(pattern, "reference", block=32)})
    right = model["attention"](*made)
    parallelize_module(model, mesh, {"attention": attention.ContextParallel(LENGTH, "ring")})
    layer = model["attention"]
    out = layer.gather(layer(*map(layer.shard, made)))
    torch.testing.assert_close(out, right)
    for strategy in ("pull", "gather"):
        layer = attention.ContextParallelAttention(pattern, LENGTH, Group.of(), strategy, **OPTIONS)
        torch.testing.assert_close(layer.gather(layer(*map(layer.shard, made))), right)
    with pytest.raises(UnsupportedError, match="shares a SparseAttention, not a Linear"):
        parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": attention.ContextParallel(LENGTH)})
    for odd in (attention.window(9 + ctx.rank), attention.documents([1000, 900 + ctx.rank, 1100 - ctx.rank])):
        with pytest.raises(UnsupportedError, match="rank 1 was given another pattern than rank 0"):
            attention.ContextParallelAttention(odd, odd.positions or LENGTH, Group.of(), **OPTIONS)
    odd = attention.documents([LENGTH - ctx.rank])  # the lists of one rank alone are refused, the other must not wait
    with pytest.raises(UnsupportedError, match="rank 1 was given another pattern than rank 0"):
        attention.ContextParallelAttention(odd, LENGTH, Group.of(), **OPTIONS)


def test_a_model_is_shared_by_a_style_on_two_real_ranks_which_may_not_disagree(pair):
    pair.call(as_a_style, seconds=600)


def heard(ctx, layer, made, what):
    """What the watch says where rank 1 does not go on until all have heard it."""
    store, said, key = dist.distributed_c10d._get_default_store(), [], f"{what} of {layer.strategy}"
    over = threading.Event()

    def hear(text, **_):
        said.append(text)
        store.set(f"{key}, rank {ctx.rank}", "")

    def together():
        return store.check([f"{key}, rank 0"])

    watch._groups.clear()
    layer(*made)

    def look():
        while not over.wait(0.1):
            watch._look()

    looking = threading.Thread(target=look)
    with mock.patch.object(watch, "warnings", SimpleNamespace(warn=hear)):
        looking.start()
        out = layer(*made) if what == "backward" else None
        while ctx.rank and not together():
            time.sleep(0.01)
        out = layer(*made) if out is None else out
        out.sum().backward()
        over.set()
        looking.join()
    return said


def passes_left_out(ctx):
    for what, strategy in itertools.product(("forward", "backward"), ("ring", "pull")):
        layer = attention.ContextParallelAttention(PATTERNS["causal"], LENGTH, Group.of(), strategy, **OPTIONS)
        made = [layer.shard(x).requires_grad_() for x in drawn()[:3]]
        said = heard(ctx, layer, made, what)
        told = f"ranks [1] of 2 have not called the {what} of ContextParallelAttention(330 positions over 2 ranks"
        assert ctx.rank or any(told in one for one in said), said


def test_a_pass_that_a_rank_does_not_make_is_said(pair):
    pair.call(passes_left_out, seconds=60)


def other_dtype_later(ctx):
    layer = attention.ContextParallelAttention(PATTERNS["causal"], LENGTH, Group.of(), "ring", **OPTIONS)
    made = [layer.shard(x) for x in drawn()[:3]]
    layer(*made)
    with (
        mock.patch.object(parallel, "refuse_unequal"),
        mock.patch.object(watch, "count") as count,
    ):
        layer._check(*(x.float() for x in made) if ctx.rank else made)
    one, other = Group.of().gather_objects(hash(count.call_args.args[2]))
    assert one != other


def test_ranks_of_another_dtype_later_are_told_apart(pair):
    pair.call(other_dtype_later, seconds=600)
