"""One case of the gpt study on one rank: a GPT that must equal its schedule's equation, and what is then asked."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from blockshock_lib.comm import Group
from blockshock_lib.engine import roofline
from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.study import Check, Problem, Runner, Sample
from blockshock_lib.engine.timing import Timer
from blockshock_lib.errors import DataError, first_line
from blockshock_lib.files import seed
from blockshock_lib.layers.gpt import GPT, GPTConfig, Schedule, corpus, named
from blockshock_lib.layers.gpt.training import Trainer
from blockshock_lib.studies.gpt import after, truth
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.params import LAYERS, Case, Params

# Gradients are compared in these parts: where one kind is small, another must not hide what it lacks.
PARTS = {
    "d embeddings": ("tokens.weight", "positions.weight"),
    "d attention": ("attention.qkv.weight", "attention.out.weight"),
    "d MLP": ("mlp.up.weight", "mlp.out.weight"),
    "d norms and biases": ("norm.weight", "bias"),
}
# A model of 12 layers rounds at other places than its formula, which is written rank by rank.
LOOSER = 2.0
LEAD_IN_S = 0.5  # of the dense product that a training's rate is weighed by
CHECKED = 64  # positions of a model that is trained, or whose step is timed, that are checked before


class GPTProblem(Problem):
    """`model`: by tensor parallelism on as many tracks, drawn once; each method has its weights."""

    def __init__(self, case: Case, params: Params, **place):
        super().__init__(case, params, **place)
        self.trained = bool(case.tokens)
        with torch.random.fork_rng([]):  # weights are drawn on the CPU
            torch.manual_seed(seed(case.seed, "weights", self.repeat))
            config = GPTConfig(case.width, case.heads, case.vocab, case.context, LAYERS)
            self.model = GPT(config, "tensor_parallel", case.ranks)
            if not self.trained:
                _enlarge(self.model)
        self.model.to(self.device)  # each method copies it
        if self.trained:
            self.corpus = corpus.chosen(params.data, params.corpus, params.size.vocab)
            if params.corpus_digest not in ("", here := self.corpus.digest):
                raise DataError(f"corpus_digest: {params.corpus_digest} is wanted, what lies here is corpus {here}")
        else:
            draw = torch.Generator().manual_seed(seed(case.seed, "tokens", self.repeat))
            made = torch.randint(case.vocab, (case.batch, case.context + 1), generator=draw).to(self.device)
            self.tokens = made[:, :-1], made[:, 1:]

    def build(self, method: str) -> Runner:
        model = copy.deepcopy(self.model)
        model.schedule = named(METHODS[method].schedule, LAYERS)
        return (Trained if self.trained else Checked)(self, model)

    def true(self, schedule: Schedule) -> dict[str, torch.Tensor]:
        """By the schedule's equation in float64, of the weights in the case's dtype."""
        case, (tokens, targets) = self.case, self.tokens
        state = {name: x.detach().to(self.device, self.dtype).double() for name, x in self.model.named_parameters()}
        with torch.enable_grad():
            weights = {name: x.requires_grad_() for name, x in state.items()}
            return found(truth.scheduled(weights, tokens, schedule, case.heads, case.ranks), targets, weights)


class Checked(Runner):
    """A schedule over real ranks: logits, loss and gradients, and the syncs that it really makes."""

    def __init__(self, problem: GPTProblem, whole: GPT):
        self.problem, self.schedule = problem, whole.schedule
        self.tracks = whole.to(problem.device, problem.dtype)
        self.group = Counting(problem.group)
        self.model = GPT.of(self.tracks, self.group)

    def checks(self, run: CaseRun) -> Iterator[Check]:
        with run.weighed():
            made = self.made()
        tokens, targets = self.problem.tokens
        with torch.enable_grad():
            baseline = found(self.tracks(tokens), targets, dict(self.tracks.named_parameters()))
        true = self.problem.true(self.schedule)
        for name, mine in made.items():
            fault = self.fault() if name == "logits" else ""
            detail = "" if name == "logits" else name
            plain = None if name == "loss" else baseline[name]  # one number has no ratio of errors
            yield Check(name, mine, plain, true[name], detail, looser=LOOSER, fault=fault, depth=self.schedule.end)

    def made(self) -> dict[str, torch.Tensor]:
        """What `found` finds of the ranks' model, gradients gathered whole."""
        tokens, targets = self.problem.tokens
        with torch.no_grad():
            logits = self.model(tokens)
        self.group.syncs = 0
        with torch.enable_grad():
            loss = self.model(tokens, targets)
        forward = self.group.syncs
        loss.backward()
        self.counts = {"syncs_forward": forward, "syncs_backward": self.group.syncs - forward}
        self.model.sum_gradients()
        grads = self.model.gathered(lambda parameter: parameter.grad)
        self.counts["weights_used"] = used(grads)
        return parted(logits, loss.detach(), grads)

    def fault(self) -> str:
        said = len(self.schedule.syncs) if self.problem.group.world_size > 1 else 0
        for name in ("syncs_forward", "syncs_backward"):
            if self.counts[name] != said:
                return f"{name.replace('_', ' ')}: {self.counts[name]} were counted, the schedule says {said}"
        share = self.counts["weights_used"]
        return "" if share > 0.999 else f"{1 - share:.2%} of the weights are not trained"

    def samples(self, run: CaseRun, done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
        if not done:
            yield from (Sample(name, float(value)) for name, value in self.counts.items())


class Trained(Runner):
    """A schedule's tracks on one device, trained on the case's tokens."""

    def __init__(self, problem: GPTProblem, model: GPT):
        case, settings = problem.case, problem.params.training
        self.problem, self.model = problem, model
        steps = max(1, case.tokens // (case.batch * case.context))
        self.trainer = Trainer(model, settings, steps, corpus.Text(problem.corpus, case, settings), problem.dtype)

    def checks(self, run: CaseRun) -> Iterator[Check]:
        """The logits as they are trained, compiled and in 16 bits where asked, against the formula in float64."""
        tokens = self.trainer.batch(0)[0][:1, :CHECKED]
        with run.weighed(), self.trainer.autocast():
            made = self.trainer.loss(tokens)
        with self.trainer.autocast():
            baseline = self.model(tokens)
        state = {name: x.double().detach() for name, x in self.model.named_parameters()}
        true = truth.scheduled(state, tokens, self.model.schedule, self.problem.case.heads, self.problem.case.ranks)
        flat, depth = (x.flatten(0, 1) for x in (made, baseline, true)), self.model.schedule.end
        yield Check("logits", *flat, "", looser=LOOSER, depth=depth)

    def samples(self, run: CaseRun, done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
        yield from untold(run, self.course(), done)
        if self.problem.params.training.after and self.model.schedule.name == "tensor_parallel":
            try:
                yield from untold(run, after.samples(self.trainer, self.problem.params.training.distill_tokens), done)
            except RuntimeError as error:  # memory runs out here first; the arm's own losses stand, others need them
                status = "oom" if isinstance(error, torch.OutOfMemoryError) else "failed"
                run.miss(self.problem.case.methods[0], status, first_line(error), "distilled_loss")

    def course(self) -> Iterator[Sample]:
        made, text = self.problem.corpus, self.trainer.task
        yield Sample("corpus", text.count, detail=text.digest)
        if made.bytes_per_token:
            yield Sample("bytes_per_token", made.bytes_per_token)
        name = ""  # a trainer that an earlier process has brought to the end says nothing
        for name, *one in self.trainer.course(self.problem.state):
            yield Sample(name, *one)
        if name == "token_rate":
            timer = Timer(self.problem.device, self.problem.group, lead_in=(LEAD_IN_S, LEAD_IN_S), capture=False)
            yield Sample("gemm_rate", roofline.gemm_rate(timer, self.problem.dtype))


def untold(run: CaseRun, every: Iterable[Sample], done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
    """Those of which `done` holds no row; DataError: it is of another corpus. Refused where a loss is not finite."""
    told = {(row["metric"], row["repeat"], row["detail"]) for row in done}
    had = {detail for metric, _, detail in told if metric == "corpus"}
    try:
        for one in every:
            if one.metric == "corpus" and had - {one.detail}:
                raise DataError(f"the training was begun on corpus {min(had)}, this is {one.detail}: begin a new run")
            if (one.metric, one.step, one.detail) not in told:
                yield one
    except ArithmeticError as error:
        run.refuse(str(error))


class Counting:
    """A group that counts the all-reduces that it is asked for."""

    def __init__(self, group: Group):
        self.group, self.syncs = group, 0

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.group, name)

        def counted(*given: Any, **options: Any) -> Any:
            self.syncs += 1
            return own(*given, **options)

        return counted if name in ("all_reduce", "start_all_reduce") else own


def found(logits: torch.Tensor, targets: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits, loss and the gradients by PARTS of the `weights` that gave the logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())
    grads = torch.autograd.grad(loss, list(weights.values()))
    return parted(logits.detach(), loss.detach(), dict(zip(weights, grads, strict=True)))


def parted(logits: torch.Tensor, loss: torch.Tensor, grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices to be compared: logits [B S, vocab], loss [1, 1], and gradients by PARTS, [features, width]."""
    made, width = {"logits": logits.flatten(0, 1), "loss": loss.to(logits.dtype).view(1, 1)}, len(grads["norm.bias"])
    for part, endings in PARTS.items():
        some = [grad for name, grad in grads.items() if name.endswith(endings)]
        made[part] = torch.cat([grad.reshape(-1, width) for grad in some])
    return made


def used(grads: Mapping[str, torch.Tensor]) -> float:
    """The share of all weights whose gradient is not 0. Tokens that no batch holds train by the tied head."""
    return sum(float(grad.count_nonzero()) for grad in grads.values()) / sum(grad.numel() for grad in grads.values())


@torch.no_grad()
def _enlarge(model: GPT) -> None:
    """First weights are so small that a block hardly matters, and biases are 0: here each must show."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
        else:
            parameter += 0.1 * torch.randn_like(parameter)
