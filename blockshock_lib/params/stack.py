"""The YAML stack: files -> one mapping that remembers which file set each key. Nothing here knows what a value means.

Every file is a *layer*. Layers merge in the order base, phase, workload, mask, methods, hardware, sweep, --set.
Mappings merge; anything else, lists too, replaces what was there. A layer's `layers` chooses the files of later kinds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

from blockshock_lib.params.strict_yaml import MAX_BYTES, allowed, parse, refusal

SET = "--set"
COMMAND = "command line"
FOLDERS = {
    "phase": "phases",
    "workload": "workloads",
    "mask": "masks",
    "methods": "methods",
    "hardware": "hardware",
    "sweep": "sweeps",
}
KINDS = tuple(FOLDERS)[1:]  # what a layer may choose, in merge order; the phase is always asked for by name
NAMED = ("workload", "mask", "hardware")  # a file of these kinds gives its own name to what it describes
LABELS = ("workload", "mask")  # records and tables tell these apart by name alone
SWEPT = {"mask": "masks", "workload": "workloads", "dtype": "dtypes"}


def nest(dotted: Mapping[str, object]) -> dict:
    """{"a.b": 1} -> {"a": {"b": 1}}. ParamsError for an empty part, or a key that is set both whole and in part."""
    tree: dict = {}
    for key, value in dotted.items():
        parts = key.split(".") if isinstance(key, str) else [""]
        if not all(parts):
            raise refusal(SET, str(key), "not a dotted key; write it as in sweep.n=[4096,8192]")
        at = tree
        for part in parts[:-1]:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise refusal(SET, key, f"{part!r} is set as a whole too; keep one of them")
        at[parts[-1]] = _plain(value)
    return tree


def _plain(value: object) -> object:
    """A copy that shares nothing with the caller's value."""
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else copy.deepcopy(value)


def _choices(layers: object, source: str, kinds: tuple[str, ...]) -> dict[str, tuple[object, str]]:
    """kind -> (name, source) of a `layers` mapping that may choose these kinds."""
    if not isinstance(layers, Mapping):
        raise refusal(source, "layers", f"{layers!r}; allowed: a mapping with the keys {', '.join(KINDS)}")
    for kind in layers:
        if kind not in KINDS:
            raise refusal(source, f"layers.{kind}", f"unknown key; {allowed(kind, KINDS)}")
        if kind not in kinds:
            raise refusal(source, f"layers.{kind}", f"was chosen before this file is read; {allowed('', kinds)}")
    return {kind: (name, source) for kind, name in layers.items()}


