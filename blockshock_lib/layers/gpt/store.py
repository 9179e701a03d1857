"""A corpus that lies here, by its digest: what was built from packages, or shards that a user brought.

Its folder, outputs/corpus/<digest>/, is not in git; corpus.json says all about it. Losses of two digests are never
compared.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from blockshock_lib.errors import DataError
from blockshock_lib.files import ROOT, canonical, locked, sha256, shown, write_atomic
from blockshock_lib.layers.gpt import shards

PLACE = ROOT / "outputs" / "corpus"
SUMMARY = "corpus.json"
BEAT = 5.0  # seconds between two lines of progress
OVERLAP = 0.1  # share of the validation's shingles in the training, above which shards are refused

Say = Callable[[str], None]


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


def opened(digest: str) -> Corpus:
    """The corpus of that digest. DataError where it is not here, or is no longer what the digest was taken of."""
    try:
        held = json.loads((PLACE / digest / SUMMARY).read_text("utf-8"))
        found = Corpus(**{field.name: held[field.name] for field in fields(Corpus)})
    except FileNotFoundError:
        told = "make corpus builds one of the packages installed here, --data takes your shards"
        raise DataError(f"corpus {digest} is not in {shown(PLACE)}; {told}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{shown(PLACE / digest / SUMMARY)} is damaged: {error!r}") from error
    for name, (size, date, was) in found.stamps.items():
        if not (path := found.folder / name).is_file():
            raise DataError(f"corpus {digest}: {shown(path)} is missing")
        if [size, date] != stamp(path) and sha256(path) != was:
            raise DataError(f"corpus {digest}: {shown(path)} has changed since its digest was taken")
    return found


def known(made: str) -> Corpus | None:
    """The corpus made of just that, if it lies here whole."""
    for path in sorted(PLACE.glob(f"*/{SUMMARY}")):
        try:
            if (found := opened(path.parent.name)).made == made:
                return found
        except DataError:
            continue
    return None


def given(data: Path | str | Sequence[Path | str], vocab: int, say: Say = print) -> Corpus:
    """A user's shards, nanoGPT's or llm.c's, as a corpus: a folder or files, train and val told by their names.

    All is read once: each file's digest, its largest token and the overlap; again only if a size or date has changed.
    DataError: a file is damaged, has a token beyond `vocab`, or the validation stands in the training.
    """
    parts = {part: [path.resolve() for path in some] for part, some in shards.named(data).items()}
    held = {path: shards.read(path) for some in parts.values() for path in some}
    made = sha256(canonical([vocab, *([str(path), *stamp(path)] for path in held)]))
    if found := known(made):
        return found
    with alone(say):
        stamps = {}
        with told(say, f"reading {len(held)} shards") as tell:
            for path, tokens in held.items():
                tell(path.name)
                if (most := shards.largest(tokens)) >= vocab:
                    raise DataError(f"{path} has the token {most}, beyond the vocabulary of {vocab}")
                stamps[str(path)] = [*stamp(path), sha256(path)]
        names = {part: list(map(str, some)) for part, some in parts.items()}
        train, val = ([stamps[name][-1] for name in some] for some in names.values())
        if same := {*train} & {*val}:
            twice = " and ".join(name for name in stamps if stamps[name][-1] in same)
            raise DataError(f"text of the validation stands in the training: {twice} are the same")
        both = {part: [held[path] for path in some] for part, some in parts.items()}
        digest = sha256(canonical([vocab, train, val]))[:12]
        found = Corpus(digest, vocab, **names, **compared(both, say), bytes_per_token=None, made=made, stamps=stamps)
        write_atomic(found.folder / SUMMARY, json.dumps(asdict(found), indent=1))
    return found


def compared(both: dict[str, list[np.ndarray]], say: Say) -> dict[str, Any]:
    """`tokens` and `overlap` of a Corpus. DataError where the validation stands in the training."""
    with told(say, "comparing validation and training") as tell:
        share = shards.overlap(both["train"], both["val"], lambda done: tell(f"{done / 1e6:.0f} M tokens"))
    if share > OVERLAP:
        of = f"{share:.0%} of its stretches of {shards.WIDTH} tokens"
        raise DataError(f"text of the validation stands in the training: {of}")
    return {"tokens": {part: sum(map(len, some)) for part, some in both.items()}, "overlap": share}


def stamp(path: Path) -> list[int]:
    return [(stat := path.stat()).st_size, stat.st_mtime_ns]


@contextmanager
def alone(say: Say) -> Iterator[None]:
    """One process at a time makes a corpus here; one that waits says so."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(PLACE, 0))
        except BlockingIOError:
            with told(say, "waiting for another process that makes a corpus"):
                stack.enter_context(locked(PLACE))
        yield


@contextmanager
def told(say: Say, what: str) -> Iterator[Say]:
    """Says `what`, and each BEAT seconds until it ends how far it is, which the function it gives is told."""
    began, done, far = time.monotonic(), threading.Event(), [""]

    def beat() -> None:
        while not done.wait(BEAT):
            say(f"{what}: {far[0]}{', ' if far[0] else ''}{time.monotonic() - began:.0f} s")

    say(what)
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield lambda text: far.__setitem__(0, text)
    finally:
        done.set()
        thread.join()
