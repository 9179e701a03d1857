"""Megatron's: two sums a layer, each before the next sublayer (arXiv:1909.08053)."""

from blockshock_lib.layers.gpt.schedule import Step, dropping


def tensor_parallel(layers: int) -> tuple[Step, ...]:
    return dropping(layers, ())
