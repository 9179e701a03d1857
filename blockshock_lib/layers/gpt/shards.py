"""Shards of tokens: files of nanoGPT and llm.c are read, those of llm.c written; batches in an order fixed by a seed.

nanoGPT's train.bin and val.bin are uint16 and nothing else. llm.c and modded-nanogpt begin with 256 int32: magic
20240520, version 1, number of tokens; uint16 follow.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from blockshock_lib.errors import DataError

HEADER = 256 * 4  # bytes
MAGIC, VERSION = 20240520, 1
LLAMA = 20240801  # of llm.c's shards of uint32
WIDTH = 50  # tokens, or words, of a shingle
EVERY = 16  # one of so many shingles is kept, chosen by its own hash: copies keep the same ones
CHUNK = 1 << 22  # tokens
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


def write(path: Path, tokens: np.ndarray) -> None:
    """`tokens`, fewer than 2^31 integers below 2^16, as a file of llm.c's format."""
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def read(path: Path) -> np.ndarray:
    """The tokens of a shard of any kind, mapped and not loaded. DataError: it is damaged, empty or of no known kind."""
    try:
        size, first = path.stat().st_size, np.fromfile(path, "<i4", 3).tolist()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    magic, version, count = [*first, 0, 0, 0][:3]
    if (magic, version) == (MAGIC, VERSION):
        if size != (whole := HEADER + 2 * count):
            raise DataError(f"{path} says {count} tokens, {whole} bytes with its header, but has {size}")
        start = HEADER
    elif path.name not in ("train.bin", "val.bin") or magic in (MAGIC, LLAMA):
        why = f"begins with {magic}, version {version}, not with {MAGIC}, version {VERSION}, of uint16"
        raise DataError(f"{path} {why}; nanoGPT's files are named train.bin and val.bin")
    elif size % 2:
        raise DataError(f"{path} has an odd size, {size} bytes: tokens of nanoGPT take two each")
    else:
        start, count = 0, size // 2
    if not count:
        raise DataError(f"{path} holds no tokens")
    tokens = np.memmap(path, "<u2", "r", start, (count,))
    # The upper halves of uint32 are 0, or 1 in a vocabulary of up to 2^17, as Llama's.
    if (first := tokens[:CHUNK])[::2].any() and count > 2 and first[1::2].max() <= (first[::2].max() > 1):
        raise DataError(f"every second token of {path} is 0 or 1: its tokens take four bytes or more, not two")
    return tokens


def named(folder: Path) -> dict[str, list[Path]]:
    """The .bin files of a folder for "train" and for "val", as their names say."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not there, or is no folder")
    found = {}
    for word in ("train", "val"):
        found[word] = sorted(p for p in folder.glob("*.bin") if re.search(rf"(^|[_-]){word}([_-]|$)", p.stem))
        if not found[word]:
            raise DataError(f"{folder}: none is for {word} by its name, as {word}.bin or fineweb_{word}_000001.bin are")
    return found


def shingles(ids: np.ndarray) -> np.ndarray:
    """Hashes, uint64, of the WIDTH neighbours at every place of `ids`, integers; those that EVERY keeps."""
    if (count := len(ids) - WIDTH + 1) < 1:
        return np.empty(0, np.uint64)
    power = np.cumprod(np.full(len(ids), _MULTIPLIER, np.uint64))
    inverse = np.cumprod(np.full(count, pow(_MULTIPLIER, -1, 1 << 64), np.uint64))
    # A window's polynomial is a difference of sums, brought back to the window's own first power; all modulo 2^64.
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(ids.astype(np.uint64)) * power)])
    hashes = _mixed((sums[WIDTH:] - sums[:-WIDTH]) * inverse)
    return hashes[hashes % np.uint64(EVERY) == 0]


def _mixed(values: np.ndarray) -> np.ndarray:
    """Splitmix64's finish: every bit of a value changes all others."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(_MULTIPLIER)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def overlap(train: Sequence[np.ndarray], val: Sequence[np.ndarray]) -> float:
    """The share of the validation's shingles that stand in the training. DataError where it is too short for one."""
    held, counts = np.unique(np.concatenate([shingles(part) for part in _chunks(val)]), return_counts=True)
    if not len(held):
        raise DataError(f"the validation, {sum(map(len, val))} tokens, is too short to be told from the training")
    found = np.zeros(len(held), bool)
    for part in tqdm(list(_chunks(train)), "comparing", leave=False, disable=None):
        hashes = shingles(part)
        at = np.searchsorted(held, hashes) % len(held)  # what lies beyond the last is not it
        found[at[held[at] == hashes]] = True
    return float(counts[found].sum() / counts.sum())


def _chunks(shards: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    for shard in shards:
        for start in range(0, len(shard), CHUNK):
            yield shard[start : start + CHUNK + WIDTH - 1]


class Batches:
    """Batches of training windows of `context` tokens. The order is a function of the seed alone, so every arm of a
    seed sees the same one; a step is a place in it, so resuming needs the step only. Each epoch visits every window
    once, in a new order and from a new offset of all windows, both drawn from (seed, epoch).
    """

    def __init__(self, shards: Sequence[np.ndarray], batch: int, context: int, seed: int):
        self.shards, self.batch, self.context, self.seed = shards, batch, context, seed
        # An offset is less than a context; a target is one token on.
        self._ends = np.cumsum([max(0, len(shard) // context - 1) for shard in shards])
        self.windows = int(self._ends[-1])  # of an epoch
        self._epoch, self._order, self._offset = -1, np.empty(0, np.int64), 0
        if self.windows < batch:
            have = sum(map(len, shards))
            raise DataError(f"a batch of {batch} x {context} tokens does not fit into {have} tokens of training")

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of a step, counted from 0, int64 [batch, context]: a target is the next token."""
        rows = []
        for place in range(step * self.batch, (step + 1) * self.batch):
            epoch, place = divmod(place, self.windows)
            if epoch != self._epoch:
                draw = np.random.default_rng([self.seed, epoch])
                self._epoch, self._order = epoch, draw.permutation(self.windows)
                self._offset = int(draw.integers(self.context))
            rows.append(_window(self.shards, self._ends, int(self._order[place]), self.context, self._offset))
        return _pair(rows)


def fixed(shards: Sequence[np.ndarray], tokens: int, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """Validation: the same `tokens` // `context` windows always, or all there are, spread evenly over the shards, as
    `Batches.at` gives them; the last batch may be smaller. DataError where there is none.
    """
    ends = np.cumsum([max(0, len(shard) - 1) // context for shard in shards])
    if not (count := min(tokens // context, int(ends[-1]))):
        raise DataError(f"no window of {context} tokens fits into {tokens} tokens of validation, or into its shards")
    rows = [_window(shards, ends, number * int(ends[-1]) // count, context) for number in range(count)]
    return [_pair(rows[start : start + batch]) for start in range(0, count, batch)]


def _window(shards: Sequence[np.ndarray], ends: np.ndarray, number: int, context: int, offset: int = 0) -> np.ndarray:
    shard = int(np.searchsorted(ends, number, side="right"))
    start = offset + (number - int(ends[shard - 1] if shard else 0)) * context
    return shards[shard][start : start + context + 1]


def _pair(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    both = torch.from_numpy(np.stack(rows).astype(np.int64))  # [rows, context + 1]
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
