"""Which weights are kept, and what the others' loss does to them, by what a layer was given in calibration.

Wanda (Sun et al. 2023, arXiv:2306.11695, equation 1) keeps by |W_ij| ||X_j||. SparseGPT (Frantar and Alistarh 2023,
arXiv:2301.00774, algorithm 1) goes through the columns, keeps by W_ij^2 / [H^-1]_jj and moves the weights to the right
by what makes up best for a pruned one, with H = X^T X + .01 mean(diag) I.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from blockshock_lib.errors import DataError

DAMPING = 0.01  # of the mean of H's diagonal, as the paper's code has it
COLUMNS = 128  # columns whose updates of what lies right of them are made at once


def wanda(weight: Tensor, moments: Tensor) -> Tensor:
    """Scores [N, K] of W [N, K] by the sums of squares of its inputs, [K]."""
    return weight.abs().to(moments.dtype) * moments.sqrt()


def sparsegpt(
    weight: Tensor, moments: Tensor, keep_of: Callable[[Tensor], Tensor], width: int
) -> tuple[Tensor, Tensor]:
    """(W pruned [N, K] in its dtype, what is kept, bool [N, K]) by X^T X [K, K], in whose dtype it is computed.
    `keep_of`: scores [N, width] of the next columns -> what of them is kept; `width` divides 128 and K.

    DataError: X^T X is not positive definite.
    """
    hessian, w = moments.clone(), weight.to(moments.dtype, copy=True)
    keep = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    diagonal = hessian.diagonal()
    dead = diagonal == 0  # inputs that were always zero
    diagonal[dead], w[:, dead] = 1, 0
    diagonal += DAMPING * diagonal.mean()
    try:
        # Row j of the upper factor is row j of the inverse of what is left of H from j on, over the root of its [j, j].
        upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    except torch.linalg.LinAlgError:
        raise DataError("the second moments of its inputs are not positive definite: give more rows") from None
    for start in range(0, w.shape[1], COLUMNS):
        block, factor = w[:, start : start + COLUMNS], upper[start : start + COLUMNS, start : start + COLUMNS]
        kept, errors = keep[:, start : start + COLUMNS], torch.zeros_like(block)
        for i in range(block.shape[1]):
            if not i % width:
                ahead = slice(i, i + width)
                kept[:, ahead] = keep_of((block[:, ahead] / factor.diagonal()[ahead]).square())
            errors[:, i] = torch.where(kept[:, i], 0, block[:, i] / factor[i, i])
            block[:, i:].addr_(errors[:, i], factor[i, i:], alpha=-1)
        w[:, start + COLUMNS :].addmm_(errors, upper[start : start + COLUMNS, start + COLUMNS :], alpha=-1)
    return w.masked_fill_(~keep, 0).to(weight.dtype), keep
