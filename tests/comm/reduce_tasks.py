"""What the ranks of test_all_reduce.py and test_tuning.py run; a spawned process imports it by name."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from blockshock_lib.comm import Group, all_reduce, choices, symm, tuning
from blockshock_lib.comm.choices import Way
from blockshock_lib.errors import UnsupportedError
from tests.comm import fake_symm

CPU = torch.device("cpu")
ONE = [Way("one-shot", 16), Way("gloo")]
SIZE = 8 * 64 * 4  # bytes of [8, 64] in fp32


def partial(rank: int, rows: int = 8, columns: int = 64) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) * (rank + 1)


def without_a_table(ctx):
    """On a CPU nothing but gloo is there, and no tensor is asked to lie anywhere."""
    group = Group.of()
    found = group.buffer(8, 64, torch.float32, CPU), list(group.reductions(partial(ctx.rank)))
    group.tune(SIZE, CPU)
    one = all_reduce.reducer(group, CPU)
    return *found, one.unsupported("one-shot"), one.unsupported("nccl"), one.unsupported("gloo"), one.table


def through_the_workspace(ctx):
    """A partial result that was written into the buffer, with a bias, and what it leaves alone."""
    group, bias = Group.of(), torch.arange(64.0)
    with fake_symm.installed({SIZE: ONE}) as fake, torch.no_grad():
        place = group.buffer(8, 64, torch.float32, CPU)
        place.copy_(partial(ctx.rank))
        y = group.all_reduce(place, bias)
        again = group.buffer(8, 64, torch.float32, CPU)
        plain = partial(ctx.rank)
        same = group.all_reduce(plain, bias)
        odd = group.all_reduce(place.copy_(partial(ctx.rank)), bias.double())
        expected = partial(0) * 3 + bias
        return {
            "right": torch.equal(y, expected) and torch.equal(odd, expected),
            "y is no view of the workspace": y.untyped_storage().data_ptr() != place.untyped_storage().data_ptr(),
            "the next buffer is the same memory": again.data_ptr() == place.data_ptr(),
            "a plain tensor is added up in place": same is plain and torch.equal(same, expected),
            "sums": list(fake.sums),
        }


def in_and_out_of_inference_mode(ctx):
    """A workspace that was made in inference mode is written outside of it, whole and in rows, and in it again."""
    group, seen = Group.of(), []
    with fake_symm.installed({SIZE: ONE}):
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                place = group.buffer(8, 64, torch.float32, CPU)
                for rows in (slice(0, 8), slice(0, 4)):
                    y = group.all_reduce(place[rows].copy_(partial(ctx.rank)[rows]))
                    seen.append(torch.equal(y, partial(0)[rows] * 3))
    return seen


def turns(ctx):
    """A rank takes its turn alone before the group's first sum, and its stream's after it."""
    group, taken = Group.of(), []
    with (
        fake_symm.installed({SIZE: ONE}),
        mock.patch.object(all_reduce.Reducer, "take_turn", lambda self: taken.append(1)),
    ):
        if ctx.rank == 0:
            with mock.patch.object(all_reduce, "_make", side_effect=AssertionError("this is a collective")):
                group.take_turn(CPU)
        before = len(taken)
        group.buffer(8, 64, torch.float32, CPU)
        taken.clear()
        group.take_turn(CPU)
        return before, len(taken)


def refused_shapes(ctx):
    """Which partial results have a buffer: those of a measured size whose rows are whole packets."""
    group = Group.of()
    with fake_symm.installed({SIZE: ONE, 16 * SIZE: [Way("gloo"), *ONE]}):
        asked = {
            "fits": (8, 64, torch.float32),
            "as large, of 16 bits": (8, 128, torch.bfloat16),
            "gloo is faster": (128, 64, torch.float32),
            "never measured": (1024, 64, torch.float32),
            "float64": (4, 64, torch.float64),
            "rows of 12 bytes": (170, 3, torch.float32),
            "empty": (0, 64, torch.float32),
        }
        return {name: group.buffer(*one, CPU) is not None for name, one in asked.items()}


def rank_0_decides(ctx):
    """Each rank has another table on disk: rank 0's holds."""
    group = Group.of()
    with fake_symm.installed({SIZE: ONE} if ctx.rank == 0 else {}):
        return group.buffer(8, 64, torch.float32, CPU) is not None


