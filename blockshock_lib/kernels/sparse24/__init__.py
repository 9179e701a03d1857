"""2:4 sparsity on one device: masks, the packed format and its products. Only `mask` needs no torch."""
