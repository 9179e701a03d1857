"""A corpus that lies here, by its digest: what was built from packages, or shards that a user brought.

Its folder, outputs/corpus/<digest>/, is not in git; corpus.json says all about it. Losses of two digests are never
compared.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from blockshock_lib.errors import DataError
from blockshock_lib.files import ROOT, canonical, locked, sha256, write_atomic
from blockshock_lib.layers.gpt import shards

PLACE = ROOT / "outputs" / "corpus"
SUMMARY = "corpus.json"
OVERLAP = 0.1  # share of the validation's shingles in the training, above which shards are refused


@dataclass(frozen=True)
class Corpus:
    """Shards of training and validation. train, val, stamps: names in its folder, or whole paths of a user's files."""

    digest: str
    vocab: int
    train: list[str]
    val: list[str]
    tokens: dict[str, int]  # of train and of val
    overlap: float  # share of the validation's shingles that stand in the training
    bytes_per_token: float | None  # of all of the validation's text; None where a user's shards do not say
    made: str  # digest of what it was made of: tells whether it must be made again
    stamps: dict[str, list[Any]]  # file -> bytes, date, digest

    @property
    def folder(self) -> Path:
        return PLACE / self.digest

    def read(self, part: str) -> list[np.ndarray]:
        """The shards of "train" or "val", mapped: what `shards.Batches` and `shards.fixed` take."""
        return [shards.read(self.folder / path) for path in getattr(self, part)]


class Text:
    """What a GPT learns of a corpus: `at`, (tokens, targets) of a step, as of `shards.Batches`; `held_out`, those of
    the validation. `case` says batch, context and seed, `settings` the `validation_tokens`.
    """

    def __init__(self, corpus: Corpus, case: Any, settings: Any):
        self.digest, self.count = corpus.digest, corpus.tokens["train"]
        self.at = shards.Batches(corpus.read("train"), case.batch, case.context, case.seed).at
        asked = min(settings.validation_tokens, corpus.tokens["val"] - case.context)
        self.held_out = shards.fixed(corpus.read("val"), asked, case.batch, case.context)


def known(made: str) -> Corpus | None:
    """The corpus made of just that, if it lies here whole and as it was when its digest was taken."""
    for path in sorted(PLACE.glob(f"*/{SUMMARY}")):
        with suppress(OSError, ValueError, KeyError, TypeError):  # what is damaged or gone is made anew
            held = json.loads(path.read_text("utf-8"))
            found = Corpus(**{field.name: held[field.name] for field in fields(Corpus)})
            if found.made == made and all(_is_still(found.folder / name, *was) for name, was in found.stamps.items()):
                return found
    return None


def _is_still(path: Path, size: int, date: int, digest: str) -> bool:
    return [size, date] == stamp(path) or sha256(path) == digest


def given(data: Path, vocab: int) -> Corpus:
    """A folder of a user's shards, nanoGPT's or llm.c's, as a corpus: train and val told by their names.

    All is read once: each file's digest, its largest token and the overlap; again only if a size or date has changed.
    DataError: a file is damaged, has a token beyond `vocab`, or the validation stands in the training.
    """
    parts = shards.named(data.resolve())
    held = {path: shards.read(path) for some in parts.values() for path in some}
    made = sha256(canonical([vocab, *([str(path), *stamp(path)] for path in held)]))
    with alone():
        return known(made) or _read(parts, held, vocab, made)


def _read(parts: dict[str, list[Path]], held: dict[Path, np.ndarray], vocab: int, made: str) -> Corpus:
    print(f"reading {len(held)} shards", flush=True)
    for path, tokens in held.items():
        if (most := shards.largest(tokens)) >= vocab:
            raise DataError(f"{path} has the token {most}, beyond the vocabulary of {vocab}")
    stamps = {str(path): [*stamp(path), sha256(path)] for path in held}
    names = {part: list(map(str, some)) for part, some in parts.items()}
    train, val = ([stamps[name][-1] for name in some] for some in names.values())
    if same := {*train} & {*val}:
        twice = " and ".join(name for name in stamps if stamps[name][-1] in same)
        raise DataError(f"text of the validation stands in the training: {twice} are the same")
    checked = compared({part: [held[path] for path in some] for part, some in parts.items()})
    digest = sha256(canonical([vocab, train, val]))[:12]
    found = Corpus(digest, vocab, **names, **checked, bytes_per_token=None, made=made, stamps=stamps)
    write_atomic(found.folder / SUMMARY, json.dumps(asdict(found), indent=1))
    return found


def compared(both: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """`tokens` and `overlap` of a Corpus. DataError where the validation stands in the training."""
    print("comparing validation and training", flush=True)
    share = shards.overlap(both["train"], both["val"])
    if share > OVERLAP:
        of = f"{share:.0%} of its stretches of {shards.WIDTH} tokens"
        raise DataError(f"text of the validation stands in the training: {of}")
    return {"tokens": {part: sum(map(len, some)) for part, some in both.items()}, "overlap": share}


def stamp(path: Path) -> list[int]:
    return [(stat := path.stat()).st_size, stat.st_mtime_ns]


@contextmanager
def alone() -> Iterator[None]:
    """One process at a time makes a corpus here."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with locked(PLACE):
        yield
