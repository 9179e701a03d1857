"""What the linear study must reach: the float64 truth of each tensor, and by how much rounding alone may miss it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockshock_lib.layers.parts import Part, part_of, term_mask

TRUTH_ROWS = 4096  # of W that are turned to float64 at once: 1.3 GB at K = 40960
WEIGHT_STEPS = 3  # with one gradient for all: as many as it takes for a state in the wrong order to show


@dataclass(eq=False)
class Reference:
    """y [B, N] = x W^T + b, and its gradients for dy [B, N]: dx [B, K], dw [N, K], db [N]. The truths are float64, from
    low-precision x and dy, made when first asked for; the baselines multiply `weight` and `bias`. `keep` [N, K]: True
    where term 0 holds the entry. `optimizer` makes what `trained` steps with.
    """

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    dy: Tensor | None = None
    keep: Tensor | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    steps = 0  # of the optimizer, behind the weights

    def __post_init__(self):
        self.exact_weight, self.exact_bias = self.weight, self.bias
        self._expected: dict[tuple, Tensor] = {}

    @cached_property
    def y(self) -> Tensor:
        x = self.x.double()
        y = torch.cat([x @ rows.double().t() for rows in self.exact_weight.split(TRUTH_ROWS)], dim=1)
        return y if self.exact_bias is None else y.add_(self.exact_bias.double())

    @cached_property
    def dx(self) -> Tensor:
        dx = torch.zeros_like(self.x, dtype=torch.float64)
        for dy, rows in zip(self.dy.split(TRUTH_ROWS, dim=1), self.exact_weight.split(TRUTH_ROWS), strict=True):
            dx.addmm_(dy.double(), rows.double())
        return dx

    @cached_property
    def dw(self) -> Tensor:
        x, dw = self.x.double(), torch.empty_like(self.weight, dtype=torch.float64)
        for dy, rows in zip(self.dy.split(TRUTH_ROWS, dim=1), dw.split(TRUTH_ROWS), strict=True):
            torch.mm(dy.t().double(), x, out=rows)
        return dw

    @cached_property
    def db(self) -> Tensor:
        return self.dy.double().sum(0)

    @cached_property
    def expected_dw(self) -> Tensor:
        return self.dy.t() @ self.x  # each entry is made by one rank alone, whatever the sharding

    @cached_property
    def expected_db(self) -> Tensor:
        return self.dy.sum(0)

    def expected(self, what: str, parts: list[Part], gathers: bool) -> Tensor:
        """`what` is "y" or "dx": by the plainest low-precision product of each part, added in the case's dtype, in rank
        order. Zeros in a dense part shorten the chains of additions that round, so a method that gathers what it keeps
        (`gathers`, periodic masks only) is compared with a product that does so too.
        """
        key = (what, gathers, *map(repr, parts))
        if key in self._expected:
            return self._expected[key]
        forward = what == "y"
        source = self.x if forward else self.dy
        total = source.new_zeros(source.shape[0], self.weight.shape[0 if forward else 1])
        for part in parts:
            w = part_of(self.weight, self.keep, part)
            w, made, taken = (w, part.rows, part.cols) if forward else (w.t(), part.cols, part.rows)
            mine, given = total[:, made], source[:, taken]  # mine [B, m] = given w^T, w [m, k]
            if not gathers:
                mine += F.linear(given, w)
                continue
            kept = term_mask(self.keep, part)
            for r in range(4):
                columns = (kept if forward else kept.t())[r].nonzero().flatten()
                mine[:, r::4] += F.linear(given[:, columns], w[r::4, columns])
        self._expected[key] = total.add_(self.bias) if forward and self.bias is not None else total
        return total

    @cached_property
    def trained(self) -> "Reference":
        """The same after WEIGHT_STEPS steps with the gradient of (x, dy) as it is now, which the weights do not change.
        The truth takes them in float64 with the exact gradient; the baseline in the case's dtype with its own.
        """

        def stepped(values: Tensor, gradient: Tensor) -> Tensor:
            parameter = nn.Parameter(values.clone())
            parameter.grad = gradient
            steps = self.optimizer([parameter])
            for _ in range(WEIGHT_STEPS):
                steps.step()
            return parameter.detach()

        bias = None if self.bias is None else stepped(self.bias, self.expected_db)
        found = Reference(stepped(self.weight, self.expected_dw), bias, self.x, self.dy, self.keep)
        found.steps, found.exact_weight = WEIGHT_STEPS, torch.empty_like(self.weight, dtype=torch.float64)
        parts = zip(*(t.split(TRUTH_ROWS) for t in (found.exact_weight, self.weight, self.dw)), strict=True)
        for rows, weight, dw in parts:
            rows.copy_(stepped(weight.double(), dw))
        found.exact_bias = None if bias is None else stepped(self.bias.double(), self.db)
        return found

    def forget(self) -> None:
        """Drops every truth and baseline of the weights' own size; those of y and dX stay."""
        for name in ("trained", "dw", "expected_dw"):
            self.__dict__.pop(name, None)
