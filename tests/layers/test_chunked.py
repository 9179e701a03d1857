"""A forward in chunks of the batch gives what the whole one does, joined by gloo or through a workspace."""

from unittest import mock

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.comm.all_reduce import Way
from tests.comm import fake_symm
from tests.layers.ranks import CASES, K, N, built, in_process

B = 40
CHUNKED = [case for case in CASES if case[2].keys() <= {"form"}]


def inputs():
    """W, b, x of small integers, whose products every order of summation gets exactly."""
    seed = torch.Generator().manual_seed(0)
    return tuple(torch.randint(-3, 4, shape, generator=seed).float() for shape in ((N, K), (N,), (B, K)))


def in_chunks(group, symmetric):
    """The forward in chunks is, bit for bit, that in one, and goes through the workspace as often as it should."""
    # Chunks of 16 rows were not measured: gloo adds up those, but a last one goes as the rest did.
    sizes = [rows * N * 4 for rows in (8, 24, B)]
    with fake_symm.installed({size: [Way("two-shot", 8)] for size in sizes} if symmetric else {}) as fake:
        for name, mask, changes in CHUNKED:
            w, bias, x = inputs()
            layer = built(name, mask, w, bias, **changes)
            whole = layer(x).detach()
            assert torch.equal(whole, x @ w.T + bias), (name, mask)
            for count in (1, 2, 3, 40):
                layer.chunks = count
                fake.sums.clear()
                given = x.clone().requires_grad_()
                with mock.patch.object(Group, "all_gather", autospec=True, side_effect=Group.all_gather) as gather:
                    y = layer(given)
                joins, gathers = len(fake.sums) or gather.call_count, gather.call_count
                y.sum().backward()
                assert torch.equal(y, whole) and y.stride() == whole.stride(), (name, mask, count)
                assert torch.equal(given.grad, torch.ones(B, N) @ w), (name, mask, count)
                rows = -(-B // count // 8) * 8
                # Pieces of y^T lie in no workspace.
                shared = symmetric and rows != 16 and not (layer.transposed_y and count > 1)
                assert joins == (-(-B // rows) if gathers or shared else 0), (name, mask, count)


@pytest.mark.parametrize("symmetric", [False, True], ids=["in place", "through the workspace"])
def test_chunks_give_the_same_bits_and_gradients_as_the_whole(pair, symmetric):
    pair.call(in_process, in_chunks, symmetric, seconds=600)


def test_shards_of_y_that_peers_read_are_those_that_are_sent():
    def on(group):
        w, bias, x = inputs()
        layer = built("column_parallel", "checkerboard", w, bias, group)
        layer.tune_reduce(x)
        layer.form = layer.forms[-1]
        with torch.no_grad():
            assert group._sharing(x.device, 1).holds(layer.local(x)), "it is copied nowhere"
            for layer.chunks in (1, 3, 1):
                assert torch.equal(layer(x), x @ w.T + bias)
        assert layer.form == "read"

    fake_symm.run(2, on)
