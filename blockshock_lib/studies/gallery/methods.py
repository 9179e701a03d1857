"""The methods of the gallery, a row each: a kernel of kernels/patterns; what a step trains 2:4; a model that decodes; a
GPT that is trained dense, pruned, or trained sparse.
"""

from dataclasses import dataclass

from blockshock_lib.report.axes import Look


@dataclass(frozen=True)
class Method(Look):
    name: str = ""
    pattern: str = ""  # that it multiplies; "dense": all of the weight, in every case, as the time to beat
    kernel: str = ""
    compiled: bool = False  # by torch.compile, as one graph


_ROWS = (
    Method("Dense, searched", "searched dense", "#000000", "s", "searched", "dense", "searched"),
    Method("Dense (F.linear)", "F.linear", "#666666", "H", "dense", "dense", "linear"),
    Method("COO (torch.sparse)", "COO", "#CC79A7", "v", "coo", "unstructured", "coo"),
    Method("CSR (torch.sparse)", "CSR", "#D55E00", "^", "csr", "unstructured", "csr"),
    Method("CSR (nvmath's universal tensor)", "UST", "#E69F00", "<", "ust", "unstructured", "ust"),
    Method("BSR, as PyTorch ships it", "BSR shipped", "#56B4E9", "D", "bsr_shipped", "blocks", "bsr_shipped"),
    Method("BSR, tuned here", "BSR", "#0072B2", "o", "bsr", "blocks", "bsr"),
    Method("Grouped products over rows of blocks", "grouped", "#3F6FBF", "*", "grouped", "blocks", "grouped"),
    Method("Shuffled blocks, BSR", "shuffled", "#7A5195", "h", "shuffled", "shuffled blocks", "bsr_shuffled"),
    Method("2:4, unpacked in each call", "2:4 unpacked", "#999999", ".", "two_four_reference", "2:4", "reference"),
    Method("2:4 (torch's op)", "2:4 torch", "#B2182B", "d", "two_four_torch", "2:4", "torch"),
    Method("2:4 (cuSPARSELt, planned and tuned)", "2:4 cuSPARSELt", "#8C6D31", ">", "two_four_cslt", "2:4", "cslt"),
    Method("2:4 (Block-Shock's choice)", "2:4", "#882255", "p", "two_four", "2:4", "tuned"),
    Method("2:4 in blocks", "2:4 in blocks", "#1B7837", "P", "blocks24", "2:4 in blocks", "blocks24"),
    Method("Rows left out", "rows", "#009E73", "X", "rows", "rows", "smaller_rows"),
    Method("Columns left out", "columns", "#F0E442", "8", "columns", "columns", "smaller_columns"),
)
METHODS = {method.name: method for method in _ROWS}
PATTERNS = tuple(dict.fromkeys(method.pattern for method in _ROWS if method.pattern != "dense"))


@dataclass(frozen=True)
class Way(Look):
    """A training step. `operand`: what is 2:4 of it, the "weight", or the activations "before" or "after" the
    nonlinearity; `kernel`: its backend, "" the best that can; `update`: as Linear24 takes it; `tiles`: 2:4 both ways.
    """

    name: str = ""
    operand: str = "dense"
    kernel: str = ""
    update: str = ""
    tiles: bool = False


_WAYS = (
    Way("Dense", "dense", "#000000", "s", "step_dense"),
    Way("Weight, packed anew (T1)", "T1", "#882255", "o", "step_t1", "weight", "auto", "recompress"),
    Way("Weight, trained packed (T3)", "T3", "#CC79A7", "^", "step_t3", "weight", "auto", "packed"),
    Way("Weight, PyTorch's op", "stock op", "#B2182B", "d", "step_stock", "weight", "torch", "recompress"),
    Way("Activations before, strips", "before", "#0072B2", "<", "step_before", "before"),
    Way("Activations after, strips", "after", "#56B4E9", ">", "step_after", "after"),
    Way(
        "Activations after, strips, PyTorch's op", "after, stock", "#009E73", "P", "step_after_stock", "after", "torch"
    ),
    Way(
        "Activations after, tiles, straight-through", "tiles", "#E69F00", "X", "step_tiles", "after", "torch", "", True
    ),
)
WAYS = {way.name: way for way in _WAYS}
ACTS = ("GELU", "squared ReLU")

