"""Some layers, from 0 on, keep both sums; in the others the attention's is dropped, as in spd (arXiv:2502.20727)."""

from blockshock_lib.layers.gpt.schedule import Step, dropping, within


def selective(layers: int, *kept: int) -> tuple[Step, ...]:
    within("layer", kept, 0, layers - 1)
    if len(set(kept)) < len(kept):
        raise ValueError(f"selective names a layer twice: {', '.join(map(str, kept))}")
    return dropping(layers, {2 * layer for layer in range(layers) if layer not in kept})
