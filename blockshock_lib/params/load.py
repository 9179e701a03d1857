"""Files and overrides -> validated parameters. Mappings merge; anything else, lists too, replaces what was there.

A file is strict YAML 1.2: every surprise of YAML is refused with the dotted key where it stands.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML, events
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode

from blockshock_lib.errors import ParamsError, allowed
from blockshock_lib.files import ROOT
from blockshock_lib.params.models import RunParams, explain

PARAMS = ROOT / "params"
SET = "--set"
RESERVED = ("study", "phase", "layers")  # what the command itself says
MAX_BYTES = 64 * 1024
ANCHORS = "YAML anchors and aliases are not allowed; write the value out"
MAX_DEPTH = 16
TEXT = "tag:yaml.org,2002:str"


def refusal(source: str, key: str, sentence: str) -> ParamsError:
    return ParamsError(": ".join(filter(None, (source, key, sentence))))


class Stack:
    """The layers of one folder merged so far, as `values`, and which file set each key."""

    def __init__(self, root: Path):
        self.root, self.values = root, {}
        self._sources: dict[tuple, str] = {}

    def read(self, relative: str) -> None:
        label = self.label(relative)
        try:
            with open(self.root / relative, "rb") as file:
                layer = copy.deepcopy(_parsed(file.read(MAX_BYTES + 1), label))
        except OSError as error:
            raise refusal(label, "", f"cannot be read: {error.strerror}") from None
        if not isinstance(layer, dict | None):
            raise refusal(label, "", f"holds {type(layer).__name__}; allowed: a mapping, key: value")
        self.add(layer or {}, label)

    def add(self, layer: Mapping[str, object], source: str) -> None:
        """Merges one layer; `source` is where complaints about its values look."""
        for key in RESERVED:
            if key in layer:
                raise refusal(source, key, f"{layer[key]!r}: the command says it; leave this key out")
        self._merge(self.values, layer, (), source)

    def where(self, loc: tuple) -> tuple[str, str]:
        """What set the value at `loc`, or the nearest mapping around it, and its key but for a flag's own: a preset's
        name stands for all below it.
        """
        around = (loc[:n] for n in range(len(loc), 0, -1))
        source = next((self._sources[part] for part in around if part in self._sources), self.label("base.yaml"))
        kind, key = loc[0], ".".join(map(str, loc))
        if isinstance(name := self.values.get(kind), str) and len(loc) > 1:
            key = f"{kind} {name!r}"
        return source, key.removeprefix(kind).lstrip() if source.endswith(kind) else key

    def names(self, folder: str) -> list[str]:
        return sorted(path.stem for path in (self.root / folder).glob("*.yaml"))

    def label(self, relative: str) -> str:
        return f"{self.root.resolve().name}/{relative}"

    def _merge(self, values: dict, layer: Mapping[str, object], path: tuple, source: str) -> None:
        for key, value in layer.items():
            here, there = (*path, key), values.get(key)
            if isinstance(there, dict) and not isinstance(value, Mapping):
                # A later layer would merge onto it and hide whose mistake it is.
                phrase = f"{value!r}; allowed: a mapping, with keys such as {', '.join(there)}"
                raise refusal(source, ".".join(here), phrase)
            if not isinstance(there, dict):
                values[key], self._sources[here] = {} if isinstance(value, Mapping) else value, source
            if isinstance(value, Mapping):
                self._merge(values[key], value, here, source)


def load(
    study: Any,
    phase: str,
    overrides: Mapping[str, object] | None = None,
    *,
    choose: Mapping[str, str] | None = None,
    root: Path = PARAMS,
    detect: Callable[[], str] = lambda: "auto",
    said: str = SET,
) -> RunParams:
    """Merges the stack, base < study's defaults < study < phase < hardware < sweep < chosen by name < overrides, and
    checks it. ParamsError: one line a problem, each with its file, dotted key, the allowed values, the nearest match.

    The sweep is `<phase>-<hardware's name>` where that file exists, else `<phase>-<device>`. `overrides`: dotted key ->
    value, which complaints call `said`; `layers.<kind>` in it wins over `choose`: "hardware" or "sweep" -> file name or
    "auto" (`detect` names this machine's), or one of the study's presets -> its name. What is named in either, as mask
    or dtype, is run alone: the sweep's list of it is dropped.
    """
    phase = phase.rpartition("/")[2]
    stack, given = Stack(Path(root)), _nest(overrides or {}, said)
    folder, chosen = study.name, {}
    flag, layers = "--" if said == SET else "", given.pop("layers", {})
    picked = _choices(choose or {}, flag, study) | _choices(layers, flag or f"{said}: layers.", study)
    if phase not in study.phases:
        raise refusal("", "phase", f"{phase!r} is no phase of {folder}; {allowed(phase, study.phases)}")
    stack.read("base.yaml")
    stack.add(study.defaults, f"study {folder}")
    for relative in (f"{folder}/base.yaml", f"{folder}/phases/{phase}.yaml"):
        if (stack.root / relative).exists():
            stack.read(relative)

    def pick(kind: str, files: str, auto: Callable[[], str]) -> None:
        name, source = picked.pop(kind, ("auto", flag + kind))
        chosen[kind] = name = auto() if name == "auto" else name
        if name not in (known := stack.names(files)):
            raise refusal(source, "", f"{name!r} is no file of {stack.label(files)}; {allowed(name, ['auto', *known])}")
        stack.read(f"{files}/{name}.yaml")

    pick("hardware", "hardware", detect)
    hardware, sweeps = stack.values.get("hardware"), stack.names(f"{folder}/sweeps")
    hardware = hardware if isinstance(hardware, dict) else {}
    hardware.setdefault("name", chosen["hardware"])
    own, shared = f"{phase}-{chosen['hardware']}", f"{phase}-{hardware.get('device')}"
    if "sweep" in picked or sweeps:
        pick("sweep", f"{folder}/sweeps", lambda: own if own in sweeps else shared)
    for kind, (name, source) in picked.items():
        stack.add({kind: name}, source)
    for kind, known in study.presets.items():  # one key of what a name stands for: the others stay as named
        if isinstance(given.get(kind), dict) and isinstance(whole := known.get(str(stack.values.get(kind))), dict):
            stack.values[kind] = dict(whole)
    if isinstance(sweep := stack.values.get("sweep"), dict):
        for key in {*picked, *given}:
            sweep.pop(f"{key}s", None)  # what was asked for by name is not swept over
    stack.add(given, said)
    try:
        return study.params.model_validate(stack.values | {"study": folder, "phase": phase, "layers": chosen})
    except ValidationError as error:
        raise ParamsError(explain(error, study.params, stack.where)) from None


def parse_override(text: str) -> tuple[str, object]:
    """ "sweep.n=[4096,8192]" -> ("sweep.n", [4096, 8192]); no value is the empty text. ParamsError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise refusal(SET, text.strip(), "allowed: KEY=VALUE, as in sweep.n=[4096,8192]")
    return key.strip(), parse(value, SET, key.strip()) if value.strip() else ""


def _choices(layers: object, source: str, study: Any) -> dict[str, tuple[object, str]]:
    # kind -> (name, what chose it) of a mapping that chooses files and presets.
    kinds = ("hardware", "sweep", *study.presets)
    if not isinstance(layers, Mapping):
        raise refusal("", "layers", f"{layers!r}; allowed: a mapping with the keys {', '.join(kinds)}")
    for kind in layers:
        if kind not in kinds:
            raise refusal(f"{source}{kind}", "", f"the study {study.name} has no such choice; {allowed(kind, kinds)}")
    return {kind: (name, f"{source}{kind}") for kind, name in layers.items()}


def _nest(dotted: Mapping[str, object], said: str) -> dict:
    # {"a.b": 1} -> {"a": {"b": 1}}
    tree: dict = {}
    for key, value in dotted.items():
        *parts, last = key.split(".")
        if not all((*parts, last)):
            raise refusal(said, key, "not a dotted key; write it as in sweep.n=[4096,8192]")
        at = tree
        for part in parts:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise refusal(said, key, f"{part!r} is set as a whole too; keep one of them")
        at[last] = copy.deepcopy(value)  # a later key may write into it
    return tree


def parse(data: str | bytes, source: str, key: str = "") -> object:
    """One YAML 1.2 document as plain values. ParamsError: more than 64 KiB, not UTF-8, not YAML, a duplicate key or one
    that is not text, nesting deeper than 16, tags, anchors, aliases, merge keys, YAML 1.1.
    """
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(data) > MAX_BYTES:
        raise refusal(source, key, f"larger than {MAX_BYTES // 1024} KiB; allowed: a small file of parameters")
    try:
        text = data.decode("utf-8")
        _refuse_surprises(text, source, key)
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise refusal(source, key, f"not valid YAML: {problem or str(error).splitlines()[0]}{where}") from None
    except UnicodeDecodeError:
        raise refusal(source, key, "not UTF-8 text") from None
    except ValueError as error:  # the 32nd of a month, an integer of 5000 digits
        raise refusal(source, key, f"not valid YAML: {str(error).split(';')[0]}") from None


_parsed = functools.lru_cache(256)(parse)  # of files, which are read again and again and seldom change


def _refuse_surprises(text: str, source: str, outer: str) -> None:
    # Walks the document's events, which build nothing.
    yaml = YAML(typ="safe", pure=True)
    found = yaml.parse(text)

    def walk(event: events.NodeEvent, key: str, depth: int) -> None:
        if isinstance(event, events.AliasEvent) or event.anchor is not None:
            raise refusal(source, key, ANCHORS)
        if event.tag is not None:
            raise refusal(source, key, f"the YAML tag {event.tag} is not allowed; write a plain value")
        if isinstance(event, events.ScalarEvent):
            return
        if depth > MAX_DEPTH:
            raise refusal(source, key, f"nested deeper than {MAX_DEPTH} levels")
        is_mapping, seen = isinstance(event, events.MappingStartEvent), set()
        while not isinstance(event := next(found), events.CollectionEndEvent):
            inner = key
            if is_mapping:
                inner = ".".join(filter(None, [key, getattr(event, "value", "")]))
                if event.anchor is not None:
                    raise refusal(source, inner, ANCHORS)
                plain = isinstance(event, events.ScalarEvent) and event.tag is None and event.value != "<<"
                if not plain or yaml.resolver.resolve(ScalarNode, event.value, event.implicit) != TEXT:
                    raise refusal(source, inner, "a key must be text")
                if event.value in seen:
                    raise refusal(source, inner, f"duplicate key (line {event.start_mark.line + 1}); keep one of them")
                seen.add(event.value)
                event = next(found)
            walk(event, inner, depth + 1)

    for event in found:
        if isinstance(event, events.DocumentStartEvent) and tuple(event.version or (1, 2)) != (1, 2):
            raise refusal(source, outer, "a directive for another YAML version; allowed: YAML 1.2")
        if isinstance(event, events.NodeEvent):
            walk(event, outer, 1)
