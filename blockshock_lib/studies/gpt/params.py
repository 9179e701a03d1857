"""Parameters of the gpt study, and the cases that they expand into. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from blockshock_lib.engine import study
from blockshock_lib.errors import DataError
from blockshock_lib.files import ROOT, canonical, sha256
from blockshock_lib.params.models import Count, Flag, Frozen, NotNegative, Positive, RunParams, by_name, known, wrong
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.phases import PHASES

LAYERS = 12
SETS = {
    "all": tuple(name for name, method in METHODS.items() if not method.bound),
    "latency": tuple(METHODS),
    "headline": ("tensor_parallel", "parallel", "spd", "grouped_2", "selective"),
}
SIZES = {  # named after GPT-2's; with 8192 tokens the largest has 92 million parameters
    "nano": {"width": 64, "heads": 4, "vocab": 1024, "context": 64},
    "25M": {"width": 384, "heads": 12, "vocab": 8192, "context": 512},
    "124M": {"width": 768, "heads": 12, "vocab": 8192, "context": 1024},
}
PRESETS = {"methods": SETS, "size": SIZES}


class Size(Frozen):
    """A GPT of 12 layers: `heads` heads of `width` features in all, over `context` positions."""

    width: Count
    heads: Count
    vocab: Annotated[int, Field(strict=True, ge=257, le=1 << 16)]  # every byte is a token
    context: Count

    @model_validator(mode="after")
    def _whole_heads(self) -> "Size":
        if self.width % self.heads:
            raise wrong("heads|width", f"{self.heads} heads cannot share {self.width} features; allowed: its divisors")
        return self


class Recipe(Frozen):
    """`tokens` are trained on in batches of `batch` sequences, by AdamW at `learning_rate` after a rise over `warmup`
    of the steps, falling to a tenth of it; too short a rise spoils schedules unequally (docs/gpt.md). `validations`:
    how often the loss on `validation_tokens` is taken, the last time at the end.
    """

    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)  # AdamW's
    final: ClassVar[float] = 0.1  # of the learning rate, at the last step

    tokens: Annotated[int, Field(strict=True, ge=1, le=1 << 40)]
    batch: Count
    learning_rate: Positive
    warmup: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.1
    weight_decay: NotNegative = 0.1
    clip: Positive = 1.0
    validations: Count = 10
    validation_tokens: Count = 1 << 19
    compiled: Flag = True


class Training(Recipe):
    """`after`: whether the syncs of the trained tensor-parallel model are dropped one by one, and half of them made up
    for by distillation on `distill_tokens`.
    """

    after: Flag = True
    distill_tokens: Count = 5_000_000


class Latency(Frozen):
    """What is timed, of `layers` blocks of random weights with heads of `head` features: at each of `widths` a forward
    of so many tokens at once (`prefill`) and of one token behind so many in a cache (`decode`); and training steps,
    each (width, tokens), in sequences of at most 1024 (`step`), or with the heads and context of a size as wide.
    """

    layers: Count = LAYERS
    head: Count = 64
    widths: tuple[Count, ...] = (768,)
    prefill: tuple[Count, ...] = (16,)
    decode: tuple[Count, ...] = ()
    step: tuple[tuple[Count, Count], ...] = ()

    def rows(self) -> list[tuple[str, int, int]]:
        """(work, width, length) of each case."""
        forwards = (("prefill", self.prefill), ("decode", self.decode))
        found = [(work, width, length) for work, asked in forwards for width in self.widths for length in asked]
        return found + [("step", width, length) for width, length in self.step]


class Params(RunParams):
    """`data`: a folder of shards, in the format of nanoGPT or llm.c, from the project's root on where it is no whole
    path; "": the corpus of all packages that are installed, or the small one of a few. `corpus_digest`: which it must
    be, "" for any. `tracks`: the ranks that a training case plays on one device. `seeds`: how many, from `seed` on.
    """

    study: Literal["gpt"] = "gpt"
    phase: Literal[tuple(PHASES)]
    methods: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(by_name("set of methods", SETS))]
    size: Annotated[Size, BeforeValidator(by_name("size", SIZES))]
    data: str = ""
    corpus: Literal["packages", "nano"] = "packages"
    corpus_digest: str = ""
    tracks: Annotated[int, Field(strict=True, ge=2, le=8)] = 4
    seeds: Count = 1
    training: Training
    latency: Latency = Latency()

    @model_validator(mode="after")
    def _possible(self) -> "Params":
        known("methods", self.methods, METHODS)
        for place, name in enumerate(self.methods):
            if METHODS[name].bound and self.phase != "gpt_latency":
                raise wrong(f"methods.{place}", f"{name!r} is a bound of time; allowed: in gpt_latency alone")
        if self.phase == "gpt_training" and self.dtype == "fp16":
            raise wrong("dtype", "gradients vanish in fp16, and no loss is scaled here; allowed: bf16, fp32")
        ranks, head = self.ranks, self.latency.head
        if self.phase != "gpt_latency" and self.size.heads % ranks:
            keys = "size.heads|tracks" if self.phase == "gpt_training" else "size.heads|hardware.world_size"
            raise wrong(keys, f"{self.size.heads} heads cannot be dealt whole to {ranks} ranks")
        for row in self.latency.rows() if self.phase == "gpt_latency" else ():
            if not (heads := _timed(self, *row)["heads"]) or heads % ranks:
                keys = "latency.head|latency.widths|latency.step|hardware.world_size"
                raise wrong(keys, f"heads of {head} in {row[1]} cannot be dealt whole to {ranks} ranks")
            if row[0] == "step" and row[2] % (count := _timed(self, *row)["batch"]):
                raise wrong("latency.step", f"{row[2]} tokens are no {count} sequences of one length")
        if self.phase == "gpt_latency" and not self.latency.rows():
            raise wrong("latency", "nothing is asked: name widths, and lengths of prefill, decode or step")
        return self

    def lacks(self) -> str:
        if not self.data:
            return ""
        from blockshock_lib.layers.gpt import shards  # brings torch

        try:
            for path in (path for some in shards.named(ROOT / self.data).values() for path in some):
                shards.read(path)
        except DataError as error:
            return f"data: {error}"
        return ""

    @property
    def ranks(self) -> int:
        return self.tracks if self.phase == "gpt_training" else self.hardware.world_size


@dataclass(frozen=True)
class Case(study.Case):
    """A GPT over `ranks`, checked, or trained on `tokens` in batches of `batch` sequences. One that is timed has a
    `work` of `length`: "prefill" of so many tokens, "decode" behind so many, "step" of so many.
    """

    width: int
    heads: int
    vocab: int
    context: int
    ranks: int
    batch: int
    tokens: int
    work: str = ""
    layers: int = LAYERS
    length: int = 0
    link: str = "fast"
    recipe: str = ""  # digest of all that a training is done by, besides the fields above

    @property
    def label(self) -> str:
        """ "SPD, 384 wide, 4 ranks, seed 2": one that is trained has a method of its own."""
        who = [METHODS[self.methods[0]].short] * (len(self.methods) == 1)
        who += [f"{self.work} {self.length}"] * bool(self.work) + [f"{self.link} link"] * (self.link != "fast")
        return ", ".join([*who, f"{self.width} wide", f"{self.ranks} ranks", f"seed {self.seed}", self.dtype])


CHECK_BATCH = 2  # sequences


def expand(params: Params) -> tuple[Case, ...]:
    """One case of all methods where they are only checked. Trained are all methods of a seed before the next seed, each
    a case of one rank, so that several can run side by side and a run that is cut off holds whole pairs.
    """
    hardware, size, train = params.hardware, params.size.model_dump(), params.training
    general = {"phase": params.phase, "dtype": params.dtype, "device": hardware.device, "ranks": params.ranks} | size
    place = {"world_size": hardware.world_size, "emulated": hardware.emulated, "seed": params.seed}
    if params.phase == "gpt_correctness":
        return (Case(**general, **place, methods=params.methods, batch=CHECK_BATCH, tokens=0),)
    if params.phase == "gpt_latency":
        place |= {"methods": params.methods, "layers": params.latency.layers, "link": hardware.link, "tokens": 0}
        return tuple(Case(**general | place | _timed(params, *row)) for row in params.latency.rows())
    how = train.model_dump(exclude={"validations", "after", "batch", "tokens"})
    how |= {"betas": train.betas, "final": train.final}
    how |= {"compiled": train.compiled and hardware.device == "cuda", "device": hardware.device}
    place = {"world_size": 1, "emulated": False, "batch": train.batch, "tokens": train.tokens}
    place |= {"recipe": sha256(canonical(how))[:8]}
    every = range(params.seed, params.seed + params.seeds)
    return tuple(Case(**general, **place, seed=seed, methods=(name,)) for seed in every for name in params.methods)


def _timed(params: Params, work: str, width: int, length: int) -> dict[str, Any]:
    """A step of a trained width is of that size, so that its loss and its time are of one GPT; 0 heads: none fit."""
    sizes = [params.size.model_dump(), *SIZES.values()] if work == "step" else []
    heads = 0 if width % params.latency.head else width // params.latency.head
    of = next((size for size in sizes if size["width"] == width), {"heads": heads, "context": 1024})
    batch = -(-length // of["context"]) if work == "step" else 1
    shape = {"width": width, "heads": of["heads"], "context": length // batch + (work == "decode")}
    return shape | {"batch": batch, "work": work, "length": length}


def weights(width: int, vocab: int) -> int:
    """Of a GPT of LAYERS layers, its tied head once; without the embeddings of positions, which multiply nothing."""
    return LAYERS * (12 * width**2 + 13 * width) + 2 * width + vocab * width


LATER = ("work", "layers", "length", "link", "recipe")
COLUMNS = ("width", "heads", "vocab", "context", "ranks", "batch")


def columns(case: Mapping[str, Any]) -> dict[str, Any]:
    """A record's `case` -> the study's own columns of a records frame."""
    own = {key: case[key] for key in COLUMNS} | {"trained": case["tokens"]}
    own |= {key: case.get(key, getattr(Case, key)) for key in LATER}
    return own | {"timed": f"{own['work']} {own['length']}" if own["work"] else ""}