def growing(ctx):
    """What becomes of a workspace that is too small, with and without a captured graph that reads it."""
    group, large = Group.of(), 4 << 20
    with fake_symm.installed({SIZE: ONE, large: ONE, 4 * large: ONE}) as fake:
        shared = [group.shared_bytes(CPU)]
        group.buffer(8, 64, torch.float32, CPU)
        one = all_reduce.reducer(group, CPU)
        first = weakref.ref(one.space)
        shared.append(group.shared_bytes(CPU))
        group.buffer(large // 256, 64, torch.float32, CPU)
        gone = first() is None
        one._capturing = lambda: True
        try:
            group.buffer(large // 64, 64, torch.float32, CPU)
            said = ""
        except UnsupportedError as error:
            said = str(error)
        one._capturing, one.captured = (lambda: False), True
        second = weakref.ref(one.space)
        place = one.space.view(8, 64, torch.float32)
        group.buffer(large // 64, 64, torch.float32, CPU)
        try:
            one.sum(place)
            stale = ""
        except ValueError as error:
            stale = str(error)
        shared.append(group.shared_bytes(CPU))
        seen = {"made": list(fake.made), "gone": gone, "said": said, "kept": second() is not None, "stale": stale}
        return seen | {"shared": shared}


def freed_with_its_group(ctx):
    with fake_symm.installed({SIZE: ONE}):
        handle = dist.new_group()
        group = Group.of(handle)
        group.buffer(8, 64, torch.float32, CPU)
        space = weakref.ref(all_reduce.reducer(group, CPU).space)
        held = space() is not None
        dist.destroy_process_group(handle)
        del handle
        gc.collect()
        return held, space() is None


def turn_by_turn(seconds):
    """A clock that finds every call as long as `seconds` says, in order, and makes each once."""

    def clock(calls, repeats):
        for call in calls:
            call()
        return [[s, s, s] for s, _ in zip(seconds, calls, strict=False)]

    return clock


def planted(ctx):
    """A wrong candidate that is fastest, wrong on one rank only, and one that turns wrong after it was timed."""
    group, size = Group.of(), 1 << 12
    times = {"right": 3.0, "slow": 5.0, "wrong": 1.0, "wrong on rank 1": 1.0, "wrong later": 2.0}
    made = dict.fromkeys(times, 0)

    def candidate(name):
        def make(x):
            made[name] += 1
            off = name == "wrong" or (name == "wrong on rank 1" and ctx.rank == 1)
            off = off or (name == "wrong later" and made[name] == 3)

            def call():
                total = group.all_reduce(x.clone())
                if off:
                    total[0, 0] += 1
                return total

            return call

        return make

    def clock(calls, repeats):
        names = [name for name in times if name not in ("wrong", "wrong on rank 1")]
        assert len(calls) == len(names)
        return [[times[name] + ctx.rank] * 3 for name in names]

    found = tuning.measure(group, CPU, {Way(name): candidate(name) for name in times}, size, clock)
    return {way.backend: ms for way, ms in found.items()}


def tuned(ctx, folder):
    """What a search keeps, in the file and in use, and that it is made once."""
    os.environ["BLOCKSHOCK_CACHE"] = folder
    group = Group.of()
    searches = []

    def clock(calls, repeats):
        searches.append(len(calls))
        return turn_by_turn([9.0] * 8 + [2.0] + [9.0] * 8)(calls, repeats)

    with fake_symm.installed():
        before = group.buffer(8, 64, torch.float32, CPU) is None
        tuning.tune(group, SIZE, CPU, clock)
        tuning.tune(group, SIZE - 64, CPU, clock)
        one = all_reduce.reducer(group, CPU)
        chosen, captured = one.ways(SIZE), one.captured
        x = partial(ctx.rank)
        sums = {name: group.reductions(x)[name]().tolist() for name in group.reductions(x)}
        now = group.buffer(8, 64, torch.float32, CPU) is not None
    dist.barrier()
    expected = (partial(0) * 3).tolist()
    return {
        "before": before,
        "searches": searches,
        "chosen": chosen,
        "captured": captured,
        "sums": {name: value == expected for name, value in sums.items()},
        "now": now,
        "file": len(json.loads((Path(folder) / "all_reduce.json").read_text())["choices"]),
        "table": choices.table(2, CPU) == {SIZE: chosen},
    }


def failing_kernel(ctx, folder):
    """Our kernels cannot be compiled on one rank: all go on with the library."""
    os.environ["BLOCKSHOCK_CACHE"] = folder
    group = Group.of()

    class Broken(fake_symm.Workspace):
        def prepare(self, dtype):
            if ctx.rank == 1:
                raise UnsupportedError("no compiler here")

    with fake_symm.installed():
        all_reduce.symm.Workspace = Broken
        tuning.tune(group, SIZE, CPU, turn_by_turn([1.0]))
        one = all_reduce.reducer(group, CPU)
        return one.why, one.table, one.buffer(group, 8, 64, torch.float32), sorted(os.listdir(folder))


def raised(fn):
    try:
        fn()
    except (RuntimeError, UnsupportedError) as error:
        return type(error).__name__, str(error)
    return None


def failing_workspace(ctx):
    """One rank has no memory to share, or cannot map its peers': what every rank raises."""
    group = Group.of()

    def on_rank_1(error):
        return mock.Mock(side_effect=error if ctx.rank == 1 else lambda size, *_: torch.zeros(size, dtype=torch.uint8))

    def make(memory=None, rendezvous=None):
        allocate = SimpleNamespace(empty_strided_p2p=on_rank_1(memory))
        with (
            mock.patch.object(symm, "_SymmetricMemory", allocate if memory else mock.MagicMock()),
            mock.patch.object(symm.symm_mem, "rendezvous", on_rank_1(rendezvous) if rendezvous else mock.MagicMock()),
            mock.patch.object(torch.cuda, "synchronize"),
        ):
            return raised(lambda: symm.Workspace(group, 1 << 12, CPU))

    short = RuntimeError("CUDA driver error: out of memory\nmore")
    return make(memory=short), make(rendezvous=RuntimeError("no such handle"))


def failing_candidates(ctx):
    """One rank fails before its sum, and after it: what every rank raises."""
    group = Group.of()

    def fails(here):
        if ctx.rank == 1 and here:
            raise RuntimeError("launch failed")

    def candidate(before):
        def make(x):
            fails(before)

            def call():
                total = group.all_reduce(x.clone())
                fails(True)
                return total

            return call

        return make

    def measure(before):
        return raised(lambda: tuning.measure(group, CPU, {Way("bad"): candidate(before)}, 1 << 12, turn_by_turn([1.0])))

    return measure(True), measure(False)


def no_room(ctx, folder):
    """One rank has no memory for the workspace: all go on with the library."""
    os.environ["BLOCKSHOCK_CACHE"] = folder
    group = Group.of()

    class Short(fake_symm.Workspace):
        def __init__(self, group, nbytes, device):
            with group.together(device):
                if ctx.rank == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(group, nbytes, device)

    with fake_symm.installed():
        all_reduce.symm.Workspace = Short
        tuning.tune(group, SIZE, CPU, turn_by_turn([1.0]))
        one = all_reduce.reducer(group, CPU)
        return one.why, one.table, one.buffer(group, 8, 64, torch.float32), sorted(os.listdir(folder))


def started_anew(ctx):
    """Each way's sum after three calls without a new start, and after one."""
    group, seen = Group.of(), {}
    with fake_symm.installed({SIZE: [Way("two-shot", 16), Way("gloo")]}):
        place = group.buffer(8, 64, torch.float32, CPU).copy_(partial(ctx.rank))
        for name, one in group.reductions(place).items():
            one.reset()
            one(), one(), one()
            grown = torch.equal(one(), partial(0) * 3)
            one.reset()
            seen[name] = grown, torch.equal(one(), partial(0) * 3)
    return seen
