"""Params -> the cases to run. Pure: no torch, no files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property

from blockshock_lib.params import Mask, Params, Workload


@dataclass(frozen=True)
class Case:
    """One product to check and measure, by all methods: y [batch, out_features] = x [batch, in_features] W^T + bias.

    A field with a default came later than the first records: it is left out of `as_dict` at its default, so that older
    ids and records stay what they are.
    """

    phase: str
    methods: tuple[str, ...]
    in_features: int
    out_features: int
    batch: int
    dtype: str
    bias: bool
    mask: Mask
    workload: Workload
    product: str
    device: str
    world_size: int
    emulated: bool
    seed: int
    optimizer: str = ""  # "sgd" or "adamw" where weights are trained
    dw: str = "auto"  # how Block-Shock makes the gradient of its weight

    @cached_property
    def id(self) -> str:
        """12 hex digits of the SHA-256 of all fields as canonical JSON: the same in any process and Python version."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:12]

    @property
    def label(self) -> str:
        """For people, weight as out x in: "4096x4096 B=16 bf16 checkerboard gaussian", and the optimizer if any."""
        shape = f"{self.out_features}x{self.in_features}"
        words = (shape, f"B={self.batch}", self.dtype, self.mask.name, self.workload.name, self.optimizer)
        return " ".join(word for word in words if word)

    def as_dict(self) -> dict[str, object]:
        """The fields as JSON takes them."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: value for name, value in plain.items() if value != LATER.get(name, MISSING)}
        return plain | {
            "methods": list(self.methods),
            "mask": self.mask.model_dump(mode="json"),
            "workload": self.workload.model_dump(mode="json"),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, object]) -> Case:
        """The inverse of `as_dict`.

        Raises:
            ValueError: a field is missing or unknown, or the mask or workload is not valid.
        """
        if odd := {field.name for field in fields(cls)}.symmetric_difference(LATER | dict(plain)):
            raise ValueError(f"not a case: missing or unknown {', '.join(sorted(odd))}")
        return cls(
            **plain
            | {
                "methods": tuple(plain["methods"]),
                "mask": Mask.model_validate(plain["mask"]),
                "workload": Workload.model_validate(plain["workload"]),
            }
        )


LATER = {field.name: field.default for field in fields(Case) if field.default is not MISSING}


def expand(params: Params) -> tuple[Case, ...]:
    """The product of all that is swept, each case once.

    Order: dtype, workload, mask and optimizer as listed, then the size of the weight ascending, then the batch
    ascending.
    """
    cases = (
        Case(
            phase=params.phase,
            methods=params.methods,
            in_features=in_features,
            out_features=out_features,
            batch=batch,
            dtype=dtype,
            bias=params.bias,
            mask=mask,
            workload=workload,
            product=params.product,
            device=params.hardware.device,
            world_size=params.hardware.world_size,
            emulated=params.hardware.emulated,
            seed=params.seed,
            optimizer=optimizer,
            dw=params.dw,
        )
        for dtype in params.dtypes
        for workload in params.workloads
        for mask in params.masks
        for optimizer in params.optimizers or ("",)
        for in_features, out_features in params.sweep.sizes(workload)
        for batch in sorted(params.sweep.b)
    )
    return tuple(dict.fromkeys(cases))