class Stack:
    """The layers of one folder merged so far.

    Attributes:
        values: the merged mapping.
        chosen: kind -> the name of the file that was merged, "phase" included.
    """

    def __init__(self, root: Path):
        self.root, self.values, self.chosen = root, {}, {}
        self._sources: dict[tuple, str] = {}
        self._wanted: dict[str, tuple[object, str]] = {}  # kind -> (name, the file that chose it)
        self._aliases: dict[tuple, tuple] = {}  # an entry of a list that was read from a file -> its key in that file

    def merge(
        self, phase: str, overrides: Mapping[str, object], choose: Mapping[str, str], detect: Callable[[], str]
    ) -> Stack:
        """Merges base, the phase, the file chosen for each kind, and the overrides. ParamsError names file and key."""
        given = nest(overrides)
        fixed = _choices(choose, COMMAND, KINDS) | _choices(given.pop("layers", {}), SET, KINDS)
        self._add(self._read("base.yaml"), "base", self._label("base.yaml"))
        for kind in FOLDERS:
            name, source = (fixed | {"phase": (phase, COMMAND)}).get(kind) or self._wanted.get(kind, ("", ""))
            self._descend(kind, self._resolve(kind, name, detect), source)
        for one, many in SWEPT.items():
            if (one in given or one in fixed) and isinstance(self.values.get("sweep"), dict):
                self.values["sweep"].pop(many, None)  # what was asked for by name is not swept over
        self._add(given, SET, SET)
        if self.values.get("phase") != phase:
            source, key = self.where(("phase",))
            raise refusal(source, key, f"{self.values['phase']!r}: the run is of {phase}; leave this key out")
        self._fill()
        return self

    def where(self, loc: tuple) -> tuple[str, str]:
        """The file that set the value at `loc` (or the nearest mapping around it), and the dotted key to look for."""
        for end in range(len(loc), 0, -1):
            if (head := loc[:end]) in self._sources:
                return self._sources[head], ".".join(map(str, (*self._aliases.get(head, head), *loc[end:])))
        below = [s for path, s in self._sources.items() if path[: len(loc)] == loc]
        return (below or [self._label("base.yaml")])[-1], ".".join(map(str, loc))

    def names(self, kind: str) -> list[str]:
        return sorted(path.stem for path in (self.root / FOLDERS[kind]).glob("*.yaml"))

    def _label(self, relative: str) -> str:
        return f"{self.root.resolve().name}/{relative}"

    def _file(self, kind: str, name: str) -> str:
        return f"{FOLDERS[kind]}/{name}.yaml"

    def _read(self, relative: str) -> dict:
        label = self._label(relative)
        try:
            with open(self.root / relative, "rb") as file:
                layer = parse(file.read(MAX_BYTES + 1), label)
        except OSError as error:
            raise refusal(label, "", f"cannot be read: {error.strerror}") from None
        if layer is not None and not isinstance(layer, dict):
            raise refusal(label, "", f"holds {type(layer).__name__}; allowed: a mapping, key: value")
        return layer or {}

    def _resolve(self, kind: str, name: object, detect: Callable[[], str]) -> object:
        """What `auto` stands for: this machine's hardware file, or the sweep made for this phase and machine.

        The sweep is `<phase>-<hardware's name>` where that file exists, else `<phase>-<device>`: hardware without a
        sweep of its own shares the one for all CPUs or all GPUs.
        """
        if name != "auto" or kind not in ("hardware", "sweep"):
            return name
        if kind == "hardware":
            return detect()
        hardware = self.values.get("hardware")
        device = hardware.get("device") if isinstance(hardware, dict) else None
        own, shared = f"{self.chosen['phase']}-{self.chosen['hardware']}", f"{self.chosen['phase']}-{device}"
        return own if own in self.names("sweep") else shared

    def _known(self, kind: str, name: object, source: str, key: str) -> None:
        names = self.names(kind)
        if name not in names:
            also = ["auto"] if kind in ("hardware", "sweep") else []
            raise refusal(
                source, key, f"{name!r} is no file of {self._label(FOLDERS[kind])}; {allowed(name, also + names)}"
            )

    def _descend(self, kind: str, name: str, source: str) -> None:
        self._known(kind, name, source or self._label("base.yaml"), "phase" if kind == "phase" else f"layers.{kind}")
        self.chosen[kind] = name
        layer = self._read(self._file(kind, name))
        if kind == "phase":
            layer = {"phase": name} | layer
        self._add(self._signed(layer, kind, name), kind, self._label(self._file(kind, name)))

    @staticmethod
    def _signed(layer: dict, kind: str, name: str) -> dict:
        if kind in NAMED and isinstance(layer.get(kind), dict):
            layer[kind] = {"name": name} | layer[kind]
        return layer

    def _add(self, layer: dict, kind: str, source: str) -> None:
        """Merges one layer, and notes which files it chooses."""
        order = ("base", *FOLDERS, SET)
        later = tuple(k for k in KINDS if order.index(k) > order.index(kind))
        self._wanted |= _choices(layer.pop("layers", {}), source, later)
        for label in LABELS:
            changed = layer.get(label)
            if kind != label and isinstance(changed, dict) and "name" not in changed:
                key = ".".join([label, *list(changed)[:1]])
                raise refusal(source, key, f"a changed {label} needs a name of its own; set {label}.name too")
        for key, value in layer.items():
            self._put((key,), value, source)

    def _put(self, path: tuple, value: object, source: str) -> None:
        at = self.values
        for part in path[:-1]:
            at = at[part]
        if isinstance(at.get(path[-1]), dict):
            if not isinstance(value, dict):  # a later layer would merge onto it and hide whose mistake it is
                known = ", ".join(at[path[-1]])
                raise refusal(source, ".".join(path), f"{value!r}; allowed: a mapping, with keys such as {known}")
            for key, inner in value.items():
                self._put((*path, key), inner, source)
            return
        at[path[-1]] = value
        self._sources[path] = source

    def _fill(self) -> None:
        """Replaces the names in sweep.masks and sweep.workloads by what the files of that name describe."""
        sweep = self.values.get("sweep")
        for kind in LABELS:
            items = sweep.get(SWEPT[kind]) if isinstance(sweep, dict) else None
            if not isinstance(items, list | tuple):
                continue
            sweep[SWEPT[kind]] = filled = list(items)
            for index, name in enumerate(items):
                if isinstance(name, Mapping):
                    continue
                path = ("sweep", SWEPT[kind], index)
                self._known(kind, name, *self.where(path))
                layer = self._signed(self._read(self._file(kind, name)), kind, name)
                if list(layer) != [kind]:
                    extra = ", ".join(sorted(set(layer) - {kind})) or "nothing"
                    source, key = self.where(path)
                    raise refusal(source, key, f"{name} sets {extra}, which a sweep cannot take; allowed: {kind} alone")
                filled[index] = layer[kind]
                self._sources[path], self._aliases[path] = self._label(self._file(kind, name)), (kind,)
