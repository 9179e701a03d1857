"""What `auto` takes: the fastest backend whose values are right. Backends and times are made up; values are real."""

import contextlib
import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib import attention
from blockshock_lib.errors import BlockShockError, UnsupportedError
from blockshock_lib.kernels.attention import backends, reference, trial, triton, tune
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.tuning.search import Found
from tests.kernels.attention.faults import FAULTS, MERGING, RARE, merging, planted

CPU = torch.device("cpu")
PATTERN = attention.causal() & attention.window(50)
HEADS = attention.by_head([attention.window(9 + head) for head in range(4)])


def call_of(size=100, dim=16, grad=True, dtype=torch.float16, pattern=PATTERN, heads=(4, 2), block=32):
    q, k, v = (torch.zeros(1, each, size, dim, dtype=dtype, requires_grad=grad) for each in (*heads, heads[1]))
    return Call(q, k, v, pattern, pattern.lists(size, block=block), 0.25)


class Times:
    """A clock: a call takes what the backend that it ran is said to take. As in a CUDA graph, the call that is timed
    must find made what it keeps of its lists.
    """

    def __init__(self, **ms):
        self.ms, self.last, self.captures = ms, "", False

    def form(self):
        if self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self

    def row(self, name, fault="", refuse=lambda call: "", **more):
        def attend(call):
            self.last = name
            call.kept(f"{name} {id(self)}", self.form)
            return planted(call, fault)

        return SimpleNamespace(refuse=refuse, attend=attend, **more)

    def timed(self, calls):
        self.captures = True
        calls[0]()
        self.captures, ms = False, self.ms[self.last]
        return contextlib.nullcontext(lambda: ms)

    def close(self):
        pass


