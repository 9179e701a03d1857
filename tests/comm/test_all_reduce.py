"""The backends of an all-reduce on two gloo ranks, with a fake of symmetric memory: gloo in place of the kernels.

A function of `ctx` is a claim that both ranks check (tests/conftest.py).
"""

import weakref
from unittest import mock

import pytest
import torch

from blockshock_lib.comm import Group, all_reduce, symm
from blockshock_lib.comm.all_reduce import Way, keep, measured
from blockshock_lib.errors import UnsupportedError
from tests.comm import fake_symm

CPU = torch.device("cpu")
TIMES = {Way("one-shot", 16): 0.5, Way("nccl"): 0.75}
ONE = [Way("one-shot", 16), Way("gloo")]
SIZE = 8 * 64 * 4  # bytes of [8, 64] in fp32


def partial(rank: int) -> torch.Tensor:
    return torch.arange(8 * 64, dtype=torch.float32).view(8, 64) * (rank + 1)


def buffer(group: Group, rows: int = 8) -> torch.Tensor | None:
    return group.buffer(rows, 64, torch.float32, CPU)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))


@pytest.mark.filterwarnings("error")
def test_what_is_kept_is_found_for_as_many_ranks_the_fastest_first(folder):
    assert measured(2, CPU) == {}
    keep(1024, 2, CPU, dict(reversed(TIMES.items())))
    keep(8192, 2, CPU, {Way("nccl"): 1.0})
    keep(1024, 4, CPU, {Way("two-shot", 8): 1.0})
    assert measured(2, CPU) == {1024: TIMES, 8192: {Way("nccl"): 1.0}} and measured(8, CPU) == {}
    assert list(measured(2, CPU)[1024]) == list(TIMES)
    assert [all_reduce.size_class(n) for n in (0, 1, 600, 1000, 1024, 1025)] == [1, 1, 1024, 1024, 1024, 2048]


def test_a_choice_belongs_to_the_kernels_to_their_launch_and_to_the_blocks_that_are_tried(folder, monkeypatch):
    keep(1024, 2, CPU, TIMES)
    read = []
    monkeypatch.setattr(all_reduce.store, "short_digest", lambda *sources: read.extend(sources) or "0" * 12)
    with pytest.warns(UserWarning, match="stale: measured with source"):
        assert measured(2, CPU) == {}
    assert [path.name for path in read] == ["all_reduce.cu", "symm.py", "all_reduce.py"]
    assert all(path.exists() for path in read)


def what_is_written_into_the_buffer_is_summed_out_of_it_with_the_bias_added_once(ctx):
    group, bias, expected = Group.of(), torch.arange(64.0), partial(0) * 3 + torch.arange(64.0)
    with fake_symm.installed({SIZE: ONE}) as fake, torch.no_grad():
        place = buffer(group)
        y = group.all_reduce(place.copy_(partial(ctx.rank)), bias)
        assert torch.equal(y, expected)
        assert y.untyped_storage().data_ptr() != place.untyped_storage().data_ptr()
        assert buffer(group).data_ptr() == place.data_ptr()
        plain = partial(ctx.rank)
        assert group.all_reduce(plain, bias) is plain and torch.equal(plain, expected), "added up in place"
        assert torch.equal(group.all_reduce(place.copy_(partial(ctx.rank)), bias.double()), expected)
        # A bias of another dtype is not the kernel's to add.
        assert fake.sums == [("one_shot", SIZE, 16, True), ("one_shot", SIZE, 16, False)]


def only_measured_sizes_of_whole_packets_have_a_buffer(ctx):
    f32, b16, f64 = torch.float32, torch.bfloat16, torch.float64
    # It fits, and does with 16 bits; gloo is faster; never measured; no kernel for it; rows of 12 bytes; empty.
    asked = (8, 64, f32), (8, 128, b16), (128, 64, f32), (1024, 64, f32), (4, 64, f64), (170, 3, f32), (0, 64, f32)
    with fake_symm.installed({SIZE: ONE, 16 * SIZE: [Way("gloo"), *ONE], 1: ONE}):
        assert [Group.of().buffer(*one, CPU) is not None for one in asked] == [True, True] + [False] * 5


def a_workspace_made_in_inference_mode_serves_outside_of_it_whole_and_in_rows(ctx):
    group = Group.of()
    with fake_symm.installed({SIZE: ONE}):
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                place = buffer(group)
                for rows in (slice(0, 8), slice(0, 4)):
                    y = group.all_reduce(place[rows].copy_(partial(ctx.rank)[rows]))
                    assert torch.equal(y, partial(0)[rows] * 3)


def all_ranks_take_the_first_ones_table(ctx):
    with fake_symm.installed({SIZE: ONE} if ctx.rank == 0 else {}):
        assert buffer(Group.of()) is not None


def a_workspace_grows_but_not_in_a_graph_and_one_that_a_graph_reads_is_kept(ctx):
    group, large = Group.of(), 4 << 20
    with fake_symm.installed({SIZE: ONE, large: ONE, 4 * large: ONE}) as fake:
        assert group.shared_bytes(CPU) == 0
        buffer(group)
        one = all_reduce.reducer(group, CPU)
        first = weakref.ref(one.space)
        assert group.shared_bytes(CPU) == symm.DATA + (1 << 20)
        buffer(group, large // 256)
        assert first() is None
        capturing = mock.patch.object(all_reduce, "_capturing", lambda device: True)
        with capturing, pytest.raises(UnsupportedError, match="call the layer once before"):
            buffer(group, large // 64)
        one.captured, second, place = True, weakref.ref(one.space), one.space.view(8, 64, torch.float32)
        buffer(group, large // 64)
        assert second() is not None
        with pytest.raises(ValueError, match="as it is now"):
            one.sum(place)
        assert fake.made == [1 << 20, 4 << 20, 16 << 20]
        assert group.shared_bytes(CPU) == 2 * symm.DATA + (20 << 20), "the one that a graph reads counts too"


def a_workspace_that_one_rank_cannot_make_raises_on_all(ctx):
    for step, kind, said in (
        ("memory", torch.OutOfMemoryError, "CUDA driver error: out of memory"),
        ("handle", UnsupportedError, "no such handle"),
    ):
        memory, join = mock.MagicMock(), mock.MagicMock()
        if ctx.rank == 1:
            (memory.empty_strided_p2p if step == "memory" else join).side_effect = RuntimeError(f"{said}\nmore")
        with (
            mock.patch.multiple(symm, _SymmetricMemory=memory, symm_mem=mock.MagicMock(rendezvous=join)),
            mock.patch.object(torch.cuda, "synchronize"),
            pytest.raises(kind, match=f"^on rank 1: {said}$"),
        ):
            symm.Workspace(Group.of(), 1 << 12, CPU)


def test_on_two_ranks(claim_of_ranks, pair):
    pair.call(claim_of_ranks, seconds=600)
