"""The linear study as the engine sees it: inputs from independent seeds, the truth, and the layers that must
reach it.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F

from blockshock_lib import sparse24
from blockshock_lib.comm import Group
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.layers.sharded import Cost, Part, Shape, ShardedLinear, part_of, term_mask
from blockshock_lib.methods import METHODS
from blockshock_lib.plan import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Rows of W that are turned to float64 at once: 1.3 GB at K = 40960.
TRUTH_ROWS = 4096


class LinearProblem:
    """y = x W^T + b for one case, on one device.

    W [N, K] has entries of variance 1/K, so that y is of order 1; x [B, K] is drawn from the workload's distribution
    with a seed of its own, and afresh for each `draw`. The same case and draw give the same numbers on every rank of a
    kind of device.

    Attributes:
        weight, bias, x: the operands, in the case's dtype.
        truth: y [B, N] in float64, from those low-precision operands.
        keep: [N, K] bool, True where term 0 holds the entry; None where no method splits W.
    """

    def __init__(self, case: Case, device: torch.device, draw: int = 0):
        self.case, self.device, self.dtype = case, device, DTYPES[case.dtype]
        n, k = case.out_features, case.in_features
        self.weight = (torch.randn(n, k, generator=self._seed("weight"), device=device) * k**-0.5).to(self.dtype)
        bias = torch.randn(n, generator=self._seed("bias"), device=device).to(self.dtype)
        self.bias = bias if case.bias else None
        self.x = inputs(case.workload.distribution, case.batch, k, self._seed("x", draw), device).to(self.dtype)
        self._expected: dict[tuple, torch.Tensor] = {}
        # Made before any method is weighed, so that their bytes are no method's.
        self.truth = self._truth()
        self.keep = self._keep() if any(METHODS[name].load().uses_mask for name in case.methods) else None

    def _seed(self, what: str, draw: int = 0) -> torch.Generator:
        digest = hashlib.sha256(f"{self.case.seed}/{what}/{draw}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7]))

    def _keep(self) -> torch.Tensor:
        shape = (self.case.out_features, self.case.in_features)
        return sparse24.masks.make(self.case.mask, shape, weight=self.weight, seed=self.case.seed, device=self.device)

    def unsupported(self, name: str) -> str:
        """Why method `name` cannot run this case here; "" when it can."""
        method = METHODS[name]
        options = method.options(self.case.product)
        return method.load().unsupported(self.case.mask, self.device, self.dtype, **options)

    def build(self, name: str, group: Group) -> ShardedLinear | Emulated:
        """This process's share of method `name`: one rank's layer, or all of them where the case is emulated."""
        method = METHODS[name]
        options = dict(method.options(self.case.product), mask=self.case.mask)
        make = method.load()
        if make.uses_mask:
            options["keep"] = self.keep
        if not self.case.emulated:
            return make(self.weight, self.bias, group=group, **options)
        world = self.case.world_size
        return Emulated([make(self.weight, self.bias, group=Group(r, world), **options) for r in range(world)])

    def _truth(self) -> torch.Tensor:
        x = self.x.double()
        y = torch.cat([x @ rows.double().t() for rows in self.weight.split(TRUTH_ROWS)], dim=1)
        return y if self.bias is None else y.add_(self.bias.double())

    def parts(self, name: str) -> list[Part]:
        """The parts of W that the working ranks of method `name` hold, in rank order."""
        layer, case = METHODS[name].load(), self.case
        return [
            layer.part(rank, case.world_size, case.out_features, case.in_features)
            for rank in range(layer.ranks(case.world_size))
        ]

    def sharding_fault(self, name: str) -> str:
        """Why the ranks' parts are not exactly W; "" when each entry is held once. The baseline shards by the same
        parts, so a fault in them would excuse itself.
        """
        held = torch.zeros_like(self.weight, dtype=torch.uint8)
        for part in self.parts(name):
            held[part.rows, part.cols] += 1 if part.term is None else term_mask(self.keep, part)
        wrong = int((held != 1).sum())
        return f"{wrong} of {held.numel()} weights are held by no rank or by several" if wrong else ""

    def expected(self, name: str) -> torch.Tensor:
        """y [B, N] by the plainest low-precision product sharded as method `name` shards it: what rounding alone
        allows.

        Each rank's part is multiplied in the case's dtype, and the partial results are added in that dtype, in rank
        order. Zeros in a dense part shorten the chains of additions that round, so a method that gathers the columns
        it keeps (`gathers`) is compared with a product that does so too. The gate compares a method's error with this
        one's.
        """
        layer, case = METHODS[name].load(), self.case
        parts = self.parts(name)
        key = (layer.gathers, *map(repr, parts))
        if key not in self._expected:
            y = torch.zeros(case.batch, case.out_features, dtype=self.dtype, device=self.device)
            for part in parts:
                w = part_of(self.weight, None if part.term is None else self.keep, part)
                x = self.x[:, part.cols]
                if layer.gathers:
                    kept = term_mask(self.keep, part)
                    for r in range(4):
                        cols = kept[r].nonzero().flatten()
                        y[:, r::4] += F.linear(x[:, cols], w[r::4, cols])
                else:
                    y[:, part.rows] += F.linear(x, w)
            self._expected[key] = y if self.bias is None else y.add_(self.bias)
        return self._expected[key]

    def cost(self, name: str) -> Cost:
        """What one rank of method `name` must at least do; for an emulated case all ranks, without communication."""
        case = self.case
        layer = METHODS[name].load()
        cost = layer.cost(
            Shape(case.batch, case.in_features, case.out_features, self.x.element_size(), case.world_size, case.mask)
        )
        if not case.emulated:
            return cost
        ranks = layer.ranks(case.world_size)
        # All partial results are alive at the end, and the temporaries of one rank.
        peak = ranks * (cost.weights + cost.written) + (cost.peak - cost.weights - cost.written)
        return Cost(*(value * ranks for value in cost))._replace(sent=0.0, peak=peak)


def inputs(distribution: str, batch: int, features: int, seed: torch.Generator, device: torch.device) -> torch.Tensor:
    """x [batch, features] in float32.

    gaussian: N(0, 1). uniform: U(-1, 1). activation: heavy tails (Student's t with 3 degrees of freedom) and one
    channel in 128 twenty times as large, the outlier channels seen in transformers' activations (arXiv:2208.07339).
    """

    def normal() -> torch.Tensor:
        return torch.randn(batch, features, generator=seed, device=device)

    if distribution == "gaussian":
        return normal()
    if distribution == "uniform":
        return torch.rand(batch, features, generator=seed, device=device) * 2 - 1
    if distribution == "activation":
        x = normal()
        chi2 = sum(normal().square_() for _ in range(3))
        x = x / (chi2 / 3).sqrt_()
        outlier = torch.randperm(features, generator=seed, device=device)[: max(1, features // 128)]
        x[:, outlier] *= 20
        return x
    raise ValueError(f"no input distribution named {distribution!r}: gaussian, uniform or activation")
