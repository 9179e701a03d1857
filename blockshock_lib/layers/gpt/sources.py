"""The text of a corpus: which files of the installed packages are in it, under which licence, and which are left out.

Nothing is downloaded. Text of the standard library and of the packages that constraints.txt pins, as installed here.
"""

import functools
import hashlib
import importlib.metadata
import platform
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from blockshock_lib.errors import DataError
from blockshock_lib.files import ROOT, sha256
from blockshock_lib.layers.gpt.shards import shingles

SUFFIXES = (".py", ".pyi", ".c", ".h", ".hpp", ".cpp", ".cuh")
STDLIB = "python"
PINS = ROOT / "constraints.txt"
HELD_OUT = (0.05, 0.08)  # share of the bytes
LARGE = 0.02  # of the bytes: packages of more are held out only where the smaller ones are not enough
COPIED = 0.5  # share of its shingles in files kept before, from which on a file is a copy
LEAKED = 0.1  # the same for a file of the validation, in the training
GENERATED = (0.35, 400)  # fewer letters than this share of what is no blank; longer lines on average
VENDORED = re.compile(r"(^|/)(_?vendor(ed)?|_vendored|third_party|_?extern(al)?s?)/")
SAYS_GENERATED = re.compile(
    rb"@generated|(auto-?|automatically |machine[- ])generated|do not edit|generated (by|from)", re.I
)
HEAD = 1024  # bytes in which a file says whose it is and how it was made
WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Package:
    """An installed package. files: name -> place, of the kinds in SUFFIXES."""

    name: str
    version: str
    licence: str
    files: dict[str, Path]

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


@dataclass(frozen=True)
class File:
    """A file of the corpus. marks: the shingles of its words, uint64."""

    package: str
    name: str
    sha256: str
    text: str
    size: int  # bytes
    marks: np.ndarray


def packages(wanted: Sequence[str] = ()) -> tuple[list[Package], dict[str, str]]:
    """(packages in the order of their names, `python` the standard library; name -> why one is skipped). wanted: only
    these, without the standard library. DataError: one of `wanted` is not installed or may not be taken.
    """
    pins = PINS.read_text("utf-8").splitlines() if PINS.is_file() else []
    pinned = {_plain(line.partition("==")[0]) for line in pins if "==" in line}
    root = Path(sysconfig.get_path("stdlib"))
    library = [] if wanted else [path for path in root.rglob("*") if "site-packages" not in path.parts]
    own = _text({path.relative_to(root).as_posix(): path for path in library})
    found, skipped = {STDLIB: Package(STDLIB, platform.python_version(), "PSF-2.0", own)}, {}
    for one in importlib.metadata.distributions():
        name, licence = _plain(one.name or ""), _licence(one.metadata)
        if name in found or name in skipped:
            continue
        if why := _refused(name, licence, one.metadata, pinned):
            skipped[name] = why
        else:
            files = one.files if (not wanted or name in wanted) and one.files else ()
            paths = {file.as_posix(): Path(one.locate_file(file)) for file in files if ".." not in file.parts}
            found[name] = Package(name, one.version, licence, _text(paths))
    for name in wanted:
        if name not in found:
            why = f"skipped: {skipped[name]}" if name in skipped else "not installed"
            raise DataError(f"packages: {name} is {why}")
    chosen = [found[name] for name in sorted(found) if name in (wanted or found) and found[name].files]
    return chosen, {} if wanted else dict(sorted(skipped.items()))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip().lower())


def _refused(name: str, licence: str, metadata: importlib.metadata.PackageMetadata, pinned: set[str]) -> str:
    about = f"{name} {licence} {metadata.get('Author', '')} {metadata.get('Author-email', '')}".lower()
    if "nvidia" in about:
        return "NVIDIA's"
    if pinned and name not in pinned:
        return "not pinned in constraints.txt"
    return "" if licence else "its metadata name no licence"


def _licence(metadata: importlib.metadata.PackageMetadata) -> str:
    """The SPDX expression; else the field `License` if it is a name and not a text; else the classifiers'."""
    named = (metadata.get("License-Expression") or "").strip()
    field = (metadata.get("License") or "").strip()
    if not named and field and field.upper() != "UNKNOWN":
        named = field.splitlines()[0].strip()[:80]
    classes = [
        text.rpartition("::")[2].strip() for text in metadata.get_all("Classifier") or () if "License ::" in text
    ]
    return named or ", ".join(sorted(set(classes)))


