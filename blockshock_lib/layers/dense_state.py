"""W whole, as a layer that ranks share gives and takes it: state dicts, dense copies of its tensors, plain layers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import autograd
from blockshock_lib.layers.dense_copy import DenseCopy
from blockshock_lib.layers.parts import Part, laid_as, part_of, whole
from blockshock_lib.layers.pattern_linear import linear_of
from blockshock_lib.layers.watch import describe


class DenseState(nn.Module):
    """Of a layer with `rows` and `cols` of W, and a weight in a layout of its own."""

    watched: type[nn.Parameter] = nn.Parameter  # what its own weight is, so that one that is lent is told apart

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self._watch(self._parameters["weight"])  # torch may have set another, past __setattr__
        return self

    def _watch(self, weight: object) -> None:
        if type(weight) is nn.Parameter and not self.gathered:
            weight.__class__ = self.watched

    def factor(self) -> Tensor:
        """The weight as products read it, whose parameter may refuse to be multiplied past its layer."""
        if type(weight := self._parameters["weight"]) is nn.Parameter:
            return weight
        with torch._C.DisableTorchFunctionSubclass():
            return weight.detach()

    def as_saved(self, dense: Tensor | None) -> Tensor | None:
        """[N, K] as a state dict and a checkpoint have it, and back: as a Conv1D does, [K, N], where it was one."""
        return dense.transpose(0, -1).contiguous() if dense is not None and getattr(self, "conv1d", None) else dense

    def from_dense(self, dense: Tensor) -> Tensor:
        """This rank's part of a dense [N, K], a new tensor in the layout of `self.weight`."""
        return part_of(dense, None, Part(None, self.rows, self.cols))

    def part_dense(self, tensor: Tensor) -> Tensor:
        """A tensor in the layout of `self.weight` as this rank's [rows, columns] of W, +0.0 where it holds nothing."""
        return tensor

    def to_dense(self, tensor: Tensor | None = None) -> Tensor:
        """W [N, K] on every rank, bit for bit, or a `tensor` in the weight's layout, as its gradient. A collective."""
        if (held := self.weight if tensor is None else tensor) is not None and not autograd.has_values(held):
            return held.new_empty(self.out_features, self.in_features)
        if tensor is None and self.weight is not None:
            self.prepare()  # an optimizer may have written where a term holds nothing
            tensor = self.weight
        tensor = None if tensor is None else whole(tensor.detach())
        dense = (self.like if tensor is None else tensor).new_zeros(self.out_features, self.in_features)
        if tensor is not None:
            dense[self.rows, self.cols] = self.part_dense(tensor)
        self.group.meet(f"{describe(self)}.to_dense(), as state_dict() does,")
        # No two ranks hold the same entry and zero has no bit set: the sum of bytes is exact, of -0.0 and NaN too.
        self.group.all_reduce(dense.view(torch.uint8))
        return dense

    def to_linear(self) -> nn.Linear:
        """A plain layer with the same weights, whole on every rank, and trained where this is. Collective."""
        state = {name: whole(value).clone() for name, value in self.state_dict().items()}
        return linear_of(self.as_saved(state["weight"]), state.get("bias"), self)

    def __prepare_scriptable__(self):
        raise UnsupportedError(f"torch.jit.script takes no {describe(self)}: script its to_linear() in its place")

    @torch.no_grad()
    def load_dense(self, dense: Tensor) -> None:
        """Writes this rank's part of W [N, K] into the weight; the mask stays. ValueError: another shape."""
        if tuple(dense.shape) != (self.out_features, self.in_features):
            raise ValueError(f"the weight is [{self.out_features}, {self.in_features}], not {list(dense.shape)}")
        if self.weight is not None:
            self.prepare()
            part = self.from_dense(whole(dense).to(self.weight.device, self.weight.dtype))
            self.weight.copy_(laid_as(self.weight, part))
            self.refresh()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        way = "average its parameters(), as torch.optim.swa_utils.AveragedModel does, or load_state_dict() a clone()"
        dense, name = self.as_saved(self.to_dense()), prefix + "weight"
        destination[name] = DenseCopy.of(dense, f"{name} of a state dict", self, way)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        hooks, key, others = self._load_state_dict_pre_hooks, prefix + "weight", []
        for hook in hooks.values():  # before the weight is taken
            hook(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        rest = dict(state_dict)
        if (dense := self.as_saved(rest.pop(key, None))) is not None:  # a rank that stands by checks it too
            if local_metadata.get("assign_to_params_buffers") and dense.shape == (self.out_features, self.in_features):
                self.to(dense)  # its dtype and device
            try:
                self.load_dense(dense)
            except (ValueError, RuntimeError) as error:
                errors.append(f"{key} could not be loaded: {error}")
        try:
            self._load_state_dict_pre_hooks = {}
            super()._load_from_state_dict(rest, prefix, local_metadata, strict, others, unexpected, errors)
        finally:
            self._load_state_dict_pre_hooks = hooks
        missing += [other for other in others if other != key] + [key] * (strict and dense is None)
