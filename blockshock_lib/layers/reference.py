"""What the linear study must reach: the float64 truth of each tensor, and by how much rounding alone may miss it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from blockshock_lib.layers.part import Part, part_of, term_mask

# Rows of W that are turned to float64 at once: 1.3 GB at K = 40960.
TRUTH_ROWS = 4096
# With one gradient for all steps, as many as it takes for a state in the wrong order to show.
WEIGHT_STEPS = 3


class Reference:
    """y = x W^T + b and its gradients for dy, [B, N]. The truths are float64, from low-precision x and dy.

    Each tensor is made when it is first asked for, and then kept.

    Attributes:
        steps: how many steps of an optimizer lie behind the weights.

    Args:
        weight, bias: [N, K] and [N] or None, in the case's dtype: what the baselines multiply.
        exact: weight and bias in the truth, where they are known better than that; default: the same.
        keep: [N, K] bool, True where term 0 holds the entry, for parts that are terms.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        dy: torch.Tensor | None,
        keep: torch.Tensor | None,
        exact: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ):
        self.weight, self.bias, self.x, self.dy, self.keep = weight, bias, x, dy, keep
        self.exact_weight, self.exact_bias = exact or (weight, bias)
        self.steps = 0
        self._expected: dict[tuple, torch.Tensor] = {}

    @cached_property
    def y(self) -> torch.Tensor:
        """[B, N]."""
        x = self.x.double()
        y = torch.cat([x @ rows.double().t() for rows in self.exact_weight.split(TRUTH_ROWS)], dim=1)
        return y if self.exact_bias is None else y.add_(self.exact_bias.double())

    @cached_property
    def dx(self) -> torch.Tensor:
        """[B, K] = dy W."""
        dx = torch.zeros_like(self.x, dtype=torch.float64)
        for dy, rows in zip(self.dy.split(TRUTH_ROWS, dim=1), self.exact_weight.split(TRUTH_ROWS), strict=True):
            dx.addmm_(dy.double(), rows.double())
        return dx

    @cached_property
    def dw(self) -> torch.Tensor:
        """[N, K] = dy^T x."""
        x, dw = self.x.double(), torch.empty_like(self.weight, dtype=torch.float64)
        for dy, rows in zip(self.dy.split(TRUTH_ROWS, dim=1), dw.split(TRUTH_ROWS), strict=True):
            torch.mm(dy.t().double(), x, out=rows)
        return dw

    @cached_property
    def db(self) -> torch.Tensor:
        """[N] = the sum of dy over the batch."""
        return self.dy.double().sum(0)

    @cached_property
    def expected_dw(self) -> torch.Tensor:
        """[N, K] by one plain low-precision product: each entry is made by one rank alone, whatever the sharding."""
        return self.dy.t() @ self.x

    @cached_property
    def expected_db(self) -> torch.Tensor:
        return self.dy.sum(0)

    def expected(self, parts: list[Part], gathers: bool) -> torch.Tensor:
        """y [B, N] by the plainest low-precision product of each part, added in the case's dtype, in rank order.

        Zeros in a dense part shorten the chains of additions that round, so a method that gathers the columns it keeps
        (`gathers`, periodic masks only) is compared with a product that does so too.
        """

        def multiply(y: torch.Tensor, part: Part, w: torch.Tensor) -> None:
            x = self.x[:, part.cols]
            if not gathers:
                y[:, part.rows] += F.linear(x, w)
                return
            kept = term_mask(self.keep, part)
            for r in range(4):
                cols = kept[r].nonzero().flatten()
                y[:, r::4] += F.linear(x[:, cols], w[r::4, cols])

        return self._sum("y", parts, gathers, self.weight.shape[0], multiply, self.bias)

    def expected_dx(self, parts: list[Part], gathers: bool) -> torch.Tensor:
        """dX [B, K] in the same way; a method that gathers is compared with a product of the kept rows alone."""

        def multiply(dx: torch.Tensor, part: Part, w: torch.Tensor) -> None:
            dy, mine = self.dy[:, part.rows], dx[:, part.cols]
            if not gathers:
                mine += dy @ w
                return
            kept = term_mask(self.keep, part)
            for c in range(4):
                rows = kept[:, c].nonzero().flatten()
                mine[:, c::4] += dy[:, rows] @ w[rows, c::4]

        return self._sum("dx", parts, gathers, self.weight.shape[1], multiply)

    def _sum(
        self,
        what: str,
        parts: list[Part],
        gathers: bool,
        features: int,
        multiply: Callable[[torch.Tensor, Part, torch.Tensor], None],
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        key = (what, gathers, *map(repr, parts))
        if key not in self._expected:
            total = self.x.new_zeros(self.x.shape[0], features)
            for part in parts:
                multiply(total, part, part_of(self.weight, None if part.term is None else self.keep, part))
            self._expected[key] = total if bias is None else total.add_(bias)
        return self._expected[key]

    def trained(self, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Reference:
        """The same after WEIGHT_STEPS steps with the gradient of (x, dy) as it is now, which the weights do not change.

        The truth takes them in float64 with the exact gradient; the baseline in the case's dtype with its own.

        Args:
            optimizer: makes one for the parameters given.
        """

        def stepped(values: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            parameter = nn.Parameter(values.clone())
            parameter.grad = gradient
            steps = optimizer([parameter])
            for _ in range(WEIGHT_STEPS):
                steps.step()
            return parameter.detach()

        exact = torch.empty_like(self.weight, dtype=torch.float64)
        for rows, weight, dw in zip(*(t.split(TRUTH_ROWS) for t in (exact, self.weight, self.dw)), strict=True):
            rows.copy_(stepped(weight.double(), dw))
        bias = exact_bias = None
        if self.bias is not None:
            bias, exact_bias = stepped(self.bias, self.expected_db), stepped(self.bias.double(), self.db)
        weight = stepped(self.weight, self.expected_dw)
        after = Reference(weight, bias, self.x, self.dy, self.keep, (exact, exact_bias))
        after.steps = self.steps + WEIGHT_STEPS
        return after