# Models that decode: of "dense" a kernel multiplies all layers, of "2:4" a backend of Sparse24 all but the head, which
# is the best dense model's.
_DECODERS = (
    Method("Dense (F.linear)", "dense", "#666666", "H", "decode_dense", "dense", "linear"),
    Method("Dense, searched", "searched dense", "#000000", "s", "decode_searched", "dense", "searched"),
    Method("2:4 (torch's op)", "2:4 torch", "#B2182B", "d", "decode_torch", "2:4", "torch"),
    Method("2:4 (sparsify_)", "2:4", "#882255", "p", "decode_24", "2:4", "auto"),
    Method("Dense, compiled", "dense, compiled", "#999999", "v", "decode_compiled", "dense", "linear", True),
    Method(
        *("Dense, searched and compiled", "searched dense, compiled", "#3F6FBF", "D", "decode_searched_compiled"),
        *("dense", "searched", True),
    ),
    Method("2:4, compiled", "2:4, compiled", "#CC79A7", "^", "decode_24_compiled", "2:4", "auto", True),
)
DECODERS = {method.name: method for method in _DECODERS}


@dataclass(frozen=True)
class Arm(Look):
    """`method`: by what the trained dense model is pruned, at once and without retraining; `schedule`: of
    fake_sparsify_, by which a model is trained 2:4 from its first step on. `published`: nats that GPT-2 124M lost so.
    """

    name: str = ""
    pattern: str = ""
    method: str = ""
    schedule: str = ""
    published: float | None = None


DENSE, FREE = "trained_dense", "unstructured"
# Published: logs of the perplexities over the dense 29.95 in the README of thu-ml/Adaptive-Sparse-Trainer.
_ARMS = (
    Arm("Dense", "dense", "#000000", "s", DENSE),
    Arm("2:4, magnitude", "2:4 magnitude", "#882255", "o", "magnitude_24", "2:4", "magnitude"),
    Arm("2:4, Wanda", "2:4 Wanda", "#882255", "^", "wanda_24", "2:4", "wanda", published=1.351),
    Arm("2:4, SparseGPT", "2:4 SparseGPT", "#882255", "D", "sparsegpt_24", "2:4", "sparsegpt", published=0.514),
    Arm("Unstructured, magnitude", f"{FREE} magnitude", "#D55E00", "o", "magnitude_any", FREE, "magnitude"),
    Arm("Unstructured, Wanda", f"{FREE} Wanda", "#D55E00", "^", "wanda_any", FREE, "wanda"),
    Arm("Unstructured, SparseGPT", f"{FREE} SparseGPT", "#D55E00", "D", "sparsegpt_any", FREE, "sparsegpt"),
    Arm("Blocks, magnitude", "blocks magnitude", "#0072B2", "o", "magnitude_blocks", "blocks", "magnitude"),
    Arm("Blocks, Wanda", "blocks Wanda", "#0072B2", "^", "wanda_blocks", "blocks", "wanda"),
    Arm("Blocks, SparseGPT", "blocks SparseGPT", "#0072B2", "D", "sparsegpt_blocks", "blocks", "sparsegpt"),
    Arm("Rows, magnitude", "rows magnitude", "#009E73", "o", "magnitude_rows", "rows", "magnitude"),
    Arm("Rows, Wanda", "rows Wanda", "#009E73", "^", "wanda_rows", "rows", "wanda"),
    Arm("Trained 2:4, one mask", "one mask", "#E69F00", "v", "trained_once", "2:4", schedule="once"),
    Arm("Trained 2:4, gradual", "gradual", "#E69F00", "P", "trained_gradual", "2:4", "", "gradual", 0.111),
    Arm("Trained 2:4, mask decay", "mask decay", "#E69F00", "X", "trained_decay", "2:4", schedule="decay"),
    Arm("Trained 2:4, S-STE", "S-STE", "#E69F00", "*", "trained_s_ste", "2:4", schedule="s-ste"),
)
ARMS = {arm.name: arm for arm in _ARMS}
PRUNED = tuple(name for name, arm in ARMS.items() if arm.method)
TRAINED = tuple(name for name, arm in ARMS.items() if arm.schedule)
