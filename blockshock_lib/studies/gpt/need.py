"""What a case of the gpt study asks of a machine, by the shapes of its tensors."""

from blockshock_lib.engine import memory
from blockshock_lib.engine.study import Need
from blockshock_lib.layers.gpt.schedules import named
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.params import Case

AFTER = 20  # bytes a weight of what is distilled beside its teacher


def need(case: Case, card: dict) -> Need:
    """An upper estimate of the fullest rank; a schedule may not suit so many layers."""
    w, e, count = case.width, 4 if case.dtype == "fp32" else 2, len(case.methods)
    weights, rows = case.layers * 12 * w**2 + (case.vocab + case.context) * w, case.batch * case.context
    size = (case.layers, w, case.vocab, rows)
    # Of a forward by the equation in float64, rank by rank: values, scores, gradients and what is kept for these.
    streams = 32 * rows * case.layers * (w * (18 + 6 * case.ranks) + 3 * case.heads * case.context)
    if case.tokens:
        held = training(weights, *size, case.ranks) + AFTER * weights * ("tensor_parallel" in case.methods)
    elif case.work == "step":
        held = 8 * weights + training(weights, *size, each=e) + count * (8 + e) * w * case.context
    elif case.work:  # a layer at a time is cast, without gradients; a method has a cache and what it is compared with
        cache = 2 * case.layers * case.context * w * e
        held = 2 * e * weights + streams / case.layers / 4 + count * (cache + (8 + e) * w * case.length)
    else:  # fp32, as tracks and as ranks with gradients a method; the equation's gradients and logits
        held = (4 + 3 * e * count + 24) * weights + streams + 24 * rows * case.vocab
    return Need(memory.upper(held, bool(case.work), case.device), {name: unfit(name, case) for name in case.methods})


def unfit(method: str, case: Case) -> str:
    """Why a schedule has no such number of layers, or ""."""
    try:
        named(METHODS[method].schedule, case.layers)
    except ValueError as error:
        return str(error)
    return ""


def training(weights: int, layers: int, width: int, vocab: int, rows: int, tracks: int = 1, each: int = 4) -> float:
    """Bytes of a GPT in training on `rows` tokens at once: fp32 weights as drawn and as trained, their gradients, two
    moments and 16-bit casts; a layer's activations in `each` bytes, residual streams once a track; logits, gradients.
    """
    return 26 * weights + each * rows * layers * width * (18 + 6 * tracks) + 16 * rows * vocab
