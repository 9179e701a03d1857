"""A case of the linear study on one rank: inputs from independent seeds, and the truth that each method must reach."""

import copy
from functools import cached_property, partial
from typing import Any

import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine import memory
from blockshock_lib.engine.study import Problem
from blockshock_lib.files import seed
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.layers.parts import Part, term_mask
from blockshock_lib.layers.sharded import ShardedLinear
from blockshock_lib.studies.linear import training
from blockshock_lib.studies.linear.costs import CaseCosts
from blockshock_lib.studies.linear.folded import orders
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.params import Case, expand
from blockshock_lib.studies.linear.phases import PHASES
from blockshock_lib.studies.linear.reference import Reference
from blockshock_lib.studies.linear.runner import LinearRunner


class LinearProblem(CaseCosts, Problem):
    """y = x W^T + b for one case, on one rank's device, and its gradients for one dy. W [N, K] has entries of variance
    1/K, so that y is of order 1; x [B, K] has a seed of its own, for each `repeat` another. `keep` [N, K]: True where
    term 0 holds the entry; None where no method splits W. `reduced`: the method by which the ways to add up were timed,
    as fast in every method.
    """

    def __init__(self, case: Case, params: Any, *, device: torch.device, group: Group | None = None, repeat: int = 0):
        Problem.__init__(self, case, params, device=device, group=group or Group(), repeat=repeat)
        self.phase, self.reduced = PHASES[case.phase], []
        self.weight = self._weight("weight")
        bias = torch.randn(case.out_features, generator=self._seed("bias"), device=device).to(self.dtype)
        self.bias = bias if case.bias else None
        self.x = self._inputs(case.workload.distribution, "x", repeat)
        # [B, N], normal, of variance 1/(B K): for inputs of order 1 the entries of dW are then as large as W's.
        dy = torch.randn(case.batch, case.out_features, generator=self._seed("dy", repeat), device=device)
        self.dy = dy.mul_((case.batch * case.in_features) ** -0.5).to(self.dtype)
        self.keep, self._buffers, self._rows, self._columns = None, {}, slice(None), slice(None)
        self.unfold: dict[str, torch.Tensor] = {}  # by tensor: where the columns of what was made belong
        if any(METHODS[name].load().uses_mask for name in case.methods):
            self.keep = masks.make(case.mask, self.weight.shape, weight=self.weight, seed=case.seed, device=device)
        self.learning_rate = params and case.optimizer and getattr(params.learning_rates, case.optimizer)
        optimizer = partial(training.make_optimizer, case.optimizer, learning_rate=self.learning_rate)
        self.reference = Reference(self.weight, self.bias, self.x, self.dy, self.keep, optimizer)

    @cached_property
    def smallest(self) -> bool:
        """The optimizer's first case: the one whose loss curve is taken."""
        return self.case == next((one for one in expand(self.params) if one.optimizer == self.case.optimizer), None)

    def _seed(self, what: str, draw: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed(self.case.seed, what, draw))

    def _weight(self, what: str) -> torch.Tensor:
        n, k = self.case.out_features, self.case.in_features
        return (torch.randn(n, k, generator=self._seed(what), device=self.device) * k**-0.5).to(self.dtype)

    def _inputs(self, distribution: str, what: str, draw: int) -> torch.Tensor:
        """x [B, K]. gaussian: N(0, 1). uniform: U(-1, 1). activation: heavy tails (Student's t, 3 degrees of freedom)
        and one channel in 128 twenty times as large, the outlier channels of transformers (arXiv:2208.07339).
        """
        size = (self.case.batch, self.case.in_features)
        drawn = dict(generator=self._seed(what, draw), device=self.device)
        if distribution == "uniform":
            return (torch.rand(size, **drawn) * 2 - 1).to(self.dtype)
        x = torch.randn(size, **drawn)
        if distribution == "activation":
            x = x / (sum(torch.randn(size, **drawn).square_() for _ in range(3)) / 3).sqrt_()
            outlier = torch.randperm(size[1], **drawn)[: max(1, size[1] // 128)]
            x[:, outlier] *= 20
        return x.to(self.dtype)

    @cached_property
    def teacher(self) -> torch.Tensor:
        """W* [N, K]: what the loss curve has the weights learn."""
        return self._weight("teacher")[self._rows][:, self._columns]

    def batch(self, step: int) -> torch.Tensor:
        """x [B, K] of a step of the loss curve: standard normal, for a curve compares methods and not workloads."""
        return self._inputs("gaussian", "batch", step)[:, self._columns]

    def prepare(self, method: str) -> None:
        """Truths, baselines and inputs, so that their bytes are no method's; then whether a training step fits."""
        references = [self.reference, self.reference.trained] if self.phase.train else [self.reference]
        for reference in references:
            _ = reference.y, self.phase.backward and reference.dx
        if self.phase.train:
            needed = self.training_bytes(method).peak * (self.case.world_size if self.case.emulated else 1)
            if needed > (there := memory.free(self.device)):
                sizes = f"needs {needed / memory.GIB:.4g} GiB, {there / memory.GIB:.4g} GiB are free"
                raise torch.OutOfMemoryError(f"a training step with {self.case.optimizer} {sizes}")
            _ = self.reference.expected_dw, self.reference.expected_db
        for reference in references:
            for what in ("y", "dx")[: 1 + self.phase.backward]:
                self.expected(method, what, reference)
        if METHODS[method].folded:
            _ = self.folded

    def forget(self) -> None:
        self.reference.forget()

    def expected(self, name: str, what: str = "y", reference: Reference | None = None) -> torch.Tensor:
        """What rounding alone allows: "y" or "dx" by plain low-precision products sharded as method `name` shards."""
        return (reference or self.reference).expected(what, self.parts(name), METHODS[name].periodic_only)

    def parts(self, name: str) -> list[Part]:
        """The parts of W that the working ranks of method `name` hold, in rank order."""
        layer, ranks = METHODS[name].load(), self.case.world_size
        return [layer.part(rank, ranks, *self.weight.shape) for rank in range(layer.ranks(ranks))]

    def sharding_fault(self, name: str) -> str:
        """ "" where the ranks' parts are exactly W. The baseline shards by the same, so a fault would excuse itself."""
        held = torch.zeros_like(self.weight, dtype=torch.uint8)
        for part in self.parts(name):
            held[part.rows, part.cols] += 1 if part.term is None else term_mask(self.keep, part)
        wrong = int((held != 1).sum())
        return f"{wrong} of {held.numel()} weights are held by no rank or by several" if wrong else ""

    def _options(self, name: str) -> dict[str, object]:
        return METHODS[name].options(self.case.product, frozen=not self.case.optimizer, dw=self.case.dw)

    def unsupported(self, name: str) -> str:
        layer, options = METHODS[name].load(), self._options(name)
        return layer.unsupported(self.case.mask, self.device, self.dtype, **options) or self.too_large(name)

    def build(self, method: str) -> LinearRunner:
        return LinearRunner(self.folded if METHODS[method].folded else self, method)

    @cached_property
    def folded(self) -> "LinearProblem":
        """The same with inputs, gradients, bias and teacher in the order that a folded method's neighbours keep."""
        n, k = (one.to(self.device) for one in orders(self.case.mask, *self.weight.shape))
        found = copy.copy(self)
        found._rows, found._columns = n, k
        found.unfold = {"y": n.argsort(), "dx": k.argsort(), "db": n.argsort()}
        found.bias, found.x, found.dy = None if self.bias is None else self.bias[n], self.x[:, k], self.dy[:, n]
        found.__dict__.pop("teacher", None)
        return found

    def layer(self, name: str) -> ShardedLinear:
        make, options = METHODS[name].load(), self._options(name)
        keep = self.keep if make.uses_mask else None
        return make(self.weight, self.bias, mask=self.case.mask, keep=keep, group=self.group, **options)

    def shared(self, what: str, weight: torch.Tensor) -> torch.Tensor:
        """Of the weight's shape, on the one storage for `what` that all methods share while they are timed."""
        if what not in self._buffers:
            entries = int(max(self.entries(name) for name in self.case.methods))
            self._buffers[what] = torch.full((entries,), 1e-3, dtype=self.dtype, device=self.device)
        return self._buffers[what][: weight.numel()].view(weight.shape)
