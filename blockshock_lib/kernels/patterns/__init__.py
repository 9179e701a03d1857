"""Sparsity patterns of a weight on one device: masks, packed forms and their products; `table.PATTERNS` lists them."""
