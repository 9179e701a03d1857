"""A home for those who prune: a whole model made sparse in place, and dense again. See docs/sparsify.md."""
# ruff: noqa: F401

from blockshock_lib.layers.sparsify.configs import (
    BlockSparse,
    ShuffledBlocks,
    Sparse24,
    Sparse24InBlocks,
    StructuredColumns,
    StructuredRows,
    Unstructured,
)
from blockshock_lib.layers.sparsify.convert import dense_, fake_sparsify_, sparsify_
from blockshock_lib.layers.sparsify.fake import PruneSchedule
from blockshock_lib.layers.sparsify.report import Report, Row
from blockshock_lib.layers.sparsify.stored import load_sparse_, save_sparse
