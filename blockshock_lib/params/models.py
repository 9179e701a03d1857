"""What every study's parameters have, to which it adds its own in a subclass; and pydantic's errors as sentences."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from blockshock_lib.errors import allowed

DType = Literal["bf16", "fp16", "fp32"]
# Without strict, pydantic would turn "16", 16.0 and True into whole numbers.
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 24)]
# A name ends up in file names, so it can hold no path.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$")]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]


def wrong(key: str, sentence: str) -> PydanticCustomError:
    """A complaint about a combination. `key`: relative to the model that raises it; of "a|b" what no file set."""
    return PydanticCustomError("combination", "{key}: {sentence}", {"key": key, "sentence": sentence})


def by_name(kind: str, table: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A validator that puts the table's value in the place of its name, and leaves a mapping or a list as it is."""

    def look_up(value: Any) -> Any:
        if not isinstance(value, str | int | float | None):
            return value
        if value not in table:
            raise wrong("", f"{value!r} is no {kind}; {allowed(value, table)}")
        return table[value]

    return look_up


def known(key: str, names: Sequence[str], table: Collection[str]) -> None:
    """Complains of a name that `table` has not, and of one that is listed twice."""
    for place, name in enumerate(names):
        if name not in table:
            raise wrong(f"{key}.{place}", f"{name!r} is not allowed; {allowed(name, table)}")
        if name in names[:place]:
            raise wrong(key, f"{name!r} is listed twice; keep one of them")


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hardware(Frozen):
    """Where ranks run. `emulated`: one process plays all ranks on one device. `link`: "slow" is without the GPUs'
    access to each other's memory, all that travels goes through the host's.
    """

    name: Name
    device: Literal["cpu", "cuda"]
    world_size: Annotated[int, Field(strict=True, ge=1, le=8)]
    backend: Literal["gloo", "nccl"]
    threads: Annotated[int, Field(strict=True, ge=1, le=1024)]
    emulated: Flag = False
    link: Literal["fast", "slow"] = "fast"

    @model_validator(mode="after")
    def _fits(self) -> "Hardware":
        if (self.device, self.backend) == ("cpu", "nccl"):
            raise wrong("backend|device", "'nccl' moves data between GPUs only; allowed: gloo with device cpu")
        if self.link == "slow" and (self.backend != "nccl" or self.processes < 2):
            raise wrong("link", "'slow' is a link between GPUs with a process each; allowed here: fast")
        return self

    @property
    def processes(self) -> int:
        return 1 if self.emulated else self.world_size

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the ranks start with. NCCL's own also turns our symmetric memory off."""
        return {"NCCL_P2P_DISABLE": "1"} if self.link == "slow" else {}


class Timing(Frozen):
    """Each of `groups` fresh groups of processes takes `samples`, of about min_sample_ms by what `warmup` calls took. A
    lead-in ends by measured power, after `lead_in_most_s` at most; where no power can be read it takes `lead_in_s`.
    """

    warmup: Count
    samples: Count
    groups: Count
    min_sample_ms: NotNegative
    lead_in_s: NotNegative = 0.5
    lead_in_most_s: NotNegative = 3.0

    @model_validator(mode="after")
    def _no_shorter_than_the_least(self) -> "Timing":
        if self.lead_in_most_s < self.lead_in_s:
            words = f"lead_in_s, {self.lead_in_s:g}, is longer than lead_in_most_s, {self.lead_in_most_s:g}"
            raise wrong("lead_in_most_s|lead_in_s", words)
        return self


class Limits(Frozen):
    """Deadlines in seconds: for a group to start, and for a case."""

    # The system's `poll` counts milliseconds in 31 bits.
    start_seconds: Annotated[Positive, Field(le=2_147_483)]
    case_seconds: Annotated[Positive, Field(le=2_147_483)]


class RunParams(Frozen):
    """What a run of any study depends on. `layers` records the file that was chosen for each kind, for the manifest."""

    study: Name
    phase: Name
    methods: Annotated[tuple[str, ...], Field(min_length=1)]
    hardware: Hardware
    dtype: DType
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
    timing: Timing
    limits: Limits
    profile: Literal["none", "last", "all"]
    layers: dict[str, str]

    def lacks(self) -> str:
        """What is asked for, beside hardware, and is not on this machine; "" where nothing is."""
        return ""


# Pydantic's error type -> what would have been right there, where its own sentence speaks of Python.
EXPECTED = {
    "string_type": 'text; put it in quotes, as in "1100"',
    "string_pattern_mismatch": "letters, digits and _ . + -, at most 64, no blank and no path",
    "tuple_type": "a list, as in [1, 2]",
}


def explain(error: ValidationError, model: type[BaseModel], where: Callable[[tuple], tuple[str, str]]) -> str:
    """One line an error, unknown keys first: a misspelt key is also a missing one, and the spelling is what mends it.
    `where`: location -> what set what is there, and its key.
    """
    found = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    lines = []
    for one in found:
        loc = one["loc"]
        if any(other["loc"][: len(loc)] == loc and other["loc"] != loc for other in found):
            continue  # a list is "too short" without the entry that is wrong
        if one["type"] == "combination":
            places = [(*loc, *filter(None, key.split("."))) for key in one["ctx"]["key"].split("|")]
            loc = next((place for place in places if not where(place)[0].endswith(".yaml")), places[0])
        source, key = where(loc)
        lines.append(": ".join(filter(None, (source, key, _sentence(one, model)))))
    return "\n".join(lines)


def _sentence(error: dict, model: type[BaseModel]) -> str:
    kind, loc = error["type"], error["loc"]
    given = text if len(text := repr(error["input"])) <= 80 else f"{text[:77]}..."
    if kind == "combination":
        return error["ctx"]["sentence"]
    if kind == "missing":
        return "is missing: no file sets it" if isinstance(loc[-1], str) else "a value is missing"
    if kind == "extra_forbidden":
        phrase = f"unknown key; {allowed(loc[-1], _model(_annotation(model, loc[:-1])).model_fields)}"
        elsewhere = [key for key in keys(model) if key.split(".")[-1] == loc[-1]]
        return phrase if "mean" in phrase or not elsewhere else f"{phrase}; did you mean {elsewhere[0]!r}?"
    if kind == "literal_error":
        return f"{given} is not allowed; {allowed(error['input'], get_args(_annotation(model, loc)))}"
    if kind == "multiple_of":
        step = error["ctx"]["multiple_of"]
        return f"{given}; allowed: multiples of {step}; nearest: {max(step, round(error['input'] / step) * step)}"
    return f"{given}; allowed: {EXPECTED[kind]}" if kind in EXPECTED else f"{given}: {error['msg']}"


def _annotation(model: type[BaseModel], loc: tuple) -> object:
    # The type at a location: a field's where the part is a key, an element's where it is an index.
    at: object = model
    for part in loc:
        at = _model(at).model_fields[part].annotation if isinstance(part, str) else get_args(at)[0]
    return at


def _model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model, get_args(annotation))), None)


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key, lists left out."""
    for name, field in model.model_fields.items():
        inner = None if get_origin(field.annotation) is tuple else _model(field.annotation)
        yield prefix + name
        yield from keys(inner, f"{prefix}{name}.") if inner else ()
