"""The dense view of a sharded weight: what it saves, loads and shows, whatever its layout, mask and world size."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DenseView(nn.Module):
    """Mixed into a layer that has `rows`, `cols`, `from_dense` and `part_dense`: moves between its layout and W [N, K].

    A state dict holds W [N, K] under "weight", whole on every rank, so that it loads into a plain `nn.Linear`, into
    another method, under another mask or on another number of ranks. To make it is a collective, for all ranks.
    """

    def to_dense(self, tensor: Tensor | None = None) -> Tensor:
        """W [N, K] on every rank, bit for bit; or any tensor in the weight's layout: its gradient, an optimizer's
        state. Every rank of the group calls it.

        Args:
            tensor: in the layout of `self.weight`, which it is by default.
        """
        if tensor is None and self.weight is not None:
            self.prepare()  # an optimizer may have written where a term holds nothing
            tensor = self.weight
        like = self.like if tensor is None else tensor
        dense = torch.zeros(self.out_features, self.in_features, dtype=like.dtype, device=like.device)
        if tensor is not None:
            dense[self.rows, self.cols] = self.part_dense(tensor.detach())
        # No two ranks hold the same entry and zero has no bit set: the sum of bytes is exact, of -0.0 and NaN too.
        self.group.all_reduce(dense.view(torch.uint8))
        return dense

    @torch.no_grad()
    def load_dense(self, dense: Tensor) -> None:
        """Writes this rank's part of W [N, K] into the weight, in place, and refreshes what is made from it.

        The mask stays: each entry goes to the rank whose term holds it.

        Raises:
            ValueError: another shape than the layer's.
        """
        if tuple(dense.shape) != (self.out_features, self.in_features):
            raise ValueError(f"the weight is [{self.out_features}, {self.in_features}], not {list(dense.shape)}")
        if self.weight is not None:
            self.prepare()
            self.weight.copy_(self.from_dense(dense.to(self.weight)))
            self.refresh()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.to_dense()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        names = ["weight"] + ["bias"] * (self.bias is not None)
        missing += [prefix + name for name in names if strict and prefix + name not in state_dict]
        ours = [key for key in state_dict if key.startswith(prefix)]
        unexpected += [key for key in ours if strict and key.removeprefix(prefix) not in names]
        try:
            if prefix + "weight" in state_dict:
                self.load_dense(state_dict[prefix + "weight"])
            if self.bias is not None and prefix + "bias" in state_dict:
                bias = state_dict[prefix + "bias"]
                if bias.shape != self.bias.shape:
                    raise ValueError(f"the bias is {list(self.bias.shape)}, not {list(bias.shape)}")
                with torch.no_grad():
                    self.bias.copy_(bias)
        except (ValueError, RuntimeError) as error:
            errors.append(f"{prefix}weight and bias could not be loaded: {error}")
