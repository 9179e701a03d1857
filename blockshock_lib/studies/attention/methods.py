"""The methods of the attention study: a backend on one device, or a strategy over all ranks. A row each."""

from dataclasses import dataclass

from blockshock_lib.report.axes import Look


@dataclass(frozen=True)
class Method(Look):
    """`strategy`: of ContextParallelAttention; "" on one device. `dense`: it computes the least dense attention that
    holds the pattern, full or causal, and is checked against that: what a user without block lists pays. `tuned`:
    compiled by a search for the fastest settings.
    """

    name: str = ""
    backend: str = "auto"
    strategy: str = ""
    dense: bool = False
    tuned: bool = False


_ROWS = (
    # The whole truth is dense: what PyTorch's own attention makes of full and causal patterns.
    Method("SDPA (full and causal only)", "SDPA", "#666666", "H", name="sdpa", backend="sdpa"),
    Method("Best dense kernel (SDPA)", "dense", "#000000", "s", name="dense", backend="sdpa", dense=True),
    Method("Reference", "reference", "#999999", "o", name="reference", backend="reference"),
    Method("Block-Shock's Triton kernel", "Triton", "#882255", "h", name="triton", backend="triton"),
    Method("FlexAttention", "Flex", "#E69F00", "^", name="flex", backend="flex"),
    Method("FlexAttention, max-autotune", "Flex tuned", "#B8860B", "<", name="flex_tuned", backend="flex", tuned=True),
    Method("FlashAttention 4", "FA4", "#56B4E9", "v", name="fa4", backend="fa4"),
    Method("cuDNN BSA", "cuDNN", "#CC79A7", "D", name="cudnn", backend="cudnn"),
    Method("Ranks: all-gather of keys", "gather", "#0072B2", "P", name="gather", strategy="gather"),
    Method("Ranks: pull of visited blocks", "pull", "#D55E00", "X", name="pull", strategy="pull"),
    Method("Ranks: ring", "ring", "#F0E442", "*", name="ring", strategy="ring"),
    Method("Ranks: heads (Ulysses)", "heads", "#009E73", "p", name="heads", strategy="heads"),
)
METHODS = {method.name: method for method in _ROWS}
