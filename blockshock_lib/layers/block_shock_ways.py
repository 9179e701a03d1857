"""The ways that Block-Shock's product can be made on one packed weight, beside the one that the layer takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from blockshock_lib.sparse24 import cslt, small
from blockshock_lib.sparse24.product import BACKENDS

ONE_BUFFER = ("cslt", "small")
"""The backends that `tuned` chooses from: both multiply with cuSPARSELt's buffer."""


class BlockShockWays:
    """Mixed into the layer: see `ShardedLinear` for what each says."""

    def product_by(self, x: Tensor) -> str:
        if self.backend.name != "tuned":
            return self.backend.name
        way = self.packed.extra.get(cslt.padded(x.shape[0]))
        return "" if way is None else "small" if isinstance(way, small.Config) else "cslt"

    def products(self, x: Tensor) -> dict[str, Callable[[], Tensor]]:
        if self.backend.name not in (*ONE_BUFFER, "tuned"):
            return {self.backend.name: lambda: self.local(x)}
        x, found = x[:, self.cols], {}
        for name in ONE_BUFFER:
            backend = BACKENDS[name]
            few = name != "small" or x.shape[0] <= small.MOST_ROWS
            if few and not backend.unsupported(x.device, x.dtype):
                form = replace(self.packed, backend=name, extra={})
                backend.tune(x, form)
                found[name] = partial(backend.linear, x, form)
        return found
