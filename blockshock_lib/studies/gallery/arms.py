"""The arms of gallery_accuracy: a GPT trained dense, what pruning makes of it, and GPTs that are trained sparse."""

from dataclasses import dataclass

from blockshock_lib.report.axes import Look


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


DENSE = "trained_dense"
# Published: logs of the perplexities over the dense 29.95 in the README of thu-ml/Adaptive-Sparse-Trainer.
_ROWS = (
    Arm("Dense", "dense", "#000000", "s", DENSE),
    Arm("2:4, magnitude", "2:4 magnitude", "#882255", "o", "magnitude_24", "2:4", "magnitude"),
    Arm("2:4, Wanda", "2:4 Wanda", "#882255", "^", "wanda_24", "2:4", "wanda", published=1.351),
    Arm("2:4, SparseGPT", "2:4 SparseGPT", "#882255", "D", "sparsegpt_24", "2:4", "sparsegpt", published=0.514),
    Arm("Unstructured, magnitude", "any, magnitude", "#D55E00", "o", "magnitude_any", "unstructured", "magnitude"),
    Arm("Unstructured, Wanda", "any, Wanda", "#D55E00", "^", "wanda_any", "unstructured", "wanda"),
    Arm("Unstructured, SparseGPT", "any, SparseGPT", "#D55E00", "D", "sparsegpt_any", "unstructured", "sparsegpt"),
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
ARMS = {arm.name: arm for arm in _ROWS}
PRUNED = tuple(name for name, arm in ARMS.items() if arm.method)
TRAINED = tuple(name for name, arm in ARMS.items() if arm.schedule)
