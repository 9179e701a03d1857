"""Numerical faults to plant in correct code; each takes pytest's monkeypatch and breaks one thing.

The gate must catch every one of them. None is a caricature: each is a mistake that this project, or one it learned
from, has made or could make.
"""

from __future__ import annotations

import torch

from blockshock_lib import sparse24
from blockshock_lib.layers import block_shock, sharded
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.column_parallel import ColumnParallelLinear
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.layers.permuted_dense import PermutedDenseLinear
from blockshock_lib.layers.sharded import ShardedLinear
from blockshock_lib.layers.term_parallel import TermParallelLinear


def bias_dropped(patch):
    patch.setattr(ShardedLinear, "_add_bias", lambda self, y: y)


def bias_added_by_every_rank(patch):
    patch.setattr(
        ShardedLinear,
        "_add_bias",
        lambda self, y: y if self.bias is None else y.add_(self.bias * self.group.world_size),
    )


def both_ranks_hold_term_0(patch):
    patch.setattr(block_shock, "term_mask", lambda keep, part: keep[part.rows, part.cols])


def terms_swapped_on_one_shard(patch):
    right = TermParallelLinear.part.__func__

    def part(cls, rank, world_size, n, k):
        found = right(cls, rank, world_size, n, k)
        return sharded.Part(1, found.rows, found.cols) if rank == 0 else found

    patch.setattr(BlockShockLinear, "part", classmethod(part))


def all_reduce_missing(patch):
    patch.setattr(Emulated, "reduce", lambda self, parts: self.layers[0]._add_bias(parts[0]))


def all_reduce_counted_twice(patch):
    patch.setattr(ShardedLinear, "combine", lambda self, parts: self._add_bias(sum(parts) * 2))


def shards_gathered_in_reverse(patch):
    patch.setattr(ColumnParallelLinear, "combine", lambda self, parts: torch.cat(parts[::-1]).t())


def packed_copy_is_stale(patch):
    pack = sparse24.reference.pack

    def stale(weight, mask):
        # One SGD step behind: a relative change of about one percent.
        return pack((weight.float() + 0.01 * weight.float().roll(1, 0)).to(weight.dtype), mask)

    _patch_backend(patch, pack=stale)


def one_metadata_byte_transposed(patch):
    pack = sparse24.reference.pack

    def swapped(weight, mask):
        packed = pack(weight, mask)
        metadata = packed.data[1]
        # The two groups of one byte in each row change places.
        metadata[:, 0] = (metadata[:, 0] >> 4) | (metadata[:, 0] << 4)
        return packed

    _patch_backend(patch, pack=swapped)


def one_product_is_nan(patch):
    linear = sparse24.reference.linear

    def broken(x, packed, *how):
        y = linear(x, packed, *how)
        y[-1, -1] = float("nan")
        return y

    _patch_backend(patch, linear=broken)


def last_row_of_outputs_never_written(patch):
    linear = sparse24.reference.linear

    def short(x, packed, *how):
        y = linear(x, packed, *how)
        y[-1] = 0
        return y

    _patch_backend(patch, linear=short)


def one_output_slightly_off(patch):
    linear = sparse24.reference.linear

    def off(x, packed, *how):
        y = linear(x, packed, *how)
        y[0, 0] += 0.05 * y.float().square().mean().sqrt()
        return y

    _patch_backend(patch, linear=off)


def input_rounded_to_eight_bits(patch):
    linear = sparse24.reference.linear
    _patch_backend(patch, linear=lambda x, packed, *how: linear(x.to(torch.float8_e4m3fn).to(x.dtype), packed, *how))


def wrong_input_shard(patch):
    right = BlockShockLinear.hold

    def hold(self, weight, keep, part):
        right(self, weight, keep, part)
        self.cols = slice(0, part.cols.stop - part.cols.start)

    patch.setattr(BlockShockLinear, "hold", hold)


def permuted_columns_of_the_other_class(patch):
    right = PermutedDenseLinear.hold

    def hold(self, weight, keep, part):
        right(self, weight, keep, part)
        rows, cols = zip(*self.classes, strict=True)
        self.classes = list(zip(rows, cols[::-1], strict=True))

    patch.setattr(PermutedDenseLinear, "hold", hold)


def _patch_backend(patch, **functions):
    import dataclasses

    table = sparse24.product.BACKENDS
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
