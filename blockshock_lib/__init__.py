"""Block-Shock: dense by superposition of 2:4-sparse terms, and the workbook that measures when it pays.

What users import. Torch is loaded with the first name that needs it, so that parameters and reports open at once.
"""

import importlib

from blockshock_lib.runs import code  # noqa: F401  # notes now which code is imported: an edit after this makes it stale

_BY_MODULE = {
    "comm": "Group",
    "kernels.sparse24.mask": "Mask",
    "layers": "BlockShockLinear ColumnParallelLinear DenseLinear Linear24 MaskedDenseLinear PermutedDenseLinear "
    "RowParallelLinear",
    "layers.attention": "attention",
    "layers.checkpoint": "checkpoint",
    "layers.clipping": "clip_grad_norm_",
    "layers.gpt": "gpt",
    "layers.parallel_style": "BlockShockParallel",
    "layers.sparsify": "BlockSparse PruneSchedule ShuffledBlocks Sparse24 Sparse24InBlocks StructuredColumns "
    "StructuredRows Unstructured dense_ fake_sparsify_ load_sparse_ save_sparse sparsify_",
    "notebook.workbook": "open_run",
    "runs.compare": "compare",
    "runs.records": "load",
}
_WHERE = {name: module for module, names in _BY_MODULE.items() for name in names.split()}

__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'blockshock-lib[workbook]'") from error
    return getattr(module, name, module)  # "checkpoint" is a module
