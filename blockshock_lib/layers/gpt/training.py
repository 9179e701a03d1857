"""Training of a GPT: optimizer, learning rate, precision, validation; it stops and goes on to the same numbers.

The recipe is that of nanoGPT and of llm.c's 124M: AdamW with betas .9 and .95 and a weight decay on matrices alone, a
linear rise, a cosine's fall to a tenth, gradients clipped at norm 1, bf16 products by autocast over fp32 weights.
"""

import contextlib
import math
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockshock_lib.errors import DataError
from blockshock_lib.layers.sparsify.fake import FakeSparse


def learning_rate(step: int, steps: int, peak: float, warmup: float, final: float) -> float:
    """Of the step with this index, from 0: a linear rise over `warmup` of all, half a cosine down to `final` of it."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return peak * (step + 1) / rise
    share = (step - rise) / max(1, steps - rise)
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * share)) / 2)


class Trainer:
    """`task`: as `corpus.Text`, whose `at` is the same for every arm of a seed, and `held_out` at each validation.
    bf16 on weights of fp32, or plain fp32. `model`: tokens and targets -> the mean cross-entropy; the schedules of its
    FakeSparse layers go with the steps.
    """

    def __init__(self, model: nn.Module, settings: Any, steps: int, task: Any, dtype: torch.dtype):
        self.model, self.settings, self.steps, self.task, self.step = model, settings, steps, task, 0
        self.device = next(model.parameters()).device
        self.dtype, self.size = dtype, 0  # tokens of a batch
        self.fakes = [module for module in model.modules() if isinstance(module, FakeSparse)]
        self.optimizer = optimizer(model, settings.learning_rate, settings.weight_decay, settings.betas)
        self.loss = model
        if settings.compiled and self.device.type == "cuda" and not self.fakes:  # which break the graph
            torch.compiler.reset()  # a process trains many models; past eight PyTorch compiles none, without a word
            self.loss = torch.compile(model, dynamic=False, fullgraph=True)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype.itemsize < 4)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [B, S], where the model is."""
        return tuple(x.to(self.device, non_blocking=True) for x in self.task.at(step))

    def course(self, path: Path | None) -> Iterator[tuple[str, float, int]]:
        """(metric, value, step) of all of it, from where an earlier process has left the model in `path`: in nats a
        token at each validation the mean loss of the steps since the last one, and that on the validation text; last,
        where it took some, the tokens a second. ArithmeticError: a loss is not finite.
        """
        if path is not None and path.exists():
            self.load(path)
        if not self.step:
            yield "validation_loss", self.validate(), 0
        count = self.settings.validations
        every = [round((i + 1) * self.steps / count) for i in range(count)]
        first, seconds, total = None, 0.0, torch.zeros((), device=self.device)
        since, started = self.step, time.perf_counter()
        while self.step < self.steps:
            total += self.one_step()
            if self.step not in every:
                continue
            mean, took = total.item() / (self.step - since), time.perf_counter() - started
            if not math.isfinite(mean):
                raise ArithmeticError(f"the loss is {mean} within the steps {since} to {self.step}")
            # The steps up to this process's first validation compile: they do not count.
            first, seconds = (self.step, 0.0) if first is None else (first, seconds + took)
            yield "train_loss", mean, self.step
            if not math.isfinite(loss := self.validate()):
                raise ArithmeticError(f"the validation loss is {loss} after {self.step} steps")
            yield "validation_loss", loss, self.step
            if path is not None:
                self.save(path)
            total, since, started = torch.zeros_like(total), self.step, time.perf_counter()
        if seconds:
            yield "token_rate", (self.step - first) * self.size / seconds, 0

    def one_step(self) -> Tensor:
        """The loss before the step."""
        settings, self.step = self.settings, self.step + 1
        rate = learning_rate(self.step - 1, self.steps, settings.learning_rate, settings.warmup, settings.final)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        tokens, targets = self.batch(self.step - 1)
        self.size = tokens.numel()
        self.reach(self.step - 1)
        with torch.enable_grad(), self.autocast():
            loss = self.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def reach(self, step: int) -> None:
        """Schedules are where they stand after so many steps."""
        for module in self.fakes:
            module.schedule.done = step

    def validate(self) -> float:
        self.reach(self.step)
        return validate(self.model, self.task.held_out, self.autocast)

    def save(self, path: Path) -> None:
        """What the next process needs to go on; whole, or not there."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        state |= {"corpus": self.task.digest, "fakes": [(module.kept, module.scale) for module in self.fakes]}
        part = path.with_suffix(".tmp")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """DataError where it was trained on another corpus, or is damaged."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except (RuntimeError, EOFError, LookupError, pickle.UnpicklingError) as error:
            if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):  # memory, or the device
                raise
            raise DataError(f"{path} cannot be read: remove it, and the training begins anew") from error
        if not (isinstance(state, dict) and {"corpus", "model", "optimizer", "step", "fakes"} <= state.keys()):
            raise DataError(f"{path} is no checkpoint of a training: remove it, and the training begins anew")
        if (was := state["corpus"]) != self.task.digest:
            raise DataError(f"the training was stopped on corpus {was}, this is {self.task.digest}: begin a new run")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        for module, (kept, scale) in zip(self.fakes, state["fakes"], strict=True):
            module.kept, module.scale = kept, scale


def optimizer(model: nn.Module, rate: float, decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """Weight decay falls on what products multiply by, not on norms, biases and embeddings of positions."""
    groups = [{"params": [], "weight_decay": decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        groups[name.endswith("bias") or "norm" in name or "position" in name]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=parameter.is_cuda)


@torch.no_grad()
def validate(
    model: nn.Module,
    held_out: Iterable[tuple[Tensor, Tensor]],
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> float:
    """Mean cross-entropy of the validation text, in nats a token."""
    total, count, device = 0.0, 0, next(model.parameters()).device
    with autocast():
        for tokens, targets in held_out:
            loss = model(tokens.to(device), targets.to(device))
            total, count = total + loss.double() * targets.numel(), count + targets.numel()
    return float(total) / count