def _text(paths: dict[str, Path]) -> dict[str, Path]:
    return {name: path for name, path in paths.items() if path.suffix in SUFFIXES and path.is_file()}


def sample(chosen: Sequence[Package], most: int) -> list[Package]:
    """At most `most` bytes of them all, in proportion of their sizes: files in the order of their names' digests."""
    total, kept = sum(package.size for package in chosen), []
    for package in chosen:
        left, files = package.size * most // max(total, 1), {}
        for name in sorted(package.files, key=sha256):
            if (size := package.files[name].stat().st_size) <= left:
                files[name], left = package.files[name], left - size
        kept.append(replace(package, files=files))
    return kept


def read(chosen: Sequence[Package]) -> tuple[list[File], dict[str, str]]:
    """(files in their order, "package/file" -> why it is left out). Vendored files come last, so that of two copies the
    original is kept.
    """
    places = [(package.name, name, path) for package in chosen for name, path in package.files.items()]
    places.sort(key=lambda place: (bool(VENDORED.search(place[1])), place[0], place[1]))
    kept, out, digests, seen = [], {}, {}, set()
    for package, name, path in tqdm(places, "reading", unit=" files", leave=False, disable=None):
        data = path.read_bytes()
        place, digest = f"{package}/{name}", hashlib.sha256(data).hexdigest()
        if why := unfit(data) or (f"copy of {digests[digest]}" if digest in digests else ""):
            out[place] = why
            continue
        text = data.decode("utf-8")
        marks = shingles(np.fromiter(map(_number, WORDS.findall(text)), np.uint64))
        if (share := _share(marks, seen)) > COPIED:
            out[place] = f"{share:.0%} of it stands in files before it"
            continue
        digests[digest] = place
        seen.update(marks.tolist())
        kept.append(File(package, name, digest, text, len(data), marks))
    return sorted(kept, key=lambda file: (file.package, file.name)), out


def unfit(data: bytes) -> str:
    """Why a file is no text to learn from, or "". Generated: it says so in its head, has few letters, or long lines."""
    head, (letters, length) = data[:HEAD], GENERATED
    if b"nvidia corporation" in head.lower():
        return "NVIDIA's"
    if SAYS_GENERATED.search(head):
        return "generated: it says so"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    solid = len(data) - sum(map(data.count, (b" ", b"\n", b"\t", b"\r")))
    if not solid or "\0" in text:
        return "empty or binary"
    if len(data.translate(None, _NO_LETTERS)) < letters * solid:
        return f"generated: less than {letters:.0%} letters"
    lines = len(data) / (data.count(b"\n") + 1)
    return f"generated: lines of {lines:.0f} bytes on average" if lines > length else ""


_NO_LETTERS = bytes(code for code in range(128) if not chr(code).isalpha())


@functools.lru_cache(1 << 20)
def _number(word: str) -> int:
    """The same in every process, unlike hash()."""
    return zlib.crc32(word.encode())


def _share(marks: np.ndarray, seen: set[int]) -> float:
    return sum(mark in seen for mark in marks.tolist()) / len(marks) if len(marks) else 0.0


def divided(files: Sequence[File]) -> tuple[dict[str, list[File]], dict[str, str]]:
    """(files of "train" and of "val", what was left out). Whole packages are held out, taken in the order of their
    names' digests while they fit, large ones last. DataError where no packages make up a share in HELD_OUT.
    """
    sizes = Counter()
    for file in files:
        sizes[file.package] += file.size
    (least, most), total, taken, held = HELD_OUT, sum(sizes.values()), set(), 0
    for name in sorted(sizes, key=lambda name: (sizes[name] > LARGE * total, sha256(name))):
        if held < least * total and held + sizes[name] <= most * total:
            taken.add(name)
            held += sizes[name]
    if held < least * total or not total:
        raise DataError(
            f"packages: none of {', '.join(sizes) or 'no files'} make up {least:.0%} to {most:.0%} of the bytes, to be "
            "held out whole for validation: name more packages"
        )
    train = [file for file in files if file.package not in taken]
    val = [file for file in files if file.package in taken]
    seen = {mark for file in train for mark in file.marks.tolist()}
    shares = {f"{file.package}/{file.name}": _share(file.marks, seen) for file in val}
    leaked = {name: f"{share:.0%} stands in the training" for name, share in shares.items() if share > LEAKED}
    return {"train": train, "val": [file for file in val if f"{file.package}/{file.name}" not in leaked]}, leaked
