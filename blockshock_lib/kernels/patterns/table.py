"""The patterns, a row each: what they keep, and the kernels that can multiply it.

```
pattern = PATTERNS["blocks"]
mask = pattern.mask(weight.abs(), 0.9, 64)  # bool [N, K], a tenth of the blocks
packed = pattern.pack(weight, mask, 64)  # by the best kernel that this device has
packed.tune(x)  # on a GPU: searches once for this batch, and keeps what it finds on disk
y = packed.product(x)  # [B, N]
```
"""

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
