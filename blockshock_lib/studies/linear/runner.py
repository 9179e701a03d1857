"""One method of a case on one rank, as the engine drives it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.engine.study import Check, Problem, Runner, Sample
from blockshock_lib.engine.timing import Work
from blockshock_lib.studies.linear import training, works
from blockshock_lib.studies.linear.methods.method import FORMULAS
from blockshock_lib.studies.linear.reference import Reference
from blockshock_lib.studies.linear.training import Trainer

Made = dict[str, torch.Tensor | None]  # by name: "y", "dx"; None on a rank that stands by


class LinearRunner(Runner):
    def __init__(self, problem: Problem, name: str):
        self.problem, self.name, self.phase, self.layer = problem, name, problem.phase, problem.layer(name)
        self.active = self.layer.active
        self.held: dict[str, float] = {}  # metric -> bytes that a step holds here, once the checks have made one

    def tune(self) -> None:
        self.layer.tune(self.problem.x)
        if self.phase.backward:
            self.layer.tune_dgrad(self.problem.dy)
        if self.phase.train:
            self.layer.tune_wgrad(self.problem.dy, self.problem.x)

    def tune_together(self) -> None:
        self.layer.tune_reduce(self.problem.x)

    def checks(self, run: CaseRun) -> Iterator[Check]:
        """y, dX, dW and db; the weights after a few steps, y and dX with them. Ends with the first weights again."""
        problem = self.problem
        dy = problem.dy.clone() if self.phase.backward else None  # a step holds its own, as a loss would make it
        if dy is not None:
            self._forward_and_dx(run, dy)  # first call: lets lazy buffers be allocated before the peak is read
        with run.weighed(problem.case.batch, problem.case.out_features):
            made = self._forward_and_dx(run, dy)
        yield from self.compared(made, fault=problem.sharding_fault(self.name) if self.active else "")
        del made
        if self.phase.train:
            yield from self._trained(run, dy)

    def _trained(self, run: CaseRun, dy: torch.Tensor) -> Iterator[Check]:
        problem, layer, active, reference = self.problem, self.layer, self.active, self.problem.reference
        trainer = Trainer(layer, problem.case.optimizer, problem.learning_rate)
        run.agree(lambda: layer.local_wgrad(dy, problem.x) if active else None)
        dx, dw, db = trainer.backward(dy, problem.x) if active else (None, None, None)
        yield from self.compared({"dx": dx}, record=False)
        del dx
        # As a dense [N, K], joined from all ranks: so an entry in a wrong place shows as a wrong value.
        dense = layer.to_dense(dw)
        del dw
        yield Check("dw", dense, reference.expected_dw, reference.dw)
        del dense
        if problem.bias is not None:
            yield Check("db", self.unfolded("db", db), reference.expected_db, reference.db)
        run.agree(lambda: trainer.update() if active else None)
        for _ in range(reference.trained.steps - 1):
            outputs = ()
            with run.weighed():
                outputs = trainer.step(problem.x, dy) if active else ()
        self.held = trainer.held(sum(t.nbytes for t in (*outputs[:2], dy)) if active else 0)
        del outputs
        trainer.drop_gradients()
        made = self._forward_and_dx(run, dy)  # before `to_dense`, which refreshes what the steps left behind
        yield Check("weight", layer.to_dense(), reference.trained.weight, reference.trained.exact_weight)
        yield from self.compared(made, reference.trained, record=False)
        trainer.reset(problem.weight, problem.bias)

    def _forward_and_dx(self, run: CaseRun, dy: torch.Tensor | None) -> Made:
        """y, and dX where there is a dy. What one rank alone cannot do is found out before any enters a collective."""
        layer, x, active = self.layer, self.problem.x, self.active
        partial = run.agree(lambda: layer.local(x) if active else None)
        made: Made = {"y": layer.reduce(partial) if active else None}
        if dy is not None:
            partial = run.agree(lambda: layer.local_dgrad(dy) if active else None)
            made["dx"] = layer.start_dgrad(partial).wait() if active else None
        return made

    def compared(self, made: Made, reference: Reference | None = None, **how: bool | float | str) -> Iterator[Check]:
        """y and dX beside what the first weights give, or another reference's; `how` as in `Check`."""
        problem = self.problem
        reference = reference or problem.reference
        after = f" after {reference.steps} steps" if reference.steps else ""
        for what, value in made.items():
            expected, truth = problem.expected(self.name, what, reference), getattr(reference, what)
            yield Check(what + after, self.unfolded(what, value), expected, truth, "" if what == "y" else what, **how)

    def unfolded(self, what: str, value: torch.Tensor | None) -> torch.Tensor | None:
        order = self.problem.unfold.get(what)
        return value if order is None or value is None else value[..., order]

    def weigh(self) -> dict[str, float]:
        """Bytes of the weights, and what a step holds, beside what the formulas foretell."""
        cost, formula = self.problem.cost(self.name), self.problem.training_bytes(self.name)
        foretold = {f"{metric}_formula": getattr(formula, FORMULAS[metric]) for metric in self.held}
        peak = formula.peak if self.phase.backward else cost.peak
        weights = {"weight_bytes": self.layer.weight_bytes(), "weight_bytes_formula": cost.weights}
        return weights | {"peak_bytes_formula": peak} | self.held | foretold

    def samples(self, run: CaseRun, done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
        if self.phase.train and self.problem.smallest and not self.problem.repeat:
            yield from training.losses(self, run, sum(row["metric"] == "loss" for row in done))

    def operand_bytes(self) -> int:
        return self.layer.weight_bytes()

    def works(self, run: CaseRun, copies: Sequence["LinearRunner"]) -> list[Work]:
        return works.Works(run, copies).all()

    def facts(self, ceilings: Ceilings) -> dict[str, float]:
        cost, floors = self.problem.cost(self.name), self.problem.floors(self.name, ceilings, self.layer.chunks)
        counts = {f"bytes_{what}": getattr(cost, what) for what in ("read", "written", "sent")}
        return floors | {"flops": cost.flops} | counts

    def finish(self) -> None:
        if self.active:
            self.layer.weight.grad = None
