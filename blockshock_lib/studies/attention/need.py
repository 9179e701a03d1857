"""What a case of the attention study asks of a machine, by the shapes of its tensors."""

from blockshock_lib.engine import memory
from blockshock_lib.engine.study import Need
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.params import Case
from blockshock_lib.studies.attention.phases import PHASES
from blockshock_lib.studies.attention.truth import ENTRIES, WHOLE

SCORES = 6  # matrices of scores, their gradients and what is seen, of a piece of the truth
LISTED = 64  # bytes of a block in lists of both directions, as they are built


def need(case: Case, card: dict) -> Need:
    """An upper estimate; which kernels can run the ranks find out."""
    e, count, timed = 4 if case.dtype == "fp32" else 2, len(case.methods), PHASES[case.phase].timed
    queries, keys = (
        case.batch * heads * length * case.head_dim
        for heads, length in ((case.heads, case.q_len), (case.kv_heads, case.k_len))
    )
    pairs = case.batch * case.heads * case.q_len * case.k_len
    # q, k, v, dout as drawn and, a method, as they are dealt, with out, dq, dk and dv; truths in float64 of two kinds.
    standing = (2 * queries + 2 * keys) * (e + count * 2 * e + 4)
    standing += 2 * (8 + e) * (2 * queries + 2 * keys) * (case.q_len <= WHOLE or 0.1)
    standing += LISTED * case.heads * (case.q_len * case.k_len / case.block**2)
    scores = SCORES * 8 * min(max(ENTRIES, case.k_len), case.q_len * case.k_len)
    plain = {"reference"} | ({"flex"} if case.device == "cpu" else set())
    if any(METHODS[name].backend in plain for name in case.methods):  # whole scores, forward and backward
        scores = max(scores, 4 * 4 * pairs)
    if any(METHODS[name].layer for name in case.methods):  # q, k and v of a layer with its weights, in float64
        width = case.heads * case.head_dim
        scores += 8 * (12 * width**2 + 16 * queries) + count * 12 * width**2 * e * 3
    return Need(memory.upper(standing + scores, timed, case.device), dict.fromkeys(case.methods, ""))
