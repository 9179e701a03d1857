"""Parameters of the linear study, and the cases that they expand into. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from blockshock_lib.engine import study
from blockshock_lib.errors import allowed
from blockshock_lib.kernels.sparse24.mask import MASKS, Mask
from blockshock_lib.params.models import Count, DType, Flag, Frozen, Positive, RunParams, by_name, known, wrong
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.phases import LINES, PHASES

Features = Annotated[int, Field(strict=True, ge=64, le=1 << 20, multiple_of=64)]


@dataclass(frozen=True)
class Workload:
    """What inputs look like; a swept n becomes in_features = n in_scale, out_features = n out_scale."""

    name: str
    distribution: Literal["gaussian", "uniform", "activation"]
    in_scale: int = 1
    out_scale: int = 1


WORKLOADS = {
    **{name: Workload(name=name, distribution=name) for name in ("gaussian", "uniform", "activation")},
    # The two linear layers of a transformer's MLP.
    "mlp_up": Workload(name="mlp_up", distribution="activation", out_scale=4),
    "mlp_down": Workload(name="mlp_down", distribution="activation", in_scale=4),
}


def _row(kind: str, table: Mapping[str, Any]) -> PlainValidator:
    """A row of `table`, by its name, or written out as a manifest has it."""

    def look_up(value: Any) -> Any:
        name = value.get("name") if isinstance(value, Mapping) else value
        row = table.get(name) if isinstance(name, str) else None
        if row is None or value not in (name, vars(row)):
            raise wrong("", f"{value!r} is no {kind}; {allowed(name, table)}")
        return row

    return PlainValidator(look_up)


MaskParam = Annotated[Mask, _row("mask", MASKS), PlainSerializer(vars)]
WorkloadParam = Annotated[Workload, _row("workload", WORKLOADS), PlainSerializer(vars)]

SETS = {
    # Every forward: the baselines, Block-Shock, and Block-Shock by torch's stock 2:4 op.
    "all": tuple(name for name in METHODS if name != "block_shock_recompress"),
    "training": tuple(METHODS),
    # What the two first hypotheses compare, and the single-device product.
    "headline": ("row_parallel", "masked_dense", "block_shock", "dense"),
}
_TRAINING = ("optimizers", "dw", "loss_steps")
PRESETS = {"workload": WORKLOADS, "mask": MASKS, "methods": SETS}


class Sweep(Frozen):
    """What is varied. An empty list of masks, workloads or dtypes means the one that Params names."""

    n: tuple[Features, ...]
    features: tuple[tuple[Features, Features], ...] = ()
    b: Annotated[tuple[Count, ...], Field(min_length=1)]
    masks: tuple[MaskParam, ...] = ()
    workloads: tuple[WorkloadParam, ...] = ()
    dtypes: tuple[DType, ...] = ()

    @model_validator(mode="after")
    def _sized(self) -> "Sweep":
        if not self.n and not self.features:
            raise wrong("n", "no size to run; allowed: at least one here or in sweep.features")
        return self

    def sizes(self, workload: Workload) -> dict[tuple[int, int], str]:
        """(in_features, out_features) of a workload, smallest weight first -> the key that asked: n or features."""
        sizes = {(n * workload.in_scale, n * workload.out_scale): "n" for n in self.n}
        sizes |= {pair: "features" for pair in self.features if pair not in sizes}
        return dict(sorted(sizes.items(), key=lambda item: (item[0][0] * item[0][1], item[0])))


class LearningRates(Frozen):
    """One for each optimizer: SGD's is in units of the gradient, AdamW's is the length of a step."""

    sgd: Positive = 0.5
    adamw: Positive = 0.001


class Params(RunParams):
    """`lines`: phase 1's beside B1. `dw`: how Block-Shock makes its weight's gradient. `loss_steps`: 0 for no curve."""

    study: Literal["linear"] = "linear"
    phase: Literal[tuple(PHASES)]
    methods: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(by_name("set of methods", SETS))]
    mask: MaskParam
    workload: WorkloadParam
    bias: Flag
    product: Literal["auto", "reference", "torch", "cslt", "small", "tuned"]
    sweep: Sweep
    lines: tuple[Literal[tuple(LINES)], ...] = tuple(LINES)
    optimizers: tuple[Literal["sgd", "adamw"], ...] = ()
    learning_rates: LearningRates = LearningRates()
    dw: Literal["auto", "full", "periodic", "exchange"] = "auto"
    loss_steps: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = 0

    @property
    def masks(self) -> tuple[Mask, ...]:
        return self.sweep.masks or (self.mask,)

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return self.sweep.workloads or (self.workload,)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        return self.sweep.dtypes or (self.dtype,)

    @model_validator(mode="after")
    def _can_run(self) -> "Params":
        if (ranks := self.hardware.world_size) not in (2, 4, 8):
            raise wrong("hardware.world_size", f"{ranks} ranks cannot share two terms; allowed: 2, 4, 8")
        known("methods", self.methods, METHODS)
        known("optimizers", self.optimizers, ("sgd", "adamw"))
        if all(METHODS[name].periodic_only for name in self.methods) and not any(mask.periodic for mask in self.masks):
            alone, names = ", ".join(self.methods), ", ".join(mask.name for mask in self.masks)
            more = "allowed: a uniform or checkerboard mask, or another method beside it"
            raise wrong("methods|mask|sweep.masks", f"{alone} alone cannot run: {names} is not periodic; {more}")
        for workload in self.workloads:
            for size, key in self.sweep.sizes(workload).items():
                self._check_shards(workload, size, f"sweep.{key}|workload|hardware.world_size|methods")
        if PHASES[self.phase].train:
            self._check_training()
        elif given := [key for key in _TRAINING if getattr(self, key) != type(self).model_fields[key].default]:
            trains = next(phase.name for phase in PHASES.values() if phase.train)
            raise wrong(given[0], f"{self.phase} trains no weight; leave it out, or run {trains}")
        return self

    def _check_shards(self, workload: Workload, size: tuple[int, int], key: str) -> None:
        """Every rank's shard must itself be a multiple of 64."""
        ranks = self.hardware.world_size
        for method in self.methods:
            for what, features, parts in zip(("in", "out"), size, METHODS[method].shards(ranks), strict=True):
                if features % (step := 64 * parts):
                    near = max(step, round(features / step) * step)
                    said = f"{features} {what}_features (workload {workload.name}): {method} on {ranks} ranks splits "
                    raise wrong(key, f"{said}them by {parts}; allowed: multiples of {step}; nearest: {near}")

    def _check_training(self) -> None:
        if not self.optimizers:
            raise wrong("optimizers", "nothing to train with; allowed: sgd, adamw")
        if "adamw" in self.optimizers and "fp16" in self.dtypes:
            why = "adamw's squared gradients vanish in fp16; allowed: bf16, fp32, or sgd alone"
            raise wrong("optimizers|dtype|sweep.dtypes", why)
        odd = [mask.name for mask in self.masks if not mask.periodic]
        if self.dw == "periodic" and odd:
            nearest = "full" if self.hardware.emulated else "exchange"
            raise wrong("dw|mask|sweep.masks", f"'periodic', but mask {odd[0]} is not periodic; nearest: {nearest}")
        if self.dw == "exchange" and self.hardware.emulated:
            raise wrong("dw|hardware.emulated", "'exchange' swaps, and emulated ranks are one process; nearest: full")


