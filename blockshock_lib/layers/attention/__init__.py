"""Block-sparse attention: a pattern is written once and runs on the fastest right backend.

from blockshock_lib import attention
pattern = attention.causal() & attention.window(4096)
out = attention.sparse_attention(q, k, v, pattern)
"""
# ruff: noqa: F401

from blockshock_lib.kernels.attention.pattern import (
    PRESETS,
    Pattern,
    block_diagonal,
    block_lists,
    by_batch,
    by_head,
    causal,
    columns,
    dilated_window,
    documents,
    from_mask,
    full,
    global_local,
    preset,
    random,
    strided,
    window,
)
from blockshock_lib.layers.attention.dilated import dilated_attention
from blockshock_lib.layers.attention.factory import BlockSparseAttention, create_block_sparse_attention
from blockshock_lib.layers.attention.hybrid import HYBRID_1024, HybridTransformerBlock
from blockshock_lib.layers.attention.parallel import ContextParallel, ContextParallelAttention
from blockshock_lib.layers.attention.picture import picture
from blockshock_lib.layers.attention.sparse import SparseAttention, sparse_attention, tune
