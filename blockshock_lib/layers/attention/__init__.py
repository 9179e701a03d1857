"""Block-sparse attention: a pattern is written once and runs on the fastest right backend.

from blockshock_lib import attention
pattern = attention.causal() & attention.window(4096)
out = attention.sparse_attention(q, k, v, pattern)
"""

from blockshock_lib.kernels.attention.pattern import (
    Pattern,
    block_diagonal,
    block_lists,
    by_batch,
    by_head,
    causal,
    dilated_window,
    documents,
    from_mask,
    full,
    global_local,
    random,
    strided,
    window,
)
from blockshock_lib.layers.attention.dilated import dilated_attention
from blockshock_lib.layers.attention.parallel import ContextParallelAttention
from blockshock_lib.layers.attention.sparse import sparse_attention

__all__ = [
    "ContextParallelAttention",
    "Pattern",
    "block_diagonal",
    "block_lists",
    "by_batch",
    "by_head",
    "causal",
    "dilated_attention",
    "dilated_window",
    "documents",
    "from_mask",
    "full",
    "global_local",
    "random",
    "sparse_attention",
    "strided",
    "window",
]
