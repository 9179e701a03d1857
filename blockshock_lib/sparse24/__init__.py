"""2:4 sparsity on one device and nothing else: masks, the packed format and the products that multiply with it."""

from blockshock_lib.sparse24 import masks, packing, product, reference
from blockshock_lib.sparse24.pattern import Pattern

__all__ = ["Pattern", "masks", "packing", "product", "reference"]
