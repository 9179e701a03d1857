"""The methods of the attention study: a backend on one device, or a strategy over all ranks. A row each."""

from dataclasses import dataclass

from blockshock_lib.report.axes import Look


@dataclass(frozen=True)
class Method(Look):
    """`strategy`: of ContextParallelAttention; "" on one device."""

    name: str = ""
    backend: str = "auto"
    strategy: str = ""


_ROWS = (
    # The whole truth is dense: what PyTorch's own attention makes of full and causal patterns.
    Method("SDPA (dense)", "SDPA", "#000000", "s", name="sdpa", backend="sdpa"),
    Method("Reference", "reference", "#999999", "o", name="reference", backend="reference"),
    Method("Block-Shock's Triton kernel", "Triton", "#882255", "h", name="triton", backend="triton"),
    Method("FlexAttention", "Flex", "#E69F00", "^", name="flex", backend="flex"),
    Method("FlashAttention 4", "FA4", "#56B4E9", "v", name="fa4", backend="fa4"),
    Method("cuDNN BSA", "cuDNN", "#CC79A7", "D", name="cudnn", backend="cudnn"),
    Method("Ranks: all-gather of keys", "gather", "#0072B2", "P", name="gather", strategy="gather"),
    Method("Ranks: pull of visited blocks", "pull", "#D55E00", "X", name="pull", strategy="pull"),
    Method("Ranks: ring", "ring", "#F0E442", "*", name="ring", strategy="ring"),
    Method("Ranks: heads (Ulysses)", "heads", "#009E73", "p", name="heads", strategy="heads"),
)
METHODS = {method.name: method for method in _ROWS}