DRAWN = functools.cache(trial.drawn)  # each truth once, not once a fault


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A GPU by name, and an empty cache."""
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(trial, "drawn", DRAWN)
    monkeypatch.setattr(tune, "gpu", lambda device: "some GPU")
    tune._kept.cache_clear()
    yield
    tune._kept.cache_clear()


def searched(rows, clock, call):
    find = lambda problem, device: Found(tuple(tune.run(rows, problem, device, clock=clock)))  # noqa: E731
    return tune.tuned(SimpleNamespace(find=find), call)


def taken(rows, call, **asked):
    tune._kept.cache_clear()  # as in another process
    return next(name for name, row in rows.items() if row is tune.auto(rows, call, **asked))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_fast_backend_with_wrong_values_is_named_and_never_chosen(fault, dtype):
    clock, call = Times(fast=1.0, slow=2.0), call_of(dtype=dtype)
    rows = {"reference": reference, "triton": triton, "fast": clock.row("fast", fault), "slow": clock.row("slow")}
    with pytest.warns(UserWarning, match="'fast' gives wrong values and is never chosen"):
        assert searched(rows, clock, call) == {"slow": 2.0}
    assert taken(rows, call) == "slow"


def partial_blocks(call):
    return "it has no partial blocks" if len(call.lists.rows.partial) else ""


def dense_alone(call):
    return "" if call.pattern.rules == attention.causal().rules else "it is dense"


@pytest.mark.parametrize("heads", [(16, 16), (32, 8)])
@pytest.mark.parametrize("fault", RARE)
def test_what_is_wrong_of_few_heads_or_calls_alone_is_named_and_never_chosen(fault, heads):
    clock, call = Times(fast=1.0, slow=2.0), call_of(heads=heads)
    rows = {"reference": reference, "triton": triton, "fast": clock.row("fast", fault), "slow": clock.row("slow")}
    with pytest.warns(UserWarning, match="'fast' gives wrong values and is never chosen"):
        assert searched(rows, clock, call) == {"slow": 2.0}
    assert taken(rows, call) == "slow"


@pytest.mark.parametrize("fault", ["last head", "dK of the last head", "scale of the head dimension"])
@pytest.mark.parametrize(
    ("pattern", "refuse"), [(attention.block_diagonal(64), partial_blocks), (attention.causal(), dense_alone)]
)
def test_the_same_of_backends_that_take_fewer_patterns(fault, pattern, refuse):
    clock, call = Times(fast=1.0, slow=2.0), call_of(128, pattern=pattern, heads=(16, 8))
    rows = {"fast": clock.row("fast", fault, refuse), "slow": clock.row("slow", "", refuse)}
    with pytest.warns(UserWarning, match="'fast' gives wrong values and is never chosen"):
        assert searched({"reference": reference, "triton": triton} | rows, clock, call) == {"slow": 2.0}


def test_a_backend_that_says_that_it_leaks_a_nan_is_given_none():
    clock, call = Times(fast=1.0), call_of()
    rows = {"reference": reference, "triton": triton, "fast": clock.row("fast", "0 times NaN", LEAKS=True)}
    assert searched(rows, clock, call) == {"fast": 1.0}


@pytest.mark.parametrize(
    ("fault", "asked", "words"),
    [
        ("asked for it alone: lse in base 2", {"return_lse": True}, "the logsumexp"),
        ("asked for it alone: no gradient", {"return_lse": True, "lse_grad": True}, "the gradient of the logsumexp"),
        ("list of the first head", {"lists": HEADS.lists(100, block=32)}, "heads that see other keys than others"),
        ("NaN as gradient of lse", {"return_lse": True, "lse_grad": True}, "the gradient of the logsumexp"),
    ],
)
def test_what_is_wrong_of_some_calls_alone_is_named_and_not_chosen_for_them(fault, asked, words):
    clock, call = Times(fast=1.0, slow=2.0), call_of()
    rows = {"reference": reference, "triton": triton, "fast": clock.row("fast", fault), "slow": clock.row("slow")}
    with pytest.warns(UserWarning, match=f"'fast' gives wrong values of {words}, and is not chosen where"):
        assert list(searched(rows, clock, call)) == ["fast", "slow"]
    assert taken(rows, call) == "fast" and taken(rows, replace(call, **asked)) == "slow"


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("fault", MERGING)
def test_parts_are_merged_by_no_backend_whose_forward_or_backward_is_wrong(fault, grad):
    clock, call = Times(fast=1.0, slow=2.0), call_of(grad=grad, heads=(16, 8))
    rows = {"reference": reference, "triton": triton, "fast": clock.row("fast", **merging(fault))}
    rows["slow"] = clock.row("slow", **merging(""))
    if wrong := grad or fault == "lse in base 2":
        with pytest.warns(UserWarning, match="'fast' gives wrong values of the parts of keys that are merged"):
            searched(rows, clock, call)
    else:
        searched(rows, clock, call)
    assert taken(rows, call) == "fast" and taken(rows, call, merge=True) == ("slow" if wrong else "fast")


@pytest.mark.parametrize("pattern", [attention.full(), attention.random(0.3, 1, 32), HEADS])
@pytest.mark.parametrize("size", [1, 32, 100, 256])
@pytest.mark.parametrize("grad", [True, False])
def test_what_is_right_passes_every_call(pattern, size, grad, recwarn):
    clock, call = Times(one=1.0), call_of(size, grad=grad, pattern=pattern)
    rows = {"reference": reference, "triton": triton, "one": clock.row("one", **merging(""))}
    tried = tune.run(rows, tune.problem_of(call) | {"call": trial.packed(call)}, CPU, clock=clock)
    assert len(tried) == 5 and all(each.right for each in tried), tried


def test_the_fastest_right_one_is_kept_for_problems_that_are_near():
    clock, call = Times(fast=1.0, slow=2.0), call_of()
    rows = {"reference": reference, "triton": triton, "slow": clock.row("slow"), "fast": clock.row("fast")}
    assert taken(rows, call) == "reference"  # nothing is kept yet
    assert list(searched(rows, clock, call)) == ["fast", "slow"]
    assert taken(rows, call) == taken(rows, call_of(size=300)) == "fast"
    assert taken(rows, call_of(dim=32)) == taken(rows, call_of(grad=False)) == "reference"
    rows["fast"].refuse = lambda call: "not today"
    assert taken(rows, call) == "slow"


def test_a_backend_that_compiles_for_longer_than_the_search_may_take_is_tried_all_the_same():
    clock, now = Times(slow=3.0, late=1.0), itertools.count(step=100.0)
    rows = {"reference": reference} | {name: clock.row(name) for name in ("slow", "late")}
    rows["triton"] = SimpleNamespace(refuse=lambda call: "none here")
    asked = dict(clock=clock, seconds=5.0, now=lambda: next(now))
    find = lambda problem, device: Found(tuple(tune.run(rows, problem, device, **asked)))  # noqa: E731
    assert list(tune.tuned(SimpleNamespace(find=find), call_of())) == ["late", "slow"]
    asked["seconds"] = 0
    tried = tune.run(rows, tune.problem_of(call_of()) | {"call": trial.packed(call_of())}, CPU, **asked)
    assert [each.way.name for each in tried if isinstance(each.way, tune.Backend)] == ["slow"]


def test_auto_takes_no_kernel_that_cannot_give_the_gradient_of_a_logsumexp_that_is_asked_for(monkeypatch):
    call = call_of()
    rows = {"reference": reference, "sdpa": Times().row("sdpa")}
    monkeypatch.setattr(tune, "nearest", lambda call: {tune.Backend("sdpa"): 1.0})
    assert tune.auto(rows, call) is rows["sdpa"] and tune.auto(rows, replace(call, lse_grad=True)) is reference
    with torch.no_grad():
        assert tune.auto(rows, replace(call, lse_grad=True)) is rows["sdpa"]


def test_where_nothing_is_right_nothing_is_chosen_but_the_reference():
    clock, call = Times(triton=1.0), call_of()
    rows = {"reference": reference, "triton": triton, "flex": clock.row("flex", "zero dQ")}
    rows["fa4"] = clock.row("fa4", "it raises")
    with pytest.warns(UserWarning, match="'flex' gives wrong"), pytest.raises(BlockShockError, match="no backend"):
        searched(rows, clock, call)
    assert [type(way) for way in tune.nearest(call)] == [tune.Wrong] and taken(rows, call) == "reference"


def test_the_triton_kernels_run_as_they_were_cut_fastest_of_what_is_right(monkeypatch):
    clock, call = Times(flex=1.5), call_of()
    wrong, best = (32, 32, 4, 2), (32, 32, 4, 3)
    seen = []

    def attend(call, cuts=triton.UNTUNED):
        seen.append(cuts)
        clock.last, sizes = tuple(cuts.values()), [cut[1:] for cut in cuts.values()]
        clock.ms[clock.last] = 0.5 if wrong in sizes else 1.0 if best in sizes else 2.0
        return planted(call, "zero dQ" if ("dq", *wrong) in clock.last else "")

    def uncut(run):
        return lambda *given, cuts: run(*given)

    own = {name: uncut(run) for name, run in merging("").items()}
    rows = {"reference": reference, "triton": SimpleNamespace(refuse=lambda call: "", attend=attend, **own)}
    rows["flex"] = clock.row("flex")
    assert {("dq", *wrong), ("dq", *best)} <= set(triton.candidates(16, 32)["dq"])
    assert not tune.is_kept(call) and list(searched(rows, clock, call)) == ["triton", "flex"]
    assert tune.is_kept(call) and not tune.is_kept(call_of(size=300))
    monkeypatch.setitem(backends.BACKENDS, "triton", rows["triton"])
    for row in (tune.auto(rows, call), backends.chosen("triton", call)):
        row.attend(call)
        assert seen[-1]["dq"][1:] == best and seen[-1]["forward"][1:] == wrong  # which is wrong of dq alone
        assert backends.name_of(row) == "triton"


@pytest.mark.parametrize("grad", [False, True])
def test_a_training_call_is_tuned_without_gradients_too(grad, monkeypatch):
    clock, call = Times(slow=2.0, fast=1.0), call_of(grad=grad)
    rows = {"reference": reference, "triton": triton} | {name: clock.row(name) for name in ("slow", "fast")}
    monkeypatch.setattr(backends, "tuned", lambda call: searched(rows, clock, call))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    assert attention.tune(call.q, call.k, call.v, PATTERN, block=32) == {"fast": 1.0, "slow": 2.0}
    assert tune.is_kept(call)
    with torch.no_grad():
        assert tune.is_kept(call) and taken(rows, call) == "fast"


@pytest.mark.long
def test_the_real_search_answers_from_its_own_process_and_needs_a_gpu():
    call = call_of(grad=False)
    found = backends.SEARCH.find(tune.problem_of(call) | {"call": tune.trial.packed(call)}, CPU)
    backends.SEARCH.close()
    assert not found.crashes and found.trial(tune.Backend("flex")).refused  # no clock runs without a GPU
    with pytest.raises(UnsupportedError, match="tuning measures GPUs"):
        attention.tune(call.q, call.k, call.v, PATTERN)
