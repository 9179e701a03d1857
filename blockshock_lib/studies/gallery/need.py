"""What a case of the gallery asks of a machine, by the shapes of its tensors."""

from blockshock_lib.engine import memory
from blockshock_lib.engine.study import Need
from blockshock_lib.studies.gallery.methods import ARMS, DECODERS
from blockshock_lib.studies.gallery.params import LLAMA, Case
from blockshock_lib.studies.gpt.need import training

ORDER = 24  # bytes a weight while a mask is made: magnitudes in fp32, sorted, with their places
INDEX = 16  # bytes of a kept value's places: COO has two of 64 bits
COMPARED = 36  # bytes an entry: the truth and its sum's parts in float64, the baseline, and copies of both sides
HESSIANS = 3  # of the widest layer, as SparseGPT has them: the moments, their factor and its inverse, in float64


def need(case: Case, card: dict) -> Need:
    """An upper estimate; which kernels can run the ranks find out."""
    held = trained(case) if case.tokens else decoded(case) if case.pattern == LLAMA else multiplied(case)
    return Need(memory.upper(held, not case.tokens, case.device), dict.fromkeys(case.methods, ""))


def multiplied(case: Case) -> float:
    """Bytes of products, or of training steps, whose f(h), mask and packed form each method has anew."""
    e, count, works = 4 if case.dtype == "fp32" else 2, len(case.methods), len(case.works)
    weight, rows, step = case.n * case.k, case.batch * (case.n + case.k), "step" in case.works
    held = weight * (ORDER + works * (2 * e + 1 + count * (e + INDEX * (1 - case.sparsity))))
    held += COMPARED * (works * rows + step * weight)
    return held + rows * (2 * e + step * (ORDER + count * (2 * e + 1)))


def decoded(case: Case) -> float:
    """Bytes of a model with a cache; of the copies that its methods have, each with a cache, and one the dense twin;
    of the caches and weights that the truth has in float64, a layer at a time, and while one is made 2:4.
    """
    e, kv = 4 if case.dtype == "fp32" else 2, case.n // case.heads * case.kv_heads
    layer, head = case.n * (2 * case.n + 2 * kv + 3 * case.k), case.n * case.vocab
    shares = {"dense": e, "2:4": e / 2 + 1 / 8}  # bytes a weight of the layers
    kinds = dict.fromkeys((DECODERS[name].pattern, DECODERS[name].kernel) for name in case.methods)  # compiled or not
    packed = [pattern for pattern, kernel in kinds if kernel != "linear"]
    held = e * (case.layers * layer + 2 * head) + sum(case.layers * layer * shares[one] + e * head for one in packed)
    cache = 2 * case.batch * kv * (case.context + 1)
    held += e * case.layers * cache * (len(case.methods) + 3) + 8 * cache
    return held + (e + 8) * max(layer, head) + ORDER * 2 * case.n * case.k + COMPARED * case.batch * case.vocab


def trained(case: Case) -> float:
    """Bytes of a GPT in training, of the float64 one that it is checked against, of what is pruned of it, of a teacher
    and its chances.
    """
    weights, rows = case.layers * 12 * case.n**2 + (case.vocab + case.context) * case.n, case.batch * case.context
    pruned = 12 * weights * any(ARMS[name].method for name in case.methods)
    hessians = HESSIANS * 8 * (4 * case.n) ** 2 * any(ARMS[name].method == "sparsegpt" for name in case.methods)
    held = training(weights, case.layers, case.n, case.vocab, rows) + (8 + 4) * weights + 12 * rows * case.vocab
    return held + pruned + hessians
