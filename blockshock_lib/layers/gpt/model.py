"""A GPT whose sublayers sum their partial results by a schedule: tracks on one device, or real ranks."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.gpt.schedule import Schedule
from blockshock_lib.layers.gpt.schedules import named
from blockshock_lib.layers.gpt.streams import Streams
from blockshock_lib.layers.gpt.tracks import column, row
from blockshock_lib.layers.guards import refuse_unequal
from blockshock_lib.layers.parts import ReadLinear, Share, cut, refuse_unsummed, unsummed

OTHER = "the cache holds other sequences, or those of another model, schedule, dtype or mode: begin a new one"


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. ValueError where heads do not divide the width, or a number is below 1."""

    width: int
    heads: int
    vocab: int
    context: int
    layers: int = 12

    def __post_init__(self):
        if min(vars(self).values()) < 1:
            raise ValueError(f"every number of {self} must be above 0")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide by {self.heads} heads")


class Cache:
    """Keys and values of the `length` tokens that a GPT has read, for up to `positions`; each forward with it goes on
    behind them, without gradients. Of a sequence it holds what one schedule makes on this rank.
    """

    def __init__(self, positions: int):
        self.positions, self.length, self.schedule = positions, 0, None
        self.held: dict[nn.Module, Tensor] = {}  # by attention: [2, n B, heads, positions, size]

    def grown(self, attention: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, those of the new tokens, [n B, heads, S, size], behind the others."""
        if not self.length:
            self.held[attention] = k.new_zeros(2, *k.shape[:2], self.positions, k.shape[3])
        held, end = self.held.get(attention), self.length + k.shape[2]
        fits = held is not None and (held.shape[1:3], held.dtype) == (k.shape[:2], k.dtype)
        left = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
        if not fits or (left and held.is_inference()):
            raise ValueError(OTHER)
        for place, new in zip(held, (k, v), strict=True):
            place[:, :, self.length : end] = new.detach()
        return held[0, :, :, :end], held[1, :, :, :end]

    def __deepcopy__(self, memo: dict) -> "Cache":
        made = Cache(self.positions)  # of the same model, from here on by itself
        made.length, made.schedule = self.length, self.schedule
        made.held = {attention: held.clone() for attention, held in self.held.items()}
        return made


class Attention(nn.Module):
    """Causal self-attention. The rows of `qkv` are dealt head by head, each its q, k and v: a rank's are in one run."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.size = config.width // config.heads
        self.norm, self.qkv = nn.LayerNorm(config.width), ReadLinear(config.width, 3 * config.width)
        self.out = ReadLinear(config.width, config.width)

    def forward(
        self, x: Tensor, tracks: int, apart: bool, out: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        heads = column(self.norm(x), self.qkv).unflatten(-1, (-1, 3, self.size))
        q, k, v = (one.flatten(0, -4).transpose(1, 2) for one in heads.unbind(-2))  # [n B, heads, S, size]
        mask, new = None, q.shape[2]
        if cache is not None:
            k, v = cache.grown(self, k, v)
            if new > 1 and cache.length:
                mask = torch.ones(new, k.shape[2], dtype=torch.bool, device=k.device).tril(cache.length)
        whole = cache is None or not cache.length
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=whole).transpose(1, 2).flatten(2)
        return row(y.unflatten(0, heads.shape[:-4]), self.out, tracks, apart, out)


class MLP(nn.Module):
    """Of 4 width hidden features, with GPT-2's GELU, the tanh approximation."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(config.width), ReadLinear(config.width, 4 * config.width)
        self.out = ReadLinear(4 * config.width, config.width)

    def forward(self, x: Tensor, tracks: int, apart: bool, out: Tensor | None = None) -> Tensor:
        return row(F.gelu(column(self.norm(x), self.up), approximate="tanh"), self.out, tracks, apart, out)


class GPT(nn.Module):
    """GPT-2's shape: pre-norm, LayerNorm, biases, learned positions, tied head.

    Args:
        schedule: a Schedule, or the name of one: "spd", "grouped(2)".
        tracks: of how many ranks one device computes what they would; products are batched, in no loop.
        group: the real ranks that share the model, each with its heads and hidden features.

    Weights are drawn as GPT-2's, whole, from torch's own generator; their names and shapes are the same for any
    schedule and number of tracks. On real ranks it holds its share: `of` and `load_state_dict` deal, `gathered` joins.
    The gradients of what is whole on every rank, embeddings, norms and the biases of `out`, are parts there, to be
    added by `sum_gradients` after the backward and before anything reads them.

    ValueError where heads do not divide by the ranks, or the schedule has other layers; UnsupportedError where the
    ranks of a process group drew others, or were given other arguments.
    """

    def __init__(self, config: GPTConfig, schedule: Schedule | str, tracks: int = 1, group: Group | None = None):
        super().__init__()
        self.config = config
        self.schedule = schedule
        self.group, self.tracks, self._summed = Group(), tracks, 0
        if group is not None and tracks > 1:
            raise ValueError(f"{tracks} tracks are computed on one device: give tracks or a group, not both")
        ranks = group.world_size if group else tracks
        if not isinstance(ranks, int) or ranks < 1 or config.heads % ranks:
            raise ValueError(f"{config.heads} heads do not divide by {ranks} ranks")
        self.tokens, self.positions = (nn.Embedding(size, config.width) for size in (config.vocab, config.context))
        made = lambda: nn.ModuleDict({"attention": Attention(config), "mlp": MLP(config)})  # noqa: E731
        self.blocks, self.norm = nn.ModuleList(made() for _ in range(config.layers)), nn.LayerNorm(config.width)
        self._draw()
        if group is not None and ranks > 1:
            self._share(group)

    @classmethod
    def of(cls, whole: "GPT", group: Group) -> "GPT":
        """This rank's share of a model of as many tracks, which every rank holds; the weights are copied."""
        if whole.group.world_size > 1 or whole.tracks != group.world_size:
            raise ValueError(f"a model of {whole.ranks} tracks is shared by as many ranks, not by {group.world_size}")
        model = copy.deepcopy(whole)
        if group.world_size > 1:
            model._share(group)
        return model

    @torch.no_grad()
    def gathered(self, of: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter) -> dict[str, Tensor]:
        """By name, what is `of` each parameter, as it is or its gradient, of all ranks; new tensors. A collective."""
        found, split = {}, self._split()
        for name, parameter in self.named_parameters():
            if (value := of(parameter)) is None:
                raise UnsupportedError(f"{name} has none of what is gathered, as gradients before a backward")
            found[name] = value.detach().clone()
            if (dim := split.get(id(parameter))) is not None:
                parts = self.group.all_gather(found[name].movedim(dim, 0).contiguous())
                found[name] = parts.movedim(0, dim).contiguous()
        return found

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *others: object) -> None:
        split, ranks = self._split(), self.group.world_size  # of whole weights a rank takes its part
        for name, own in self.named_parameters(prefix.removesuffix(".")):
            dim, whole = split.get(id(own)), state_dict.get(name)
            if dim is not None and isinstance(whole, Tensor) and whole.shape[dim:][:1] == (ranks * own.shape[dim],):
                share = whole.chunk(ranks, dim)[self.group.rank]  # of its own storage, for assign=True
                state_dict[name] = share.clone(memory_format=torch.contiguous_format)
        super()._load_from_state_dict(state_dict, prefix, *others)

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @schedule.setter
    def schedule(self, given: Schedule | str) -> None:
        schedule = named(given, self.config.layers) if isinstance(given, str) else given
        if not isinstance(schedule, Schedule):
            raise ValueError(f"schedule is a name, as 'spd', or a gpt.Schedule, not {given!r}")
        if schedule.layers != self.config.layers:
            raise ValueError(f"schedule {schedule.name} has {schedule.layers} layers, not {self.config.layers}")
        self._schedule = schedule

    @property
    def ranks(self) -> int:
        return max(self.tracks, self.group.world_size)

    @property
    def sublayers(self) -> list[nn.Module]:
        return [block[kind] for block in self.blocks for kind in ("attention", "mlp")]

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """tokens [B, S] -> logits [B, S, vocab]; with targets [B, S] the mean cross-entropy, in nats, equal on all
        ranks. With a cache they are the next S tokens of what it holds. ValueError for other shapes, or more positions
        than the context or the cache has.
        """
        if cache is not None and torch.is_grad_enabled():
            with torch.no_grad():  # of what it holds none would come
                return self.forward(tokens, targets, cache)
        start, room = (cache.length, min(cache.positions, self.config.context)) if cache else (0, self.config.context)
        if tokens.dim() != 2 or tokens.shape[1] > room - start:
            raise ValueError(f"tokens are [batch, at most {room - start} positions], not {list(tokens.shape)}")
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(f"targets are shaped as tokens, {list(tokens.shape)}, not {list(targets.shape)}")
        if cache is not None and cache.schedule not in (None, self.schedule):
            raise ValueError(OTHER)
        x = self.streamed(self.tokens(tokens) + self.positions.weight[start : start + tokens.shape[1]], cache)
        out = F.linear(self.norm(x), self.tokens.weight)
        if targets is not None:
            logits = out.flatten(0, 1).to(torch.promote_types(out.dtype, torch.float32))
            out = F.cross_entropy(logits, targets.flatten())
        if cache is not None:  # not before: after an error the same tokens may be given again
            cache.length, cache.schedule = cache.length + tokens.shape[1], self.schedule
        if self.group.world_size > 1 and out.requires_grad:
            out.register_hook(self._before_backward)
        return out

    def streamed(self, x: Tensor, cache: Cache | None = None, first: int = 0, end: int | None = None) -> Tensor:
        """The blocks, without embeddings and head: the stream at sublayer `first`, [B, S, W] -> that at `end`, where
        both are places at which all ranks hold the same; by default all of them, to what the final norm reads.
        A cache's length is the caller's to move.
        """
        streams, sublayers = Streams(self.schedule, x, self.ranks, self.group), self.sublayers
        for what, which in self.schedule.operations:
            at = self.schedule.syncs[which].start if what in ("start", "land") else which
            if not first <= at < (self.schedule.end if end is None else end):
                continue
            if what == "run":
                apart, kept = self.schedule.steps[which].private, () if which % 2 or cache is None else (cache,)
                out = streams.room((which,))
                streams.made[which] = sublayers[which](streams.read(), self.tracks, apart, out, *kept)
            elif what == "show":
                streams.show(which, sublayers[which].out.bias)
            else:
                getattr(streams, what)(which)
        return streams.read()

    def _before_backward(self, grad: Tensor) -> Tensor:
        kept = self._whole_gradients()[-1:] if self._summed else []
        if any(one.data_ptr() == self._summed and bool(one.any()) for one in kept):  # neither zeroed nor dropped
            raise UnsupportedError("summed gradients are there: zero them, or call sum_gradients() once, at last")
        self._summed = 0
        unsummed.add(self)
        return grad / self.group.world_size  # each rank's loss is 1 / n of the one that all have

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Adds up over the ranks the gradients of what each holds whole, in one all-reduce. A collective, to be called
        after the last backward before a step and before gradients are clipped; UnsupportedError where another follows.
        """
        grads = self._whole_gradients() if self in unsummed else []  # on one device never
        unsummed.discard(self)
        if grads:
            summed = self.group.all_reduce(torch.cat([grad.flatten() for grad in grads]))
            for grad, part in zip(grads, summed.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
            self._summed = grads[-1].data_ptr()

    def _whole_gradients(self) -> list[Tensor]:
        split = self._split()
        return [p.grad for p in self.parameters() if id(p) not in split and p.grad is not None]

    def _split(self) -> dict[int, int]:
        """By the ids of the parameters of which each rank holds a part, the dimension that is dealt out."""
        shares = [module for module in self.modules() if isinstance(module, Share)]
        return {id(getattr(share, name)): int("bias" not in share.split) for share in shares for name in share.split}

    @torch.no_grad()
    def _draw(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for sublayer in self.sublayers:
            sublayer.out.weight /= math.sqrt(self.schedule.end)

    def _share(self, group: Group) -> None:
        refuse_unequal(group, "GPT", config=self.config, schedule=self.schedule, **dict(self.named_parameters()))
        for sublayer in self.sublayers:
            for name, linear in list(sublayer.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(sublayer, name, cut(linear, group, dim=1 if name == "out" else 0))
        self.group, self.tracks = group, 1


def _before_step(optimizer: Optimizer, *_: object) -> None:
    refuse_unsummed(parameter for group in optimizer.param_groups for parameter in group["params"])


register_optimizer_step_pre_hook(_before_step)
