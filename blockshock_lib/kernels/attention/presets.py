"""Patterns that models are known by, each with its source."""

from blockshock_lib.errors import allowed
from blockshock_lib.kernels.attention.pattern import (
    Pattern,
    block_diagonal,
    causal,
    columns,
    global_local,
    random,
    window,
)

PRESETS = {
    "mistral": causal() & window(4096),  # Mistral 7B, arXiv:2310.06825
    "gpt_oss": causal() & window(128),  # every other layer, arXiv:2508.10925
    "gemma3": causal() & window(1024),  # five of six layers, arXiv:2503.19786
    "longformer": global_local(1, 257),  # 256 to either side and one global token, arXiv:2004.05150
    # Its "fixed" pattern, strides of 128 of which the last 8 are seen by all, arXiv:1904.10509
    "sparse_transformer": causal() & (block_diagonal(128) | columns(128, 8)),
    # At 4096 positions 3 of 64 blocks at random, 2 global ones and a window of 3: in blocks there, in positions here.
    "bigbird": global_local(128, 97) | random(3 / 64, block=64),  # arXiv:2007.14062
}


def preset(name: str) -> Pattern:
    """The pattern of that name in PRESETS. ValueError where there is none."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; {allowed(name, PRESETS)}")
    return PRESETS[name]
