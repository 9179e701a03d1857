"""Parameters of the gallery, and the cases that they expand into. No torch here."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from blockshock_lib.engine import study
from blockshock_lib.errors import allowed
from blockshock_lib.files import ROOT, canonical, sha256
from blockshock_lib.params.models import Count, Frozen, RunParams, by_name, known, wrong
from blockshock_lib.studies.gallery.methods import ACTS, ARMS, DECODERS, DENSE, METHODS, PATTERNS, PRUNED, WAYS
from blockshock_lib.studies.gallery.phases import PHASES, WORKS
from blockshock_lib.studies.gpt.params import Recipe

SETS = {
    "all": tuple(METHODS),
    "arms": tuple(ARMS),
    "steps": tuple(WAYS),
    "decoders": tuple(DECODERS),
    "decode": ("searched", "dense", "two_four_torch", "two_four_cslt", "two_four"),
}
PRESETS = {"methods": SETS}
HALF = 0.5  # what 2:4 leaves out
LLAMA = "Llama"  # the pattern, in words, of a case of a whole model that decodes
Wide = Annotated[int, Field(strict=True, ge=64, multiple_of=64)]  # as 2:4 takes them


class Sweep(Frozen):
    """What is varied, all combinations that a pattern can have; `weights`: (out, in) features; `batches`: rows of x."""

    patterns: Annotated[tuple[Literal[(*PATTERNS, *ACTS)], ...], Field(min_length=1)]
    weights: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)]
    batches: Annotated[tuple[Count, ...], Field(min_length=1)]
    sparsities: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], Field(min_length=1)]
    blocks: Annotated[tuple[Count, ...], Field(min_length=1)] = (64,)
    works: Annotated[tuple[Literal[WORKS], ...], Field(min_length=1)] = ("forward",)

    @model_validator(mode="after")
    def _whole_blocks(self) -> "Sweep":
        for block, (n, k) in itertools.product(self.blocks, self.weights):
            if n % block or k % block:
                raise wrong("blocks|weights", f"blocks of {block} do not divide {n}x{k}; allowed: a divisor")
        return self


class Accuracy(Recipe):
    """GPTs trained as in the gpt study, with `seeds` seeds from `seed` on. Their `task` is the corpus of all installed
    packages, of a few, or what a teacher with 2:4 weights says; or the shards in the folder `data`. `calibration`:
    sequences; `block`: the side of blocks.
    """

    task: Literal["packages", "nano", "teacher"] = "packages"
    data: str = ""
    layers: Count
    width: Wide
    heads: Count
    vocab: Annotated[int, Field(strict=True, ge=2, le=1 << 16)]
    context: Count
    seeds: Count = 1
    calibration: Count = 128
    block: Count = 16

    @model_validator(mode="after")
    def _whole_parts(self) -> "Accuracy":
        for name in ("heads", "block"):
            if self.width % (given := getattr(self, name)):
                raise wrong(name, f"{given} does not divide the width of {self.width}; allowed: a divisor")
        return self


class Decode(Frozen):
    """A model of Llama's shape with random weights; each batch at each context, the tokens that came before."""

    layers: Count
    width: Wide
    mlp: Wide
    heads: Count
    kv_heads: Count
    vocab: Annotated[int, Field(strict=True, ge=2)]
    contexts: Annotated[tuple[Count, ...], Field(min_length=1)]
    batches: Annotated[tuple[Count, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _whole_heads(self) -> "Decode":
        if self.width % (2 * self.heads):
            raise wrong("heads", f"{self.heads} do not divide the width of {self.width} into pairs; allowed: a divisor")
        if self.heads % self.kv_heads or self.width // self.heads * self.kv_heads % 32:
            fit = f"a divisor of {self.heads} with keys and values in multiples of 64"
            raise wrong("kv_heads", f"{self.kv_heads} does not fit; allowed: {fit}")
        return self


class Params(RunParams):
    study: Literal["gallery"] = "gallery"
    phase: Literal[tuple(PHASES)]
    methods: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(by_name("set of methods", SETS))]
    sweep: Sweep | None = None
    accuracy: Accuracy | None = None
    decode: Decode | None = None

    @model_validator(mode="after")
    def _known_methods(self) -> "Params":
        asked = {"accuracy": ARMS, "decode": DECODERS, "training": WAYS, "speed": METHODS}
        table = asked[word := self.phase.removeprefix("gallery_")]
        needed = word if word in ("accuracy", "decode") else "sweep"
        if getattr(self, needed) is None:
            raise wrong(needed, f"{self.phase} asks for it")
        if PHASES[self.phase].timed and self.hardware.world_size > 1:
            raise wrong("hardware.world_size", f"{self.phase} measures one device; allowed: 1")
        known("methods", self.methods, table)
        for pattern in self.sweep.patterns if needed == "sweep" else ():
            if (pattern in ACTS) != (table is WAYS):
                near = allowed(pattern, ACTS if table is WAYS else PATTERNS)
                raise wrong("sweep.patterns", f"{pattern!r} is none of {self.phase}; {near}")
        if table is ARMS and DENSE not in self.methods:
            raise wrong("methods", f"every arm is held against {DENSE!r}: add it")
        if table is ARMS and any(ARMS[name].method == "sparsegpt" for name in self.methods):
            asked = self.accuracy  # whole batches are taken, and as many rows as the widest layer has inputs
            least = -(-4 * asked.width // asked.context)
            if -(-asked.calibration // asked.batch) * asked.batch < least:
                given = f"{asked.calibration} sequences; allowed with SparseGPT at this size: at least {least}"
                raise wrong("accuracy.calibration|accuracy.width|accuracy.context", given)
        return self

    def lacks(self) -> str:
        data = self.accuracy.data if self.accuracy else ""
        return f"accuracy.data: no folder {data} is there" if data and not (ROOT / data).is_dir() else ""


@dataclass(frozen=True)
class Case(study.Case):
    """x [batch, k] times a weight [n, k] of one pattern, transposed; `block`: 0 where the pattern has none. Or a Llama
    of width n with MLPs of k that decodes after `context` tokens; or a GPT of width n = k, trained on `tokens` in
    batches of `batch` sequences.
    """

    pattern: str
    n: int
    k: int
    batch: int
    sparsity: float
    block: int
    works: tuple[str, ...]
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    context: int = 0
    tokens: int = 0
    recipe: str = ""  # digest of all that a training is done by, besides the fields above

    @property
    def label(self) -> str:
        """ "blocks of 64 at sparsity 0.9, 4096x1024, B=256, bf16"."""
        if self.tokens:
            return f"{ARMS[self.methods[0]].short}, {self.n} wide, seed {self.seed}, {self.dtype}"
        return f"{words(columns(vars(self)))}, {self.dtype}"


def expand(params: Params) -> tuple[Case, ...]:
    """By pattern as listed: 2:4 at one half alone, inside blocks from there on; rows and columns in multiples of the
    first block. A case holds the dense methods and those of its pattern, if there are any.
    """
    if params.phase == "gallery_accuracy":
        return _trainings(params)
    sweep, cases = params.sweep, {}
    general = {"phase": params.phase, "dtype": params.dtype, "seed": params.seed}
    general |= {"device": params.hardware.device, "world_size": 1, "emulated": False}
    if params.phase == "gallery_decode":
        general |= params.decode.model_dump(include={"layers", "heads", "kv_heads", "vocab"})
        general |= {"methods": params.methods, "pattern": LLAMA, "n": params.decode.width, "k": params.decode.mlp}
        general |= {"sparsity": HALF, "block": 0, "works": ("token",)}
        every = itertools.product(params.decode.contexts, params.decode.batches)
        return tuple(Case(**general, context=context, batch=batch) for context, batch in every)
    general["works"] = sweep.works
    if params.phase == "gallery_training":
        general |= {"methods": params.methods, "works": ("step",), "sparsity": HALF, "block": 0}
        every = itertools.product(sweep.patterns, sweep.weights, sweep.batches)
        return tuple(Case(**general, pattern=act, n=n, k=k, batch=batch) for act, (n, k), batch in every)
    for pattern in sweep.patterns:
        methods = tuple(name for name in params.methods if METHODS[name].pattern in ("dense", pattern))
        blocks = {"unstructured": (0,), "2:4": (0,)}.get(pattern, sweep.blocks)
        blocks = blocks[:1] if pattern in ("rows", "columns") else blocks
        sparsities = (HALF,) if pattern == "2:4" else sweep.sparsities
        for weight, batch, sparsity, block in itertools.product(sweep.weights, sweep.batches, sparsities, blocks):
            own = dict(pattern=pattern, n=weight[0], k=weight[1], batch=batch, sparsity=sparsity, block=block)
            possible = pattern != "2:4 in blocks" or sparsity >= HALF
            if possible and any(METHODS[name].pattern == pattern for name in methods):
                cases[Case(**general, methods=methods, **own)] = None
    return tuple(cases)


def _trainings(params: Params) -> tuple[Case, ...]:
    """Of each seed the dense model with all that is pruned of it, then a case an arm that is trained 2:4; each of one
    rank, so that several can run side by side, and a run that is cut off holds whole pairs.
    """
    asked, device, free = params.accuracy, params.hardware.device, ("data", "seeds", "validations")
    how = asked.model_dump(exclude={*free, *SHAPE}) | {"betas": asked.betas, "final": asked.final, "device": device}
    case = {name: getattr(asked, name) for name in SHAPE if name != "width"} | {"n": asked.width, "k": asked.width}
    case |= {"phase": params.phase, "dtype": params.dtype, "device": device, "world_size": 1, "emulated": False}
    case |= {"pattern": "GPT", "sparsity": HALF, "works": (), "recipe": sha256(canonical(how))[:8]}
    pruned = tuple(name for name in params.methods if name in PRUNED)
    arms = [(DENSE, *pruned), *((name,) for name in params.methods if name not in (DENSE, *pruned))]
    seeds = range(params.seed, params.seed + asked.seeds)
    return tuple(Case(**case, seed=seed, methods=arm) for seed in seeds for arm in arms)


SHAPE = ("layers", "width", "heads", "vocab", "context", "tokens", "batch", "block")
LATER = ("layers", "heads", "kv_heads", "vocab", "context", "recipe")


def words(row: Mapping[str, Any]) -> str:
    """A case in words, by its `columns`: "blocks of 64 at sparsity 0.9, 4096x1024, B=256"."""
    if row["trained"]:
        return f"{row['pattern']}, {row['weight']}, {row['trained'] / 1e6:.3g}M tokens"
    if row["pattern"] == LLAMA:
        return f"{row['weight']}, {row['context']} tokens before, B={row['batch']}"
    blocks = f" of {row['block']}" if row["block"] else ""
    return f"{row['pattern']}{blocks} at sparsity {row['sparsity']:g}, {row['weight']}, B={row['batch']}"


def columns(case: Mapping[str, Any]) -> dict[str, Any]:
    """A record's `case` -> the study's own columns of a records frame."""
    own = {key: case[key] for key in ("pattern", "n", "k", "batch", "sparsity", "block")}
    own |= {key: case.get(key, getattr(Case, key)) for key in LATER} | {"trained": case.get("tokens", 0)}
    own["weight"] = f"{case['n']} wide" if own["trained"] else f"{case['n']}x{case['k']}"
    return own | ({"weight": f"{own['layers']} layers of {own['weight']}"} if case["pattern"] == LLAMA else {})
