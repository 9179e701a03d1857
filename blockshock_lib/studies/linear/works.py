"""What is timed of each method: the pieces of its forward, backward or training step, each as calls to make."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.study import Check, Runner
from blockshock_lib.engine.timing import Work
from blockshock_lib.layers import BlockShockLinear, RowParallelLinear, ShardedLinear
from blockshock_lib.studies.linear import lines, ways
from blockshock_lib.studies.linear.training import NEGLIGIBLE_LR, Trainer, eager_step

ORDERS = {True: "overlapped", False: "in turn"}  # of dX's collective and dW
CHUNKS = (1, 2, 4)  # pieces that the batch may be cut into, the collective of one beside the product of the next
LEAST_PIECE = 512  # rows: of smaller pieces no cut has paid, as their products are no shorter than the whole one


class Works:
    """Makes the works of one method over all its copies, on every rank alike."""

    def __init__(self, run: CaseRun, copies: Sequence[Runner]):
        self.run, self.copies, self.one = run, copies, copies[0]
        self.problem, self.name, self.phase = self.one.problem, self.one.name, self.one.phase
        self.layers = [copy.layer for copy in copies]
        self.layer, self.x, self.dy = self.layers[0], self.problem.x, self.problem.dy
        stores = [layer.store for layer in self.layers if isinstance(layer, BlockShockLinear) and layer.active]
        self.owners = [*self.layers, *stores]
        self.counts = [1]  # into how many pieces the batch may be cut

    def all(self) -> list[Work]:
        """All that the phase times; the forward's form and cut, and the backward's order, are chosen first."""
        if not self.problem.case.emulated:
            self.choose_forward()
        if not self.phase.backward:
            found = self.forward()
            return found + self.ways(found)
        if self.phase.train and self.has_orders:
            self._take(overlap=self.run.timer.fastest({order: self.backward("", order) for order in ORDERS}))
        return (self.trained() if self.phase.train else self.frozen()) + self.forward() + self.input_gradient()

    def work(self, metric: str, call: Callable[[ShardedLinear], Any], detail: str = "", **how: Any) -> Work:
        """`call` on the layer of each copy."""
        calls = [partial(call, layer) for layer in self.layers]
        return Work(metric, calls, detail, active=self.one.active, owners=self.owners, **how)

    def made(self, y: torch.Tensor | None) -> Iterator[Check]:
        return self.one.compared({"y": y}, record=False)

    def passed(self, made: tuple | None) -> Iterator[Check]:
        return self.one.compared(dict(zip(("y", "dx"), made or (None, None), strict=True)), record=False)

    def forward(self) -> list[Work]:
        """The whole forward, its product and its collective alone. What is the same work is timed once."""
        x, heavy, way = self.x, not self.phase.backward, ways.taken(self.layer, self.x)
        # The product's way may be one of several that are compared.
        several = heavy and way in (many := ways.products(self.layer, x)) and len(many) > 1
        sent, others = self.problem.cost(self.name).sent, ("product_by_kernel",) * several
        alone = not sent and self.problem.bias is None
        detail, also = (way, ("compute_kernel", *others)) if alone else ("", ())
        if len(self.counts) > 1:
            detail, also = str(self.layer.chunks), ("forward_chunks_kernel",)
        how, forward = {"recheck": self.made, "heavy": heavy}, lambda one: one.multiply(x)
        found = [
            self.work("forward_kernel", forward, detail, also=also, traced=heavy, **how),
            self.work("forward_call", forward, eager=True),
        ]
        if not alone:
            found.append(self.work("compute_kernel", lambda one: one.local(x), way, also=others))
        if sent:
            found.append(self.collective("reduce_kernel", lambda: self.layer.local(x), self.layer.reduce))
        for count in (count for count in self.counts if count != self.layer.chunks):
            found.append(self.work("forward_chunks_kernel", self._by(forward, chunks=count), str(count), **how))
        return found

    def _by(self, call: Callable[[ShardedLinear], Any], **settings: Any) -> Callable[[ShardedLinear], Any]:
        """`call` with these settings, whatever the layer takes."""

        def made(one: ShardedLinear) -> Any:
            taken = {name: getattr(one, name) for name in settings}
            vars(one).update(settings)
            try:
                return call(one)
            finally:
                vars(one).update(taken)

        return made

    def _pass(self, one: ShardedLinear) -> None:
        """The forward, and dX too where the phase has it and a form changes it."""
        one.multiply(self.x)
        if self.phase.backward and one.forms:
            one.start_dgrad(one.local_dgrad(self.dy)).wait()

    def choose_forward(self) -> None:
        """Has the forward take the form, then cut its batch, as a few samples say is fastest, on all ranks alike."""
        self.counts = self.tuned_counts()
        for name, values in (("form", self.layer.forms), ("chunks", self.counts)):
            if len(values) > 1:
                tried = {one: self.work("forward_kernel", self._by(self._pass, **{name: one})) for one in values}
                self._take(**{name: self.run.timer.fastest(tried)})

    def tuned_counts(self) -> list[int]:
        """Of `CHUNKS` those that can run, each with its own fastest product and way to be added up."""
        most = self.problem.case.batch // LEAST_PIECE if self.layer.collective else 1
        counts = [count for count in CHUNKS if count <= max(1, most)]
        found = []
        for count in reversed(counts) if len(counts) > 1 else ():  # uncut in the end
            self._take(chunks=count)
            if self.run.attempt(self.name, lambda: self.run.tune(self.one) or True, "forward_chunks_kernel"):
                found.append(count)
                for copy in self.copies[1:]:
                    if copy.active:
                        copy.tune()  # finds the choice that the first one made
        self._take(chunks=1)
        return sorted(found) if 1 in found else [1]

    def _take(self, **settings: Any) -> None:
        for layer in self.layers:
            for name, value in settings.items():
                setattr(layer, name, value)

    def collective(self, metric: str, make: Callable[[], torch.Tensor], join: Callable[[torch.Tensor], Any]) -> Work:
        """A collective alone, over and over on the partial result of the first copy."""
        if not self.one.active:
            return self.work(metric, lambda one: None)
        # Where it lies: the collective may take it from a workspace that the ranks share, as it does in the layer.
        partial_result = make()
        # The all-reduce may add in place: without a fresh start the numbers would grow to infinity.
        restart = partial(partial_result.copy_, partial_result.clone())
        return self.work(metric, lambda _: join(partial_result), before=restart)

    def ways(self, forward: list[Work]) -> list[Work]:
        found = ways.of_product(self.copies)
        if isinstance(self.layer, RowParallelLinear) and self.run.once("reference lines"):
            found += lines.works(self)
        if not self.problem.reduced and (each := ways.reductions(self.one)):
            self.problem.reduced.append(self.name)
            taken = next(work for work in forward if work.metric == "reduce_kernel")
            taken.detail, taken.also = each[0].detail, ("reduce_by_kernel",)
            found = each[1:] + found
        return found

    def input_gradient(self) -> list[Work]:
        """dX alone, and its collective alone."""
        dy, layer = self.dy, self.layer
        found = [self.work("dx_kernel", lambda one: one.local_dgrad(dy), layer.dgrad_by)]
        if self.problem.pieces(self.name)["dx"].sent:
            join = lambda made: layer.start_dgrad(made).wait()  # noqa: E731
            found.append(self.collective("reduce_dx_kernel", lambda: layer.local_dgrad(dy), join))
        return found

    def frozen(self) -> list[Work]:
        """Forward and dX, as kernels and as a user's call; dX with its collective."""
        leaf = self.x.detach().requires_grad_()

        def dx(one: ShardedLinear) -> torch.Tensor:
            return one.start_dgrad(one.local_dgrad(self.dy)).wait()

        def user(one: ShardedLinear) -> None:
            with torch.enable_grad():
                one(leaf).backward(self.dy)
            leaf.grad = None

        both = {"recheck": self.passed, "heavy": True, "traced": True}
        return [
            self.work("pass_kernel", lambda one: (one.multiply(self.x), dx(one)), **both),
            self.work("backward_kernel", dx),
            self.work("pass_call", user, eager=True),
        ]

    @property
    def has_orders(self) -> bool:
        """Whether dX has a collective that can run beside dW: on ranks of their own, not emulated ones."""
        return bool(self.problem.pieces(self.name)["dx"].sent)

    def backward(self, metric: str, overlap: bool | None = None, **how: Any) -> Work:
        """dX, dW and db; dX's collective in the order that is given, or else in that of the layers."""
        detail = "" if overlap is None else ORDERS[overlap]
        return self.work(metric, lambda one: one.backward(self.dy, self.x, overlap=overlap), detail, **how)

    def trained(self) -> list[Work]:
        """The step, and its pieces in each order and way. Every copy has an optimizer of its own."""
        x, dy, layer, taken = self.x, self.dy, self.layer, self.layer.overlap
        leaf = x.detach().requires_grad_()
        trainers = {one: Trainer(one, self.problem.case.optimizer, NEGLIGIBLE_LR) for one in self.layers}
        if len(trainers) == 1 and self.one.active:
            self.share_state(trainers[layer])

        def give() -> None:
            for trainer in trainers.values():
                self.give_gradients(trainer)

        def dw(metric: str, by: str, also: tuple[str, ...] = ()) -> Work:
            return self.work(metric, lambda one: one.finish_wgrad(one.local_wgrad(dy, x, by), by), by, also=also)

        def user(one: ShardedLinear) -> None:
            eager_step(one, trainers[one].optimizer, leaf, dy)

        others = [by for by in layer.wgrad_strategies() if by != layer.wgrad_by]
        stages = {one: one.post_step() for one in self.layers}
        orders = [taken, not taken] if self.has_orders else []
        return [
            self.work("step_kernel", lambda one: trainers[one].step(x, dy), recheck=self.step, heavy=True, traced=True),
            self.backward("backward_kernel", *orders[:1], also=("backward_order_kernel",) * bool(orders)),
            dw("dw_kernel", layer.wgrad_by, ("dw_strategy_kernel",) if others else ()),
            *(self.backward("backward_order_kernel", order) for order in orders[1:]),
            *(dw("dw_strategy_kernel", by) for by in others),
            self.work("optimizer_kernel", lambda one: trainers[one].optimizer.step(), before=give),
            *(self.work(f"{s}_kernel", lambda one, s=s: stages[one][s]()) for s in stages[layer]),
            self.work("step_call", user, eager=True),
        ]

    def step(self, made: tuple | None) -> Iterator[Check]:
        """The checks of a timed step: y and dX by the gate, gradients as they were when admitted."""
        y, dx, *timed = made or (None,) * 4
        yield from self.passed((y, dx))
        again = self.layer.backward(self.dy, self.x)[1:] if self.one.active else (None, None)
        count = 1 + (self.problem.bias is not None)
        for gradient, admitted in zip([*timed, None, None][:count], again[:count], strict=True):
            if gradient is None and admitted is not None:
                gradient = torch.full_like(admitted, torch.nan)  # a step that made none is wrong
            yield Check("a gradient of the timed step", gradient, None, admitted)

    def give_gradients(self, trainer: Trainer) -> None:
        """Gradients of which only the size matters, as in a step, where they have just been written."""
        weight, *biases = trainer.parameters or [None]
        if weight is not None:
            trainer.assign(self.problem.shared("gradient", weight), torch.zeros_like(biases[0]) if biases else None)

    def share_state(self, trainer: Trainer) -> None:
        """Puts the optimizer's state on the storage that all share: that of all methods would not fit at once."""
        self.give_gradients(trainer)
        trainer.optimizer.step()
        state = trainer.optimizer.state[weight := trainer.parameters[0]]
        for what, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                state[what] = self.problem.shared(what, weight)
        trainer.drop_gradients()
