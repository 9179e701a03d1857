"""One file a method: how its ranks share y = x W^T + b, what it costs, and how the shares make y. methods.py is the
table.
"""

from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.column_parallel import ColumnParallelLinear
from blockshock_lib.layers.dense import DenseLinear
from blockshock_lib.layers.graphed import Graphed
from blockshock_lib.layers.linear24 import Linear24
from blockshock_lib.layers.masked_dense import MaskedDenseLinear
from blockshock_lib.layers.permuted_dense import PermutedDenseLinear
from blockshock_lib.layers.row_parallel import RowParallelLinear
from blockshock_lib.layers.sharded import ShardedLinear

__all__ = [
    "BlockShockLinear",
    "ColumnParallelLinear",
    "DenseLinear",
    "Graphed",
    "Linear24",
    "MaskedDenseLinear",
    "PermutedDenseLinear",
    "RowParallelLinear",
    "ShardedLinear",
]
