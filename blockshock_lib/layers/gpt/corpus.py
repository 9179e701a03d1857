"""`python -m blockshock_lib.layers.gpt.corpus` builds a corpus from the installed packages, or takes a user's shards.

Its folder, outputs/corpus/<digest>/, is not in git: corpus.json says all about it, sources.json lists the files that it
is made of, vocabulary.json is a byte-level BPE, the rest are shards. The digest is over these: the same packages have
the same digest on every machine. Losses of two digests are never compared.
"""

import argparse
import functools
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from blockshock_lib.errors import BlockShockError, DataError
from blockshock_lib.files import ROOT, canonical, locked, sha256, short_digest, shown, write_atomic
from blockshock_lib.layers.gpt import shards, sources

PLACE = ROOT / "outputs" / "corpus"
SUMMARY, SOURCES, VOCABULARY = "corpus.json", "sources.json", "vocabulary.json"
END = "<|endoftext|>"  # token 0, before each file
BATCH = 256  # files encoded at a time
EVERY = 8  # seconds from one line of the command to the next, whatever takes long
OVERLAP = 0.1  # share of the validation's shingles in the training, above which shards are refused

say = functools.partial(print, flush=True)


@dataclass(frozen=True)
class Corpus:
    """Shards of training and validation. train, val: names in its folder, or whole paths of a user's files."""

    digest: str
    train: list[str]
    val: list[str]
    tokens: dict[str, int]  # of train and of val
    bytes_per_token: float | None  # of all of the validation's text; None where a user's shards do not say
    made: str  # digest of what it was made of: tells whether it must be made again

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
        self.held_out = shards.fixed(corpus.read("val"), settings.validation_tokens, case.batch, case.context)


@dataclass(frozen=True)
class Recipe:
    """packages: names, none for all; vocab: tokens; limit_mb: of text before anything is left out, 0 for all."""

    packages: tuple[str, ...] = ()
    vocab: int = 8192
    limit_mb: float = 0.0

    def __post_init__(self) -> None:
        if not 256 < self.vocab <= 1 << 16:
            raise DataError(f"vocab: {self.vocab}; it is above 256, the bytes, and at most {1 << 16}, for uint16")


# Their wheels are for any platform: the same text, so the same digest, wherever constraints.txt is kept to.
NANO = Recipe(
    ("fonttools", "ipython", "jinja2", "mpmath", "networkx", "packaging", "prompt-toolkit", "sympy"), 1024, 2.0
)


def ready(recipe: Recipe) -> Corpus:
    """The corpus of that recipe and of the packages installed here: the one that lies here, or else it is built.
    DataError: no tokenizers, too little text, or text of the validation that stands in the training.
    """
    chosen, skipped = sources.packages(recipe.packages)
    made = _made(recipe, chosen)
    return _alone(made, functools.partial(_built, recipe, chosen, skipped, made))


def chosen(data: str, kind: str, vocab: int) -> Corpus:
    """The user's shards in `data`, or a corpus of the packages that are installed here, built where there is none, of
    the `kind` "packages" or "nano".
    """
    return given(ROOT / data, vocab) if data else ready(replace(NANO if kind == "nano" else Recipe(), vocab=vocab))


def _alone(made: str, make: Callable[[], Corpus]) -> Corpus:
    """The corpus that lies here, or else the one that `make` makes, in one process at a time."""
    if found := _known(made):
        return found
    PLACE.mkdir(parents=True, exist_ok=True)
    with locked(PLACE):
        return _known(made) or make()


def given(data: Path, vocab: int) -> Corpus:
    """A folder of a user's shards, nanoGPT's or llm.c's, as a corpus: train and val told by their names.

    All is read once: each file's digest, its largest token and the overlap; again only if one was written since.
    DataError: a file is damaged, has a token beyond `vocab`, or the validation stands in the training.
    """
    parts = shards.named(data.resolve())
    try:
        # Nobody sets a file's ctime: another content in the old one's size and date shows, too.
        stats = [[str(path), path.stat().st_size, path.stat().st_ctime_ns] for some in parts.values() for path in some]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    made = sha256(canonical([vocab, *stats]))
    return _alone(made, functools.partial(_read, parts, vocab, made))


def _read(parts: dict[str, list[Path]], vocab: int, made: str) -> Corpus:
    for path in (*parts["train"], *parts["val"]):
        say(f"reading {path}")
        if (most := shards.read(path).max()) >= vocab:
            raise DataError(f"{path} has the token {most}, beyond the vocabulary of {vocab}")
    tokens = _compared({part: [shards.read(path) for path in some] for part, some in parts.items()})
    names = {part: list(map(str, some)) for part, some in parts.items()}
    digest = sha256(canonical([vocab, *(list(map(sha256, some)) for some in parts.values())]))[:12]
    found = Corpus(digest, **names, tokens=tokens, bytes_per_token=None, made=made)
    write_atomic(found.folder / SUMMARY, json.dumps(asdict(found), indent=1))
    return found


def _known(made: str) -> Corpus | None:
    """The corpus made of just that, if it lies here whole and as it was when its digest was taken."""
    for path in sorted(PLACE.glob(f"*/{SUMMARY}")):
        with suppress(ValueError, KeyError, TypeError, OSError):  # what is damaged, or just being made, is made anew
            held = json.loads(path.read_text("utf-8"))
            found = Corpus(**{field.name: held[field.name] for field in fields(Corpus)})
            # A user's shards lie elsewhere: `made` tells if they were written since.
            if found.made == made and (found.bytes_per_token is None or _digest(found.folder) == found.digest):
                return found
    return None


