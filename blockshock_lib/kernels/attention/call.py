"""One call of block-sparse attention, as every backend takes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blockshock_lib.kernels.attention.lists import BlockLists
from blockshock_lib.kernels.attention.pattern import Pattern


@dataclass(frozen=True, eq=False)
class Call:
    q: Tensor  # [B, H, S, D]
    k: Tensor  # [B, H / G, S_k, D]
    v: Tensor
    pattern: Pattern | None  # None where the lists are of a part of the sequence
    lists: BlockLists
    scale: float
    return_lse: bool = False

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What a backend makes of the lists: once, and as long as they live."""
        forms = self.lists.forms
        if name not in forms:
            forms[name] = make()
        return forms[name]
