"""Parameters: the YAML stack, checked as a whole and frozen. No process starts before `load` has returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from blockshock_lib.errors import ParamsError
from blockshock_lib.methods import METHODS
from blockshock_lib.params.complaints import explain
from blockshock_lib.params.stack import FOLDERS, SET, Stack
from blockshock_lib.params.strict_yaml import allowed, parse, refusal

PARAMS = Path(__file__).resolve().parents[2] / "params"

DType = Literal["bf16", "fp16", "fp32"]
PhaseName = Literal["phase0", "phase1", "phase2", "phase3"]
TRAINING = "phase3"
MethodName = Literal[tuple(METHODS)]
METHOD_NAMES: tuple[str, ...] = tuple(METHODS)
PATTERNS = {
    "uniform": ("1100", "0011", "1010", "0101", "1001", "0110"),
    "random": ("",),
    "transposable": ("checkerboard", "random"),
    "magnitude": ("",),
}
"""Mask family -> its patterns. A uniform pattern has two ones: the columns that term 0 keeps of every four."""

# Without strict, pydantic would turn "16", 16.0 and True into whole numbers.
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 24)]
Features = Annotated[int, Field(strict=True, ge=64, le=1 << 20, multiple_of=64)]
# A name ends up in file names, so it can hold no path.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$")]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


def _wrong(key: str, sentence: str) -> PydanticCustomError:
    """A complaint about a combination; `key` is relative to the model that raises it."""
    return PydanticCustomError("combination", "{key}: {sentence}", {"key": key, "sentence": sentence})


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Mask(_Frozen):
    """How a weight is split in two terms. Term 0 keeps what the pattern marks, term 1 the rest."""

    name: Name
    family: Literal["uniform", "random", "transposable", "magnitude"]
    pattern: str = ""

    @model_validator(mode="after")
    def _pattern_of_family(self) -> Mask:
        if self.pattern not in (known := PATTERNS[self.family]):
            why = (
                "a uniform pattern keeps two of four; "
                if self.family == "uniform"
                else f"of the {self.family} family; "
            )
            raise _wrong("pattern", f"{self.pattern!r}: {why}{allowed(self.pattern, [p or repr('') for p in known])}")
        return self

    @classmethod
    def named(cls, name: str) -> Mask:
        """The shipped mask of that name, a file of params/masks. ParamsError where there is none."""
        return load("phase0", choose={"hardware": "cpu", "mask": name}).mask

    @property
    def periodic(self) -> bool:
        """One 4x4 tile repeats: the product is dense in a permuted basis."""
        return self.family == "uniform" or self.pattern == "checkerboard"

    @property
    def transposable(self) -> bool:
        """2:4 along the output dimension too."""
        return self.family == "transposable"


class Workload(_Frozen):
    """What inputs look like, and the shape that a swept n becomes.

    in_features = n in_scale, out_features = n out_scale.
    """

    name: Name
    distribution: Literal["gaussian", "uniform", "activation"]
    in_scale: Count = 1
    out_scale: Count = 1


class Hardware(_Frozen):
    """Where ranks run. `emulated`: one process computes all ranks' parts one after the other on one device."""

    name: Name
    device: Literal["cpu", "cuda"]
    world_size: Literal[2, 4, 8]
    backend: Literal["gloo", "nccl"]
    threads: Annotated[int, Field(strict=True, ge=1, le=1024)]
    emulated: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _backend_of_device(self) -> Hardware:
        if (self.device, self.backend) == ("cpu", "nccl"):
            raise _wrong("backend", "'nccl' moves data between GPUs only; allowed: gloo with device cpu")
        return self

    @property
    def processes(self) -> int:
        return 1 if self.emulated else self.world_size


class Sweep(_Frozen):
    """What is varied. An empty list of masks, workloads or dtypes means the one that Params names."""

    n: tuple[Features, ...]
    features: tuple[tuple[Features, Features], ...] = ()
    b: Annotated[tuple[Count, ...], Field(min_length=1)]
    masks: tuple[Mask, ...] = ()
    workloads: tuple[Workload, ...] = ()
    dtypes: tuple[DType, ...] = ()

    @model_validator(mode="after")
    def _sized_and_told_apart(self) -> Sweep:
        if not self.n and not self.features:
            raise _wrong("n", "no size to run; allowed: at least one here or in sweep.features")
        for key in ("masks", "workloads"):
            seen: dict[str, _Frozen] = {}
            for item in getattr(self, key):
                if seen.setdefault(item.name, item) != item:
                    raise _wrong(key, f"two different entries are called {item.name!r}; give each a name of its own")
        return self

    def sizes(self, workload: Workload) -> dict[tuple[int, int], str]:
        """(in_features, out_features) of a workload, smallest weight first -> the key that asked: n or features."""
        sizes = {(n * workload.in_scale, n * workload.out_scale): "n" for n in self.n}
        sizes |= {pair: "features" for pair in self.features if pair not in sizes}
        return dict(sorted(sizes.items(), key=lambda item: (item[0][0] * item[0][1], item[0])))


class Timing(_Frozen):
    """Each of `groups` fresh groups of processes takes `samples` after `warmup`; a sample lasts about min_sample_ms."""

    warmup: Count
    samples: Count
    groups: Count
    min_sample_ms: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class Limits(_Frozen):
    """Deadlines in seconds: for a group to start, and for a case."""

    start_seconds: Positive
    case_seconds: Positive


class LearningRates(_Frozen):
    """One for each optimizer: SGD's is in units of the gradient, AdamW's is the length of a step."""

    sgd: Positive = 0.5
    adamw: Positive = 0.001