def _digest(folder: Path) -> str:
    parts = (path for path in folder.iterdir() if path.is_file() and path.name != SUMMARY)
    return sha256(canonical({path.name: sha256(path) for path in parts if not path.name.startswith(".")}))[:12]


def _compared(both: dict[str, list[np.ndarray]]) -> dict[str, int]:
    """The tokens of both. DataError where the validation stands in the training."""
    say("comparing validation and training")
    share = shards.overlap(both["train"], both["val"])
    if share > OVERLAP:
        of = f"{share:.0%} of its stretches of {shards.WIDTH} tokens"
        raise DataError(f"text of the validation stands in the training: {of}")
    say(f"{share:.2%} of the held-out stretches of {shards.WIDTH} tokens stand in the training too")
    return {part: sum(map(len, some)) for part, some in both.items()}


def _built(recipe: Recipe, chosen: Sequence[sources.Package], skipped: dict[str, str], made: str) -> Corpus:
    if recipe.limit_mb:
        chosen = sources.sample(chosen, int(recipe.limit_mb * 1e6))
    say(f"reading {sum(one.size for one in chosen) / 1e6:.1f} MB of {len(chosen)} packages")
    kept, out = sources.read(chosen)
    parts, leaked = sources.divided(kept)
    size = {part: sum(file.size for file in some) for part, some in parts.items()}
    train, val = (size[part] / 1e6 for part in ("train", "val"))
    say(f"{train:.2f} MB to train on, {val:.2f} MB held out, {len(out | leaked)} files left out")
    say(f"vocabulary of {recipe.vocab}")
    vocabulary = _vocabulary([file.text for file in parts["train"]], recipe.vocab)
    shutil.rmtree(folder := PLACE / ".building", ignore_errors=True)
    folder.mkdir(parents=True)
    names, both = {}, {}
    for part, some in parts.items():
        say(f"tokens of {part}")
        path = folder / f"packages_{part}_000001.bin"
        shards.write(path, _encoded(vocabulary, some))
        names[part], both[part] = [path.name], [shards.read(path)]
    (folder / VOCABULARY).write_text(vocabulary.to_str(), "utf-8")
    (folder / SOURCES).write_text(_listed(chosen, parts), "utf-8")
    tokens = _compared(both)
    per = size["val"] / tokens["val"]
    found = Corpus(_digest(folder), **names, tokens=tokens, bytes_per_token=per, made=made)
    about = {"recipe": asdict(recipe), "bytes": size, "skipped": skipped, "left_out": out | leaked}
    write_atomic(folder / SUMMARY, json.dumps(asdict(found) | about, indent=1))
    shutil.rmtree(found.folder, ignore_errors=True)
    folder.rename(found.folder)
    return found


def _made(recipe: Recipe, chosen: Sequence[sources.Package]) -> str:
    code = short_digest(Path(__file__), *(Path(str(module.__file__)) for module in (shards, sources)))
    about = {package.name: [package.version, len(package.files), package.size] for package in chosen}
    return sha256(canonical([asdict(recipe), code, version("tokenizers"), about]))


def _listed(chosen: Sequence[sources.Package], parts: dict[str, list[sources.File]]) -> str:
    rows = {one.name: {"version": one.version, "licence": one.licence, "files": {}} for one in chosen}
    for part, some in parts.items():
        for file in some:
            rows[file.package]["split"] = part
            rows[file.package]["files"][file.name] = file.sha256
    return json.dumps({name: row for name, row in rows.items() if row["files"]}, indent=1, sort_keys=True)


def _vocabulary(texts: Sequence[str], size: int) -> Any:
    """A tokenizers.Tokenizer: the text alone decides which pairs merge, for equal counts go by the pairs' numbers."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise DataError("a vocabulary needs the package tokenizers: pip install 'blockshock-lib[workbook]'") from error
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    how = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    made.train_from_iterator(texts, how)
    if (have := made.get_vocab_size()) != size:
        raise DataError(f"vocab: the text gives {have} tokens, not {size}: a smaller vocabulary or more text")
    return made


def _encoded(vocabulary: Any, some: Sequence[sources.File]) -> np.ndarray:
    parts = []
    for start in tqdm(range(0, len(some), BATCH), "encoding", leave=False, disable=None):
        batch = [file.text for file in some[start : start + BATCH]]
        for one in vocabulary.encode_batch_fast(batch, add_special_tokens=False):
            parts.append(np.array([0, *one.ids], np.uint16))
    return np.concatenate(parts)


def main(words: Sequence[str] = ()) -> int:
    """Builds a corpus, or with --data takes shards, and says its digest."""
    parser = argparse.ArgumentParser(prog="make corpus", description="A corpus to train on; nothing is downloaded.")
    parser.add_argument("--vocab", type=int, help=f"tokens; {Recipe().vocab}, of --data GPT-2's 50257")
    parser.add_argument("--data", default="", help="a folder of your own shards, as nanoGPT or llm.c write them")
    asked = parser.parse_args(words)
    vocab = (50257 if asked.data else Recipe().vocab) if asked.vocab is None else asked.vocab
    over, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not over.wait(EVERY):
            say(f"{time.monotonic() - began:.0f} s")

    threading.Thread(target=beat, daemon=True).start()
    try:
        found = chosen(asked.data and str(Path(asked.data).absolute()), "packages", vocab)
    except BlockShockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        over.set()
    per = f", {found.bytes_per_token:.3f} bytes a token" if found.bytes_per_token else ""
    print("{train} tokens to train on, {val} held out".format(**found.tokens) + per)
    print(f"corpus {found.digest} in {shown(found.folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
