"""The linear study as the engine sees it: inputs from independent seeds, the truth, and the layers that must
reach it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property

import torch
from torch import nn

from blockshock_lib import sparse24
from blockshock_lib.comm import Group
from blockshock_lib.layers import compressions
from blockshock_lib.layers.case_costs import DTYPES, CaseCosts
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.layers.part import Part, part_of, term_mask
from blockshock_lib.layers.reference import Reference
from blockshock_lib.layers.sharded import ShardedLinear
from blockshock_lib.methods import METHODS
from blockshock_lib.plan import Case


class LinearProblem(CaseCosts):
    """y = x W^T + b for one case, on one device, and its gradients for one dy.

    W [N, K] has entries of variance 1/K, so that y is of order 1; x [B, K] is drawn from the workload's distribution
    with a seed of its own, and afresh for each `draw`. The same case and draw give the same numbers on every rank of a
    kind of device.

    Attributes:
        weight, bias, x: the operands, in the case's dtype.
        keep: [N, K] bool, True where term 0 holds the entry; None where no method splits W.
        reference: truths and baselines with the weights as they are at first.
    """

    def __init__(self, case: Case, device: torch.device, draw: int = 0):
        super().__init__(case)
        self.device, self.dtype, self.draw = device, DTYPES[case.dtype], draw
        self.weight = self._weight("weight")
        bias = torch.randn(case.out_features, generator=self._seed("bias"), device=device).to(self.dtype)
        self.bias = bias if case.bias else None
        self.x = self._inputs(case.workload.distribution, self._seed("x", draw))
        self.keep = self._keep() if any(METHODS[name].load().uses_mask for name in case.methods) else None

    def _seed(self, what: str, draw: int = 0) -> torch.Generator:
        digest = hashlib.sha256(f"{self.case.seed}/{what}/{draw}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7]))

    def _weight(self, what: str) -> torch.Tensor:
        n, k = self.case.out_features, self.case.in_features
        return (torch.randn(n, k, generator=self._seed(what), device=self.device) * k**-0.5).to(self.dtype)

    def _inputs(self, distribution: str, seed: torch.Generator) -> torch.Tensor:
        return inputs(distribution, self.case.batch, self.case.in_features, seed, self.device).to(self.dtype)

    def _keep(self) -> torch.Tensor:
        shape = (self.case.out_features, self.case.in_features)
        return sparse24.masks.make(self.case.mask, shape, weight=self.weight, seed=self.case.seed, device=self.device)

    @cached_property
    def dy(self) -> torch.Tensor:
        """[B, N], normal, of variance 1/(B K): for inputs of order 1 the entries of dW are then as large as W's."""
        case = self.case
        dy = torch.randn(case.batch, case.out_features, generator=self._seed("dy", self.draw), device=self.device)
        return dy.mul_((case.batch * case.in_features) ** -0.5).to(self.dtype)

    @cached_property
    def teacher(self) -> torch.Tensor:
        """W* [N, K]: what the loss curve has the weights learn."""
        return self._weight("teacher")

    def batch(self, step: int) -> torch.Tensor:
        """x [B, K] of a step of the loss curve: standard normal, for a curve compares methods and not workloads."""
        return self._inputs("gaussian", self._seed("batch", step))

    # What must be reached

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.weight, self.bias, self.x, self.dy, self.keep)

    @cached_property
    def truth(self) -> torch.Tensor:
        """y [B, N] in float64."""
        return self.reference.y

    def train(self, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """Makes `trained`, the reference after a few steps of the optimizer that is made for given parameters."""
        self.trained = self.reference.trained(optimizer)

    def forget(self) -> None:
        """Drops every truth and baseline of the weights' own size; those of y and dX stay."""
        self.trained = None
        for name in ("dw", "expected_dw"):
            self.reference.__dict__.pop(name, None)

    def expected(self, name: str, what: str = "y", reference: Reference | None = None) -> torch.Tensor:
        """What rounding alone allows: "y" or "dx" by plain low-precision products sharded as method `name` shards."""
        reference, gathers = reference or self.reference, METHODS[name].load().gathers
        made = reference.expected if what == "y" else reference.expected_dx
        return made(self.parts(name), gathers)

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

    # Methods

    def _options(self, name: str) -> dict[str, object]:
        return METHODS[name].options(self.case.product, frozen=not self.case.optimizer, dw=self.case.dw)

    def unsupported(self, name: str, features: int | None = None) -> str:
        """Why method `name` cannot run this case here; "" when it can. `features` as in `training_bytes`."""
        layer, options = METHODS[name].load(), self._options(name)
        return layer.unsupported(self.case.mask, self.device, self.dtype, **options) or self.too_large(name, features)

    def build(self, name: str, group: Group) -> ShardedLinear | Emulated:
        """This process's share of method `name`: one rank's layer, or all of them where the case is emulated."""
        make, options = METHODS[name].load(), dict(self._options(name), mask=self.case.mask)
        if make.uses_mask:
            options["keep"] = self.keep
        if not self.case.emulated:
            return make(self.weight, self.bias, group=group, **options)
        world = self.case.world_size
        return Emulated([make(self.weight, self.bias, group=Group(r, world), **options) for r in range(world)])

    def compressions(self, name: str, group: Group) -> dict[str, Callable[[], object]]:
        """Every way to pack this process's part of W for method `name`; none where that chooses no way to pack."""
        if not METHODS[name].chooses:
            return {}
        parts = self.parts(name) if self.case.emulated else [self.parts(name)[group.rank]]
        every = [compressions.ways(part_of(self.weight, self.keep, part), term_mask(self.keep, part)) for part in parts]
        return {way: lambda way=way: [ways[way]() for ways in every] for way in every[0]}


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