class Params(_Frozen):
    """Everything that a run depends on. `layers` records the file that was chosen for each kind, for the manifest.

    `optimizers` are swept where weights are trained; `dw` is how Block-Shock makes the gradient of its weight;
    `loss_steps` is the length of the loss curve, 0 for none.
    """

    phase: PhaseName
    methods: Annotated[tuple[MethodName, ...], Field(min_length=1)]
    hardware: Hardware
    mask: Mask
    workload: Workload
    dtype: DType
    bias: Annotated[bool, Field(strict=True)]
    product: Literal["auto", "reference", "torch", "cslt", "small", "tuned"]
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
    sweep: Sweep
    timing: Timing
    limits: Limits
    profile: Literal["none", "last", "all"]
    layers: dict[str, str]
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
    def _can_run(self) -> Params:
        if twice := [m for m in METHOD_NAMES if self.methods.count(m) > 1]:
            raise _wrong("methods", f"{twice[0]!r} is listed twice; keep one of them")
        if all(METHODS[m].periodic_only for m in self.methods) and not any(mask.periodic for mask in self.masks):
            names = ", ".join(mask.name for mask in self.masks)
            raise _wrong(
                "methods",
                f"{', '.join(self.methods)} alone cannot run: {names} is not periodic; allowed: a uniform or "
                "checkerboard mask, or another method beside it",
            )
        for workload in self.workloads:
            for size, key in self.sweep.sizes(workload).items():
                self._splits(workload, size, key)
        self._trains()
        return self

    def _trains(self) -> None:
        """What only training takes is refused elsewhere, and a gradient that these masks or ranks cannot make."""
        if self.phase != TRAINING:
            for key, empty in (("optimizers", ()), ("dw", "auto"), ("loss_steps", 0)):
                if getattr(self, key) != empty:
                    raise _wrong(key, f"{self.phase} trains no weight; leave it out, or run {TRAINING}")
            return
        if not self.optimizers:
            raise _wrong("optimizers", "nothing to train with; allowed: sgd, adamw")
        if twice := [name for name in self.optimizers if self.optimizers.count(name) > 1]:
            raise _wrong("optimizers", f"{twice[0]!r} is listed twice; keep one of them")
        if "adamw" in self.optimizers and "fp16" in self.dtypes:
            raise _wrong("optimizers", "adamw's squared gradients vanish in fp16; allowed: bf16, fp32, or sgd alone")
        odd = [mask.name for mask in self.masks if not mask.periodic]
        if self.dw == "periodic" and odd:
            nearest = "full" if self.hardware.emulated else "exchange"
            raise _wrong("dw", f"'periodic', but mask {odd[0]} is not periodic; nearest: {nearest}")
        if self.dw == "exchange" and self.hardware.emulated:
            raise _wrong(
                "dw", "'exchange' swaps entries between ranks, and emulated ranks are one process; nearest: full"
            )

    def _splits(self, workload: Workload, size: tuple[int, int], key: str) -> None:
        """Every rank's shard must itself be a multiple of 64."""
        ranks = self.hardware.world_size
        for method in self.methods:
            for what, features, parts in zip(("in", "out"), size, METHODS[method].shards(ranks), strict=True):
                if features % (64 * parts):
                    step = 64 * parts
                    near = max(step, round(features / step) * step)
                    raise _wrong(
                        f"sweep.{key}",
                        f"{features} {what}_features (workload {workload.name}): {method} on {ranks} ranks splits them "
                        f"by {parts}; allowed: multiples of {step}; nearest: {near}",
                    )


def load(
    phase: str,
    overrides: Mapping[str, object] | None = None,
    *,
    choose: Mapping[str, str] | None = None,
    root: Path = PARAMS,
    detect: Callable[[], str] | None = None,
) -> Params:
    """Merges the stack, base < phase < workload < mask < methods < hardware < sweep < overrides, and checks the whole.

    Args:
        phase: a file of phases/.
        overrides: dotted key -> value, as from `--set`; `layers.<kind>` chooses a file, over `choose`.
        choose: kind (workload, mask, methods, hardware, sweep) -> file name, over what the files choose. A mask,
            workload or dtype that is named here or in `overrides` is run alone: the sweep's list of them is dropped.
        root: the folder that holds base.yaml.
        detect: names this machine's file of hardware/ where "auto" is chosen; default `machine.auto_hardware`.

    Raises:
        ParamsError: one line a problem, each with its file, dotted key, the allowed values and the nearest match.
    """
    stack = Stack(Path(root)).merge(phase, overrides or {}, choose or {}, detect or _auto_hardware)
    try:
        return Params.model_validate(stack.values | {"layers": stack.chosen})
    except ValidationError as error:
        raise ParamsError(explain(error, Params, stack.where)) from None


def _auto_hardware() -> str:
    from blockshock_lib.machine import auto_hardware  # imports torch, which only "auto" needs

    return auto_hardware()


def parse_override(text: str) -> tuple[str, object]:
    """ "sweep.n=[4096,8192]" -> ("sweep.n", [4096, 8192]). The value is YAML 1.2; none at all is the empty text.

    Raises:
        ParamsError: no "=", no key, or a value that `strict_yaml.parse` refuses.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise refusal(SET, text.strip(), "allowed: KEY=VALUE, as in sweep.n=[4096,8192]")
    return key.strip(), parse(value, SET, key.strip()) if value.strip() else ""


__all__ = [
    "FOLDERS",
    "METHOD_NAMES",
    "PARAMS",
    "Hardware",
    "Mask",
    "Params",
    "Sweep",
    "Workload",
    "load",
    "parse_override",
]
