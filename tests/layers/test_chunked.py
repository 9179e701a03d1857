"""A forward in chunks of the batch gives what the whole one does, joined by gloo or through a workspace."""

from dataclasses import replace

import pytest
import torch

from blockshock_lib import launch
from blockshock_lib.comm import Group
from blockshock_lib.layers import BlockShockLinear, RowParallelLinear, chunked
from blockshock_lib.params import Mask
from tests.layers import chunk_tasks as tasks

CASES = [
    ("row_parallel", "checkerboard", {}),
    ("column_parallel", "checkerboard", {}),
    ("masked_dense", "random", {}),
    ("permuted_dense", "checkerboard", {}),
    ("permuted_dense", "uniform_1010", {}),
    ("block_shock", "checkerboard", {}),
    ("block_shock_recompress", "random", {}),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with launch.WorkerGroup(2, logs=tmp_path_factory.mktemp("logs")) as group:
        yield group


@pytest.mark.parametrize("symmetric", [False, True], ids=["in place", "through the workspace"])
def test_chunks_give_the_same_bits_and_gradients_as_the_whole(pair, symmetric):
    assert pair.call(tasks.chunked, CASES, (1, 2, 3, 40), symmetric, seconds=60) == [[], []]


def test_a_layer_has_the_sizes_measured_that_it_adds_up(pair):
    whole, parts = [tasks.B * tasks.N * 4], [24 * tasks.N * 4, 16 * tasks.N * 4]
    for asked in pair.call(tasks.reduced_sizes, seconds=60):
        for name in ("row_parallel", "block_shock"):
            assert asked[name, 1] == whole and asked[name, 2] == parts
        for name in ("column_parallel", "dense"):
            assert asked[name, 1] == asked[name, 2] == []


@pytest.mark.parametrize(
    ("batch", "count", "sizes"),
    [
        (40, 1, [40]),
        (40, 2, [24, 16]),
        (48, 2, [24]),
        (7, 4, [7]),
        (40, 40, [8]),
        (4096, 4, [1024]),
        (4100, 4, [1032, 1004]),
    ],
)
def test_chunks_are_multiples_of_eight_rows(batch, count, sizes):
    layer = RowParallelLinear(torch.ones(64, 64), group=Group(0, 2))
    layer.chunks = count
    assert [len(x) for x in chunked.sizes(layer, torch.ones(batch, 64))] == sizes


def test_the_product_is_tuned_for_every_size_of_a_chunk():
    tuned = []
    layer = BlockShockLinear(torch.ones(64, 64), mask=Mask.named("checkerboard"), group=Group(0, 2))
    layer.backend = replace(layer.backend, tune=lambda x, packed: tuned.append(len(x)))
    layer.chunks = 2
    layer.tune(torch.ones(40, 64))
    assert tuned == [24, 16]


def test_a_layer_alone_is_never_cut():
    layer = RowParallelLinear(torch.ones(64, 64), group=Group())
    layer.chunks = 2
    x = torch.ones(40, 64)
    assert chunked.sizes(layer, x)[0] is x and torch.equal(layer(x), x @ layer.weight.T)