@dataclass(frozen=True)
class Case(study.Case):
    """One product to check and measure by all methods: y [batch, out_features] = x [batch, in_features] W^T + bias."""

    in_features: int
    out_features: int
    batch: int
    bias: bool
    mask: Mask
    workload: Workload
    product: str
    optimizer: str = ""
    dw: str = "auto"

    @property
    def label(self) -> str:
        """Weight as out x in: "4096x4096 B=16 bf16 checkerboard gaussian", and the optimizer if any."""
        shape = f"{self.out_features}x{self.in_features}"
        words = (shape, f"B={self.batch}", self.dtype, self.mask.name, self.workload.name, self.optimizer)
        return " ".join(word for word in words if word)


def expand(params: Params) -> tuple[Case, ...]:
    """All that is swept, each case once: as listed, and innermost weight size, then batch, both ascending."""
    fixed = {key: getattr(params, key) for key in ("phase", "methods", "bias", "product", "seed", "dw")}
    fixed |= {key: getattr(params.hardware, key) for key in ("device", "world_size", "emulated")}
    cases = (
        Case(**fixed, dtype=dtype, workload=w, mask=mask, optimizer=optimizer, in_features=k, out_features=n, batch=b)
        for dtype in params.dtypes
        for w in params.workloads
        for mask in params.masks
        for optimizer in params.optimizers or ("",)
        for k, n in params.sweep.sizes(w)
        for b in sorted(params.sweep.b)
    )
    return tuple(dict.fromkeys(cases))


def columns(case: Mapping[str, Any]) -> dict[str, Any]:
    """A record's `case` -> the study's own columns of a records frame; `n` is None where the weight is not square."""
    inputs, outputs = case["in_features"], case["out_features"]
    sizes = {"in_features": inputs, "out_features": outputs, "n": inputs if inputs == outputs else None}
    names = {name: case[name]["name"] for name in ("mask", "workload")}
    optimizer = case.get("optimizer", "")
    return {**sizes, "shape": f"{outputs}x{inputs}", "batch": case["batch"], **names, "optimizer": optimizer}
