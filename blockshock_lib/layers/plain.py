"""What a layer of this library is made of: a plain nn.Linear, nothing whose weight means or does more than that."""

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from blockshock_lib.errors import UnsupportedError


def require_plain(linear: nn.Module, name: str = "") -> None:
    """UnsupportedError where a module is no nn.Linear with a weight [N, K] of its own in values; `name` is its path."""
    if reason := _unlike(linear):
        raise UnsupportedError(f"{name or 'this module'} ({type(linear).__name__}) cannot be converted: {reason}")


def _unlike(linear: nn.Module) -> str:
    kind = type(linear)
    if kind.__name__ == "Conv1D":
        return "it holds its weight as [K, N]: make an nn.Linear of weight.t() first, as docs/own_model.md shows"
    if hasattr(linear, "to_linear"):
        return "it is packed or sharded already: convert what its to_linear() gives"
    if not isinstance(linear, nn.Linear) or kind.forward is not nn.Linear.forward or "forward" in vars(linear):
        return "only an nn.Linear with nn.Linear's own forward can be"
    if isinstance(linear, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads this weight without calling the layer: leave it dense"
    if type(linear.weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(linear.weight).__name__}: it must be a whole, plain tensor"
    return ""
