"""The file of tuned algorithms: which setting of cuSPARSELt was fastest, and right, for a product on a GPU.

One JSON file holds a list of entries. An entry is used only where its whole key agrees: sizes, dtype, GPU and the
versions of torch and cuSPARSELt. What is damaged or of another version is ignored with a warning and searched again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from blockshock_lib.sparse24.tuning import Setting

SCHEMA = 1


@dataclass(frozen=True)
class Key:
    """What a choice depends on. N, K: out and in features; B: rows of the input as cuSPARSELt sees them."""

    N: int
    K: int
    B: int
    dtype: str
    gpu: str
    torch: str
    cusparselt: int

    def same_problem(self, other: Key) -> bool:
        """Equal but for the library versions."""
        versions = {"torch": other.torch, "cusparselt": other.cusparselt}
        return Key(**{**asdict(self), **versions}) == other


def default_path() -> Path:
    """choices.json in the folder $BLOCKSHOCK_CACHE, or in .cache/blockshock of the working directory."""
    folder = os.environ.get("BLOCKSHOCK_CACHE")
    return (Path(folder) if folder else Path.cwd() / ".cache" / "blockshock") / "choices.json"


def load(path: Path | None = None) -> dict[Key, tuple[Setting, float]]:
    """Every sound entry: key -> (setting, milliseconds when it was measured). A missing file is an empty one."""
    path = path or default_path()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}, not {SCHEMA}")
        return dict(_entry(entry) for entry in content["choices"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path.name} of tuned algorithms is ignored, as it is damaged: {error!r}", stacklevel=2)
        return {}


def find(key: Key, path: Path | None = None) -> Setting | None:
    """The setting kept for exactly this key, or None. Warns where only other versions' choices are there."""
    choices = load(path)
    if key in choices:
        return choices[key][0]
    if stale := [other for other in choices if key.same_problem(other)]:
        warnings.warn(
            f"the tuned algorithm for {key.N}x{key.K} B={key.B} is ignored, as it is stale: measured with torch "
            f"{stale[0].torch} and cuSPARSELt {stale[0].cusparselt}",
            stacklevel=2,
        )
    return None


def keep(key: Key, setting: Setting, ms: float, path: Path | None = None) -> None:
    """Add or replace one entry. Other processes may do the same at the same time; a reader never sees half a file.

    A file that cannot be written costs a warning only, as the setting is already in use.
    """
    path = path or default_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            choices = {**load(path), key: (setting, ms)}
            entries = [{**asdict(k), **s._asdict(), "ms": t} for k, (s, t) in choices.items()]
            _replace(path, json.dumps({"schema": SCHEMA, "choices": entries}, indent=1) + "\n")
    except OSError as error:
        warnings.warn(f"the tuned algorithm is not kept: {error!r}", stacklevel=2)


def _entry(entry: dict) -> tuple[Key, tuple[Setting, float]]:
    key = Key(**{name: entry[name] for name in Key.__dataclass_fields__})
    setting = Setting(**{name: entry[name] for name in Setting._fields})
    whole = (key.N, key.K, key.B, key.cusparselt, *setting)
    words = (key.dtype, key.gpu, key.torch)
    if any(type(value) is not int for value in whole) or any(type(value) is not str for value in words):
        raise TypeError(f"an entry with a wrong type: {entry}")
    if setting.alg_id < 0 or setting.split_k == 0 or not float(entry["ms"]) > 0:
        raise ValueError(f"an entry out of range: {entry}")
    return key, (setting, float(entry["ms"]))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a killed process
        yield


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
