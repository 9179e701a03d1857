"""A class a method: how its ranks share y = x W^T + b, and how the shares make y."""
# ruff: noqa: F401

from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.dense import ColumnParallelLinear, DenseLinear, PermutedDenseLinear, RowParallelLinear
from blockshock_lib.layers.graphed import Graphed
from blockshock_lib.layers.linear24 import Linear24
from blockshock_lib.layers.masked_dense import MaskedDenseLinear
from blockshock_lib.layers.sharded import ShardedLinear
