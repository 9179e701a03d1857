"""Numerical faults to plant in correct code; each takes pytest's monkeypatch and breaks one thing.

The gate must catch every one of them. None is a caricature: each is a mistake that this project, or one it learned
from, has made or could make.
"""

import dataclasses

import torch

from blockshock_lib.kernels.sparse24 import backends, packing
from blockshock_lib.layers import block_shock, parts
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.dense import ColumnParallelLinear, PermutedDenseLinear, TermParallelLinear
from blockshock_lib.layers.sharded import ShardedLinear


def _reduce(patch, change):
    patch.setattr(ShardedLinear, "reduce", lambda self, partial, out=None: change(self, partial))


def bias_dropped(patch):
    _reduce(patch, lambda layer, partial: layer.group.all_reduce(partial))


def bias_added_by_every_rank(patch):
    _reduce(patch, lambda layer, partial: layer.group.all_reduce(partial, layer.bias * layer.group.world_size))


def both_ranks_hold_term_0(patch):
    patch.setattr(block_shock, "term_mask", lambda keep, part: keep[part.rows, part.cols])


def terms_swapped_on_one_shard(patch):
    right = TermParallelLinear.part.__func__

    def part(cls, rank, world_size, n, k):
        found = right(cls, rank, world_size, n, k)
        return parts.Part(1, found.rows, found.cols) if rank == 0 else found

    patch.setattr(BlockShockLinear, "part", classmethod(part))


def all_reduce_missing(patch):
    _reduce(patch, lambda layer, partial: partial + layer.bias)


def all_reduce_counted_twice(patch):
    _reduce(patch, lambda layer, partial: layer.group.all_reduce(partial * 2, layer.bias))


def shards_gathered_in_reverse(patch):
    def reduce(layer, partial, out=None):
        return torch.cat(layer.group.all_gather(partial).chunk(layer.group.world_size)[::-1]).t()

    patch.setattr(ColumnParallelLinear, "reduce", reduce)


def packed_copy_is_stale(patch):
    pack = packing.pack

    def stale(weight, mask):
        # One SGD step behind: a relative change of about one percent.
        return pack((weight.float() + 0.01 * weight.float().roll(1, 0)).to(weight.dtype), mask)

    _patch_backend(patch, pack=stale)


def one_metadata_byte_transposed(patch):
    pack = packing.pack

    def swapped(weight, mask):
        packed = pack(weight, mask)
        metadata = packed.data[1]
        # The two groups of one byte in each row change places.
        metadata[:, 0] = (metadata[:, 0] >> 4) | (metadata[:, 0] << 4)
        return packed

    _patch_backend(patch, pack=swapped)


def one_product_is_nan(patch):
    _spoil(patch, lambda y: y[-1, -1].fill_(float("nan")))


def last_row_of_outputs_never_written(patch):
    _spoil(patch, lambda y: y[-1].zero_())


def one_output_slightly_off(patch):
    _spoil(patch, lambda y: y[0, 0].add_(0.05 * y.float().square().mean().sqrt()))


def _spoil(patch, change):
    linear = packing.linear

    def spoilt(x, packed, *how):
        y = linear(x, packed, *how)
        change(y)
        return y

    _patch_backend(patch, linear=spoilt)


def input_rounded_to_eight_bits(patch):
    linear = packing.linear
    _patch_backend(patch, linear=lambda x, packed, *how: linear(x.to(torch.float8_e4m3fn).to(x.dtype), packed, *how))


def wrong_input_shard(patch):
    right = BlockShockLinear.shard

    def shard(self, weight, keep, part):
        right(self, weight, keep, part)
        self.cols = slice(0, part.cols.stop - part.cols.start)

    patch.setattr(BlockShockLinear, "shard", shard)


def permuted_columns_of_the_other_class(patch):
    right = PermutedDenseLinear.shard

    def shard(self, weight, keep, part):
        right(self, weight, keep, part)
        rows, cols = zip(*self.classes, strict=True)
        self.classes = list(zip(rows, cols[::-1], strict=True))

    patch.setattr(PermutedDenseLinear, "shard", shard)


def _patch_backend(patch, **functions):
    table = backends.BACKENDS
    patch.setitem(table, "reference", dataclasses.replace(table["reference"], **functions))


# fault -> the method it breaks, and the world size and mask that show it
FAULTS = {
    bias_dropped: ("block_shock", 2, "checkerboard"),
    bias_added_by_every_rank: ("row_parallel", 2, "checkerboard"),
    both_ranks_hold_term_0: ("block_shock", 2, "checkerboard"),
    terms_swapped_on_one_shard: ("block_shock", 4, "random"),
    all_reduce_missing: ("masked_dense", 2, "magnitude"),
    all_reduce_counted_twice: ("row_parallel", 2, "checkerboard"),
    shards_gathered_in_reverse: ("column_parallel", 2, "checkerboard"),
    packed_copy_is_stale: ("block_shock", 2, "uniform_1010"),
    one_metadata_byte_transposed: ("block_shock", 2, "random"),
    one_product_is_nan: ("block_shock", 2, "checkerboard"),
    last_row_of_outputs_never_written: ("block_shock", 2, "checkerboard"),
    one_output_slightly_off: ("block_shock", 2, "checkerboard"),
    input_rounded_to_eight_bits: ("block_shock", 2, "transposable_random"),
    wrong_input_shard: ("block_shock", 4, "checkerboard"),
    permuted_columns_of_the_other_class: ("permuted_dense", 2, "checkerboard"),
}
