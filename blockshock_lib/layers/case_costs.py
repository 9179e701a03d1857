"""What a method must at least do and hold in a case; no operand is made for it."""

from __future__ import annotations

import torch

from blockshock_lib.layers.costs import MOMENTS, Cost, Holding, Shape
from blockshock_lib.methods import METHODS
from blockshock_lib.plan import Case
from blockshock_lib.sparse24.product import choose

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class CaseCosts:
    """Costs of one rank of each method in `case`; for an emulated case those of all ranks, without communication."""

    def __init__(self, case: Case):
        self.case = case

    def _shape(self, name: str, features: int | None = None) -> Shape:
        """With `features`, that of a square weight of so many instead of the case's."""
        case = self.case
        sizes = (case.batch, case.in_features, case.out_features, DTYPES[case.dtype].itemsize, case.world_size)
        update = METHODS[name].update if case.optimizer else None
        stock = METHODS[name].product == "torch"
        shape = Shape(*sizes, case.mask, update=update or "packed", dw=case.dw, stock=stock)
        # Emulated ranks have nobody to swap entries with.
        alone = case.emulated and METHODS[name].load().dw_choice(shape) == "exchange"
        shape = shape._replace(dw="full") if alone else shape
        return shape if features is None else shape._replace(in_features=features, out_features=features)

    def _ranks(self, name: str) -> int:
        return METHODS[name].load().ranks(self.case.world_size) if self.case.emulated else 1

    def _all(self, name: str, cost: Cost) -> Cost:
        if not self.case.emulated:
            return cost
        ranks = self._ranks(name)
        # All partial results are alive at the end, and the temporaries of one rank.
        peak = ranks * (cost.weights + cost.written) + (cost.peak - cost.weights - cost.written)
        return Cost(*(value * ranks for value in cost))._replace(sent=0.0, peak=peak)

    def cost(self, name: str) -> Cost:
        """The least work of one forward."""
        return self._all(name, METHODS[name].load().cost(self._shape(name)))

    def cost_dx(self, name: str) -> Cost:
        return self._all(name, METHODS[name].load().cost_dx(self._shape(name)))

    def dw_by(self, name: str) -> str:
        """The strategy for dW that the method takes in this case."""
        return METHODS[name].load().dw_choice(self._shape(name))

    def cost_dw(self, name: str, by: str) -> Cost:
        return self._all(name, METHODS[name].load().cost_dw(self._shape(name), by))

    def cost_stages(self, name: str) -> dict[str, Cost]:
        """Stage -> the least work of it; the keys of a runner's `stages()`."""
        found = METHODS[name].load().cost_stages(self._shape(name))
        return {stage: self._all(name, cost) for stage, cost in found.items()}

    def cost_compress(self, name: str) -> Cost | None:
        """Of packing a weight whose mask is known, for the forward and for dX; None where nothing is packed."""
        found = METHODS[name].load().cost_compress(self._shape(name))
        return None if found is None else self._all(name, found)

    def entries(self, name: str) -> float:
        """Weights that the optimizer moves."""
        return self._ranks(name) * METHODS[name].load().entries(self._shape(name))

    def cost_optimizer(self, name: str) -> Cost:
        """Reads weight, gradient and state, writes weight and state; its few FLOPs are not counted."""
        moments = MOMENTS[self.case.optimizer]
        one = self.entries(name) * DTYPES[self.case.dtype].itemsize
        return Cost(0.0, (2 + moments) * one, (1 + moments) * one, 0.0, one, one)

    def training_bytes(self, name: str, features: int | None = None) -> Holding:
        """What a step holds; with `features`, that of a square weight of so many instead of the case's."""
        shape, ranks = self._shape(name, features), self._ranks(name)
        one = METHODS[name].load().training_bytes(shape, self.case.optimizer)
        held = {part: ranks * getattr(one, part) for part in ("weights", "copies", "gradients", "optimizer")}
        # Of emulated ranks all partial results are alive at once.
        return one._replace(**held, scratch=one.scratch + (ranks - 1) * max(shape.y, shape.x))

    def too_large(self, name: str, features: int | None = None) -> str:
        """Why the 2:4 product of method `name` cannot multiply what one rank holds; "" when it can, or there is none.

        `features` as in `training_bytes`.
        """
        method, shape = METHODS[name], self._shape(name, features)
        if method.product is None:
            return ""
        term = (shape.out_features, int(shape.term_columns))
        return choose(method.product or self.case.product, self.case.device).too_large(term)
