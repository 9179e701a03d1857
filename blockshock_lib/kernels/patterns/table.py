"""The patterns, a row each: what they keep, and the kernels that can multiply it; docs/gallery.md has an example."""

from blockshock_lib.kernels.patterns import blocks, blocks24, dense, shuffled, structured, two_four, unstructured
from blockshock_lib.kernels.patterns.pattern import Kernel, Pattern

_ROWS = (
    dense.PATTERN,
    unstructured.PATTERN,
    blocks.PATTERN,
    shuffled.PATTERN,
    two_four.PATTERN,
    blocks24.PATTERN,
    structured.ROWS,
    structured.COLUMNS,
)
PATTERNS: dict[str, Pattern] = {pattern.name: pattern for pattern in _ROWS}
KERNELS: dict[str, tuple[Pattern, Kernel]] = {
    kernel.name: (pattern, kernel) for pattern in _ROWS for kernel in pattern.kernels
}
