"""Packed weights, the checks that all backends share, and the simplest format with its product: the fast ones' oracle.

A weight [N, K] of which a mask keeps two of every four along K becomes
- values [N, K/2], in the weight's dtype: the kept weights in their order, equal to `weight[mask]`;
- metadata uint8 [N, K/8]: four bits a group, `first index | second index << 2`, the even group in a byte's low half.

The order of the index bits is the hardware's (PTX ISA, "Sparse matrix storage", mma.sp for 16-bit types).
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24.masks import check_groups, parts

MULTIPLE = 64  # of both dimensions of a weight: enough for every 16-bit kernel, and even for all of them
ALIGNMENT = 16  # bytes at whose multiples the kernels expect x, out and bias; one that is not may break the context


@dataclass(frozen=True)
class Packed:
    """One term of a weight in the form that its backend multiplies."""

    backend: str
    shape: tuple[int, int]  # (N, K) = (out_features, in_features)
    dtype: torch.dtype  # of the weight, the input and the output
    data: tuple[Tensor, ...]  # whose storage holds it; the first begins with its values
    extra: object = field(default=None, repr=False)  # a wrapper or tuned choices; never a second copy of the weight

    @property
    def values(self) -> Tensor:
        """A view of the kept weights [N, K/2], `weight[mask]` row by row (but see stock.py for kept zeros)."""
        rows, columns = self.shape
        return self.data[0].view(-1)[: rows * columns // 2].view(rows, columns // 2)

    def ones(self) -> "Packed":  # the same metadata under values of one, in storage of its own
        first, extra = self.data[0].clone(), self.extra
        if isinstance(extra, Tensor):  # PyTorch's wrapper of the same buffer
            _, context = extra.__tensor_flatten__()
            extra = extra.__tensor_unflatten__({"packed": first}, context, None, None)
        ones = replace(self, data=(first, *self.data[1:]), extra=extra)
        ones.values.fill_(1)
        return ones

    @property
    def nbytes(self) -> int:
        """Of the storages behind `data`, each once. A wrapper's own `nbytes` would give the dense size."""
        storages = (tensor.untyped_storage() for tensor in self.data)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_shape(shape: tuple[int, ...]) -> None:
    """UnsupportedError where a dimension is not a positive multiple of 64."""
    if any(size < MULTIPLE or size % MULTIPLE for size in shape):
        sizes = "x".join(map(str, shape))
        raise UnsupportedError(f"a packed weight needs dimensions that are multiples of {MULTIPLE}, not {sizes}")


def check_weight(weight: Tensor, mask: Tensor) -> None:
    """ValueError where it is no floating-point matrix with a 2:4 mask beside it; UnsupportedError as `check_shape`."""
    if weight.dim() != 2:
        raise ValueError(f"a weight has two dimensions [out_features, in_features], not {weight.dim()}")
    if not weight.is_floating_point():
        raise ValueError(f"a weight of floating point is needed, not {weight.dtype}")
    if mask.dtype != torch.bool or mask.shape != weight.shape or mask.device != weight.device:
        wanted = f"bool {tuple(weight.shape)} on {weight.device}"
        raise ValueError(f"the mask must be {wanted}, not {mask.dtype} {tuple(mask.shape)} on {mask.device}")
    check_shape(weight.shape)
    check_groups(mask)


def check_input(x: Tensor, packed: Packed, out: Tensor | None = None, bias: Tensor | None = None) -> None:
    """ValueError where x [B, K], out [B, N] or bias [N] does not fit: the raw ops would read past its end."""
    shape, (n, k), device = x.shape, packed.shape, packed.data[0].device
    if len(shape) != 2 or shape[1] != k or not shape[0]:
        raise ValueError(f"the input must be [B, {k}], not {list(x.shape)}")
    if x.dtype != packed.dtype or x.device != device:
        raise ValueError(f"the input must be {packed.dtype} on {device} as the weight is, not {x.dtype} on {x.device}")
    if bias is not None:
        check_place("the bias", bias, x, (n,))
    if out is not None:
        check_place("out", out, x, (shape[0], n))
        if not aligned(out):
            raise ValueError(f"out must begin at a multiple of {ALIGNMENT} bytes")


def check_place(name: str, given: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError unless it is contiguous, of this shape, and of the other's dtype and device."""
    placed = given.shape == shape and given.dtype == like.dtype and given.device == like.device
    if not (placed and given.is_contiguous()):
        found = f"{given.dtype} {list(given.shape)} with strides {given.stride()} on {given.device}"
        raise ValueError(f"{name} must be contiguous {like.dtype} {list(shape)} on {like.device}, not {found}")


def aligned(x: Tensor) -> bool:
    return not x.data_ptr() % ALIGNMENT


def contiguous_aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if aligned(x) else x.clone()


def pack(weight: Tensor, mask: Tensor) -> Packed:
    """Packs a weight [N, K] of any floating dtype by its mask, bool: values and metadata. Errors as `check_weight`."""
    check_weight(weight, mask)
    rows, columns = weight.shape
    values = weight.new_empty(rows, columns // 2)
    metadata = weight.new_empty(rows, columns // 8, dtype=torch.uint8)
    for part in parts(rows, columns):
        values[part] = weight.detach()[part][mask[part]].view(-1, columns // 2)
        bits = nibbles(mask[part])
        metadata[part] = bits[:, 0::2] | bits[:, 1::2] << 4
    return Packed("reference", (rows, columns), weight.dtype, (values, metadata))


def nibbles(mask: Tensor) -> Tensor:
    """The four bits of metadata of each group of a 2:4 mask, bool [N, K]: uint8 [N, K/4]."""
    m0, m1, m2, m3 = (m.to(torch.uint8) for m in mask.reshape(mask.shape[0], -1, 4).unbind(-1))
    # Of two kept places the first is 0, 1 or 2 and the second 1, 2 or 3: count the empty places before each.
    first = (1 - m0) * (2 - m1)
    second = 3 - m3.logical_not().to(torch.uint8) * (1 + (1 - m2))
    return first | second << 2


def unpack(values: Tensor, metadata: Tensor) -> Tensor:
    """Dense [N, K] of values [N, K/2] and metadata uint8 [N, K/8], +0.0 in the holes, for graphs too. ValueError."""
    rows, half = values.shape if values.dim() == 2 else (0, 0)
    if metadata.dtype != torch.uint8 or metadata.shape != (rows, half // 4) or metadata.device != values.device:
        wanted = f"values {tuple(values.shape)} on {values.device} need uint8 metadata [N, K/8] beside them"
        raise ValueError(f"{wanted}, not {metadata.dtype} {tuple(metadata.shape)} on {metadata.device}")
    dense = values.new_zeros(rows, 2 * half)
    for part in parts(rows, 2 * half):
        byte = metadata[part]
        index = torch.stack((byte & 3, byte >> 2 & 3, byte >> 4 & 3, byte >> 6), -1)  # [rows, K/8, 4]
        groups = dense[part].view(-1, half // 2, 4)
        groups.scatter_(2, index.view(-1, half // 2, 2).long(), values[part].reshape(-1, half // 2, 2))
    return dense


def linear(x: Tensor, packed: Packed, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """As `backends.Backend.linear`: a machine without 2:4 hardware runs the same packed data, unpacked in each call."""
    check_input(x, packed, out, bias)
    y = F.linear(x, unpack(*packed.data), bias)
    return y if out is None else out.copy_(y)
