"""The methods of the attention study: a backend on one device, or a strategy over all ranks; and whole layers. A row
each.
"""

from dataclasses import dataclass

from blockshock_lib.report.axes import Look


@dataclass(frozen=True)
class Method(Look):
    """`strategy`: of ContextParallelAttention; "" on one device. `dense`: it computes the least dense attention that
    holds the pattern, full or causal, and is checked against that: what a user without block lists pays. `tuned`:
    compiled by a search for the fastest settings. `layer`: "model", projections around attention, as `dealt` says;
    "block", a HybridTransformerBlock; "" attention alone. `hook`: of DDP, what it does to gradients.
    """

    name: str = ""
    backend: str = "auto"  # alone, in the phase of scaling: the kernel of all strategies
    strategy: str = ""
    placement: str = "zigzag"
    dense: bool = False
    tuned: bool = False
    layer: str = ""
    dealt: str = ""  # "": one rank works; "replicas": DataParallel; "batch": DDP; "sequence": a ring
    hook: str = ""
    gathered: bool = False  # LongNet's: each pair of segment and rate by itself, not the union of them as a mask


_ROWS = (
    # The whole truth is dense: what PyTorch's own attention makes of full and causal patterns.
    Method("SDPA (full and causal only)", "SDPA", "#666666", "H", name="sdpa", backend="sdpa"),
    Method("PyTorch's dense kernel (SDPA)", "SDPA dense", "#000000", "s", name="dense", backend="sdpa", dense=True),
    Method("FlashAttention 4, dense", "FA4 dense", "#004D80", "8", name="dense_fa4", backend="fa4", dense=True),
    Method("Reference", "reference", "#999999", "o", name="reference", backend="reference"),
    Method("Block-Shock's Triton kernel", "Triton", "#882255", "h", name="triton", backend="triton"),
    Method("Block-Shock's Gluon forward", "Gluon", "#AA4499", ">", name="gluon", backend="gluon"),
    Method("What was kept as the fastest", "auto", "#117733", "*", name="auto"),
    Method("LongNet's dilated attention", "dilated", "#44AA99", "X", name="dilated", backend="auto", gathered=True),
    Method("LongNet on SDPA", "on SDPA", "#DDCC77", "<", name="dilated_sdpa", backend="sdpa", gathered=True),
    Method("FlexAttention", "Flex", "#E69F00", "^", name="flex", backend="flex"),
    Method("FlexAttention, max-autotune", "Flex tuned", "#B8860B", "<", name="flex_tuned", backend="flex", tuned=True),
    Method("FlashAttention 4", "FA4", "#56B4E9", "v", name="fa4", backend="fa4"),
    Method("cuDNN BSA", "cuDNN", "#CC79A7", "D", name="cudnn", backend="cudnn"),
    Method("Ranks: all-gather of keys", "gather", "#0072B2", "P", name="gather", strategy="gather"),
    Method("Ranks: pull of visited blocks", "pull", "#D55E00", "X", name="pull", strategy="pull"),
    Method("Ranks: pull by send and receive", "send", "#CC6677", "v", name="send", strategy="send"),
    Method("Ranks: ring", "ring", "#F0E442", "*", name="ring", strategy="ring"),
    Method("Ranks: heads (Ulysses)", "heads", "#009E73", "p", name="heads", strategy="heads", placement="contiguous"),
    Method(
        *("Ranks: heads, FlashAttention 4, dense", "heads FA4", "#004D80", "8", "heads_fa4", "fa4", "heads"),
        **dict(placement="contiguous", dense=True),
    ),
    Method("One rank, the same kernel", "alone", "#555555", "d", name="alone"),
    *(
        Method(f"Ranks: {of}, {place}", f"{of} {place}", colour, mark, f"{of}_{place}", strategy=of, placement=place)
        for of, colour in (("gather", "#0072B2"), ("pull", "#D55E00"), ("ring", "#F0E442"))
        for place, mark in (("contiguous", "<"), ("cost", ">"))
    ),
    Method("Model on one rank", "model", "#555555", "o", name="model", layer="model"),
    Method("Model: DataParallel", "DP", "#CC79A7", "v", name="dp", layer="model", dealt="replicas"),
    Method("Model: DDP", "DDP", "#0072B2", "s", name="ddp", layer="model", dealt="batch"),
    Method("Model: DDP, fp16", "fp16", "#56B4E9", "^", name="ddp_fp16", layer="model", dealt="batch", hook="fp16"),
    Method("Model: DDP, PowerSGD", "PowerSGD", "#009E73", "D", "ddp_psgd", layer="model", dealt="batch", hook="psgd"),
    Method("Model: DDP, top-k", "top-k", "#D55E00", "X", name="ddp_top_k", layer="model", dealt="batch", hook="top_k"),
    Method("Model: ring", "ring model", "#F0E442", "*", name="model_ring", layer="model", dealt="sequence"),
    Method("Hybrid block on one rank", "block", "#555555", "P", name="block", layer="block"),
    Method("Hybrid block over ranks", "hybrid", "#882255", "h", name="hybrid", layer="block", dealt="heads"),
)
METHODS = {method.name: method for method in _ROWS}
