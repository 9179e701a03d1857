"""gallery_accuracy on one rank: a GPT trained dense and then pruned in each way, or one that is trained 2:4."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.study import Check, Problem, Runner, Sample
from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.layers import sparsify
from blockshock_lib.layers.gpt import corpus
from blockshock_lib.layers.gpt.training import Trainer, validate
from blockshock_lib.layers.sparsify.fake import soft_threshold
from blockshock_lib.studies.gallery.decode import LOOSER, DecodeProblem, linears
from blockshock_lib.studies.gallery.methods import ARMS, Arm
from blockshock_lib.studies.gallery.params import HALF, Case, Params
from blockshock_lib.studies.gallery.problem import GalleryProblem
from blockshock_lib.studies.gallery.tasks import GPT, Teacher, drawn
from blockshock_lib.studies.gallery.training import TrainingProblem
from blockshock_lib.studies.gpt.problem import untold

CHECKED = 64  # positions that are checked
SHARE = 0.02  # by which a layer's share of kept units may differ from what is asked: units are whole
RAMP = 0.5  # share of all steps in which "gradual" and "decay" come to 2:4


class Blocks(sparsify.BlockSparse):
    """Outputs may be left with their bias alone: what that costs is measured."""

    def refuse_empty(self, keep: Tensor) -> None:
        pass


def opened(case: Case, params: Params, **place: Any) -> Problem:
    kinds = {"gallery_training": TrainingProblem, "gallery_decode": DecodeProblem, "gallery_accuracy": AccuracyProblem}
    return kinds.get(case.phase, GalleryProblem)(case, params, **place)


class AccuracyProblem(Problem):
    """`trained`: the dense model after its last step, of which the pruned arms of the same case are made."""

    def __init__(self, case: Case, params: Params, **place: Any):
        super().__init__(case, params, **place)
        self.settings, self.trained = params.accuracy, None
        asked = self.settings
        if asked.task == "teacher":
            self.task = Teacher(replace(case, methods=()), asked)
        else:
            self.task = corpus.Text(corpus.chosen(asked.data, asked.task, case.vocab), case, asked)
        self.steps = max(1, case.tokens // (case.batch * case.context))
        self.tokens = self.task.at(0)[0][:1, :CHECKED].to(self.device)

    def build(self, method: str) -> Runner:
        return (Pruned if ARMS[method].method else Trained)(self, ARMS[method])

    def drawn(self) -> GPT:
        return drawn(self.case, "weights").to(self.device)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype.itemsize < 4)

    def check(self, made: Tensor, plain: GPT, fault: str = "") -> Check:
        """Logits beside those of a dense model in the same dtype and of its float64."""
        with self.autocast():
            baseline = plain(self.tokens)
        truth = copy.deepcopy(plain).double()(self.tokens)
        flat = (x.flatten(0, 1) for x in (made, baseline, truth))
        return Check("logits", *flat, "", looser=LOOSER, fault=fault, depth=4 * len(plain.blocks))


class Trained(Runner):
    """A training from the first step on, dense or by a schedule of fake_sparsify_."""

    def __init__(self, problem: AccuracyProblem, arm: Arm):
        self.problem, self.arm, self.model = problem, arm, problem.drawn()
        if arm.schedule:
            steps = max(1, round(RAMP * problem.steps)) if arm.schedule in ("gradual", "decay") else 0
            # Under one mask what is left out never comes back, so its gradient would only take part in the clipping.
            gradient = "sparse" if arm.schedule == "once" else "straight-through"
            schedule = sparsify.PruneSchedule(arm.schedule, steps, gradient)
            sparsify.fake_sparsify_(self.model, sparsify.Sparse24(), schedule=schedule)
        self.trainer = Trainer(self.model, problem.settings, problem.steps, problem.task, problem.dtype)

    def checks(self, run: CaseRun) -> Iterator[Check]:
        """As they are trained, at the end of the schedule, against the weights by its formula."""
        self.trainer.reach(self.problem.steps)
        with run.weighed(), self.problem.autocast():
            made = self.trainer.loss(self.problem.tokens)
        plain = self.problem.drawn()
        for module in linears(plain) if self.arm.schedule else ():
            module.weight.copy_(expected(module.weight, self.arm.schedule))
        yield self.problem.check(made, plain)

    def samples(self, run: CaseRun, done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
        yield from untold(run, self.course(), done)
        if not self.arm.schedule:
            self.problem.trained = self.model

    def course(self) -> Iterator[Sample]:
        problem, task = self.problem, self.problem.task
        yield Sample("corpus", task.count, detail=task.digest)
        if problem.settings.task == "teacher":
            yield Sample("teacher_loss", validate(copy.deepcopy(task.model).to(problem.device), task.held_out))
        for name, *one in self.trainer.course(problem.state):
            yield Sample(name, *one)


class Pruned(Runner):
    """The trained dense model made sparse by `sparsify_`, without any training after it."""

    def __init__(self, problem: AccuracyProblem, arm: Arm):
        self.problem, self.arm, case, how = problem, arm, problem.case, {"sparsity": HALF, "method": arm.method}
        self.config = {
            "2:4": partial(sparsify.Sparse24, arm.method),
            "unstructured": partial(sparsify.Unstructured, **how),
            "blocks": partial(Blocks, **how, block=case.block),
            "rows": partial(sparsify.StructuredRows, **how),
        }[arm.pattern]()

    def sparse(self, whole: GPT) -> GPT:
        """A sparse copy in the case's dtype. UnsupportedError where a layer of it would stay dense."""
        problem, model = self.problem, copy.deepcopy(whole).to(self.problem.dtype)
        count = -(-problem.settings.calibration // problem.case.batch)
        steps = range(problem.steps, problem.steps + count)  # behind those of the training
        texts = [problem.task.at(step)[0].to(problem.device) for step in steps]
        try:
            report = sparsify.sparsify_(model, self.config, None, None if self.arm.method == "magnitude" else texts)
        except ValueError as error:
            raise UnsupportedError(first_line(error)) from error
        for name, why in report.refused.items():
            raise UnsupportedError(f"{name}: {why}")
        return model

    def checks(self, run: CaseRun) -> Iterator[Check]:
        """The first weights pruned: what the sparse layers make against what they hold."""
        whole = self.problem.drawn()
        for parameter in (p for p in whole.parameters() if p.dim() == 1):
            parameter += 0.1 * torch.randn_like(parameter)  # the first biases are 0, and would not show
        model = run.agree(partial(self.sparse, whole))
        with run.weighed(), self.problem.autocast():
            made = model(self.problem.tokens)
        sparsify.dense_(model)
        yield self.problem.check(made, model, self.fault(model))

    def fault(self, model: GPT) -> str:
        """What of the pattern does not hold; "" where it does."""
        for module in linears(model):
            share = kept(module.weight, self.arm.pattern, self.problem.case.block)
            if abs(share - HALF) > SHARE:
                return f"a layer keeps {share:.1%} of its units, not half"
            if self.arm.pattern == "2:4" and int(module.weight.unflatten(1, (-1, 4)).count_nonzero(-1).max()) > 2:
                return "a layer keeps more than two of four neighbours"
        return ""

    def samples(self, run: CaseRun, done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
        problem, whole = self.problem, self.problem.trained
        run.refuse("" if whole else "its dense model was not trained to its end")
        if any(row["metric"] == "validation_loss" for row in done):
            return
        started = time.perf_counter()
        model = run.agree(partial(self.sparse, whole))
        if problem.device.type == "cuda":
            torch.cuda.synchronize(problem.device)
        seconds = time.perf_counter() - started
        sparsify.dense_(model)
        run.refuse(self.fault(model))
        pruned = copy.deepcopy(whole)  # all but these weights as it was trained, and multiplied as in its validation
        for module, of in zip(linears(pruned), linears(model), strict=True):
            module.weight.copy_(of.weight)
        yield Sample("prune_time", seconds)
        yield Sample("validation_loss", validate(pruned, problem.task.held_out, problem.autocast), problem.steps)


def expected(weight: Tensor, schedule: str) -> Tensor:
    """What a schedule leaves of W [N, K] at its end: the larger two of four, or S-STE's."""
    if schedule == "s-ste":
        soft = soft_threshold(weight)
        return soft * (weight * soft).sum() / soft.square().sum()
    rank = weight.abs().unflatten(1, (-1, 4)).argsort(-1).argsort(-1).flatten(1)
    return weight * (rank >= 2)


def kept(weight: Tensor, pattern: str, block: int) -> float:
    """The share of a pattern's units, blocks, rows or single weights, that are not all zero."""
    rows, columns = {"blocks": (block, block), "rows": (1, weight.shape[1])}.get(pattern, (1, 1))
    units = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3))
    return float((units != 0).double().mean())
