"""Attention over the blocks that a pattern lists: a pattern is written once and runs on each backend."""
