"""The file of tuned products: the fastest right setting of cuSPARSELt for a product, and the fastest right config of
the small-batch kernel, each with its time.

One JSON file holds the versions that everything in it was measured with, and a list of entries. Of another schema or of
other versions it is ignored with a warning, and replaced as a whole by the next choice: what was measured with
different versions never stands side by side. Machines that share a folder but not their versions need one each, by
$BLOCKSHOCK_CACHE. A damaged file is treated alike.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from blockshock_lib import cache
from blockshock_lib.sparse24 import ways
from blockshock_lib.sparse24.ways import Way

SCHEMA = 2


@dataclass(frozen=True)
class Versions:
    """What all of a file depends on: "" where unknown.

    Attributes:
        driver: of the GPUs.
        torch: with the CUDA that it was built for; it also fixes the run-time compiler.
        cusparselt: as a number, 800 for 0.8.0.
        kernel: a digest of the small-batch kernel; "" where it cannot be compiled.
    """

    driver: str
    torch: str
    cusparselt: int
    kernel: str


@dataclass(frozen=True)
class Key:
    """What a choice depends on. N, K: out and in features; B: rows of the input, a multiple of 8.

    Both products work on batches of whole eights (a smaller one is filled up with zeros), so one key serves both.
    """

    N: int
    K: int
    B: int
    dtype: str
    gpu: str
    versions: Versions

    @property
    def words(self) -> str:
        return f"{self.N}x{self.K} B={self.B} {self.dtype}"


def default_path() -> Path:
    return cache.folder() / "choices.json"


def find(key: Key, path: Path | None = None) -> dict[Way, float]:
    """The ways kept for exactly this key, at most one of each kind -> milliseconds; warns of a file it cannot use."""
    path = path or default_path()
    try:
        return _load(path, key.versions).get(key, {})
    except _UnusableError as unusable:
        warnings.warn(f"{path.name} of tuned products is ignored, as it is {unusable}", stacklevel=2)
        return {}


def keep(key: Key, found: Mapping[Way, float], path: Path | None = None) -> None:
    """Add or replace one entry. Other processes may do the same at the same time; a reader never sees half a file.

    A file that cannot be written costs a warning only, as the choice is already in use.
    """
    path = path or default_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked(path):
            try:
                choices = _load(path, key.versions)
            except _UnusableError:
                choices = {}
            entries = [_plain(*choice) for choice in (choices | {key: found}).items()]
            content = {"schema": SCHEMA, "versions": asdict(key.versions), "choices": entries}
            cache.replace(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        warnings.warn(f"the tuned product is not kept: {error!r}", stacklevel=2)


class _UnusableError(Exception):
    """The file is damaged or stale; the message says how."""


def _load(path: Path, versions: Versions) -> dict[Key, dict[Way, float]]:
    """Every entry; none where there is no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise _UnusableError(f"of another release: schema {content['schema']!r}, not {SCHEMA}")
        if content["versions"] != (ours := asdict(versions)):
            theirs = content["versions"]
            differing = [
                f"{name} {theirs.get(name)!r}, now {ours[name]!r}" for name in ours if theirs.get(name) != ours[name]
            ]
            raise _UnusableError(f"stale: measured with {'; '.join(differing)}")
        return dict(_entry(entry, versions) for entry in content["choices"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _UnusableError(f"damaged: {error!r}") from None


_KEY_FIELDS = tuple(field.name for field in fields(Key) if field.name != "versions")


def _plain(key: Key, found: Mapping[Way, float]) -> dict:
    kept = [{**ways.as_json(way), "ms": ms} for way, ms in found.items()]
    return {**{name: getattr(key, name) for name in _KEY_FIELDS}, "ways": kept}


def _entry(entry: dict, versions: Versions) -> tuple[Key, dict[Way, float]]:
    key = Key(**{name: entry[name] for name in _KEY_FIELDS}, versions=versions)
    if any(type(value) is not int for value in (key.N, key.K, key.B)) or not type(key.dtype) is type(key.gpu) is str:
        raise TypeError(f"an entry with a wrong type: {entry}")
    found = {}
    for kept in entry["ways"]:
        way = ways.from_json({name: value for name, value in kept.items() if name != "ms"})
        found[way] = float(kept["ms"])
        if not found[way] > 0:
            raise ValueError(f"an entry out of range: {entry}")
    if not found or len({type(way) for way in found}) < len(found):
        raise ValueError(f"an entry without one way of each kind: {entry}")
    return key, found
