"""Phases 2 and 3: what a pass or a training step takes, piece by piece, what it holds, and what it learns."""
