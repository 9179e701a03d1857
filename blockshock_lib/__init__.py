"""Block-Shock: dense by superposition of 2:4-sparse terms, and the workbook that measures when it pays.

What users import. Torch is loaded with the first name that needs it, so that parameters and reports open at once.
"""

import importlib

from blockshock_lib.runs import code  # noqa: F401  # notes now which code is imported: an edit after this makes it stale

_WHERE = {
    "BlockShockLinear": "layers",
    "BlockShockParallel": "layers.parallel_style",
    "BlockSparse": "layers.sparsify",
    "ColumnParallelLinear": "layers",
    "DenseLinear": "layers",
    "Group": "comm",
    "Linear24": "layers",
    "Mask": "kernels.sparse24.mask",
    "MaskedDenseLinear": "layers",
    "PermutedDenseLinear": "layers",
    "PruneSchedule": "layers.sparsify",
    "RowParallelLinear": "layers",
    "ShuffledBlocks": "layers.sparsify",
    "Sparse24": "layers.sparsify",
    "Sparse24InBlocks": "layers.sparsify",
    "StructuredColumns": "layers.sparsify",
    "StructuredRows": "layers.sparsify",
    "Unstructured": "layers.sparsify",
    "attention": "layers.attention",
    "checkpoint": "layers.checkpoint",
    "clip_grad_norm_": "layers.clipping",
    "compare": "runs.compare",
    "dense_": "layers.sparsify",
    "fake_sparsify_": "layers.sparsify",
    "gpt": "layers.gpt",
    "load": "runs.records",
    "load_sparse_": "layers.sparsify",
    "open_run": "notebook.workbook",
    "save_sparse": "layers.sparsify",
    "sparsify_": "layers.sparsify",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    return getattr(module, name, module)  # "checkpoint" is a module
