"""Strict YAML 1.2: text -> plain values. Every surprise of YAML is refused with the dotted key where it stands."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)
from ruamel.yaml.nodes import ScalarNode

from blockshock_lib.errors import ParamsError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 16
TEXT = "tag:yaml.org,2002:str"


def refusal(source: str, key: str, sentence: str) -> ParamsError:
    return ParamsError(f"{source}: {key}: {sentence}" if key else f"{source}: {sentence}")


def allowed(word: object, known: Iterable[object]) -> str:
    """The allowed values as a phrase, and the nearest of them where one is near."""
    names = [str(k) for k in known]
    near = difflib.get_close_matches(str(word), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near and near[0] != word else ""
    return f"allowed: {', '.join(names) or 'none'}{hint}"


def parse(data: str | bytes, source: str, key: str = "") -> object:
    """One YAML 1.2 document as plain Python values.

    Raises:
        ParamsError: more than 64 KiB, not UTF-8, not YAML, a duplicate key, a key that is not text, nesting deeper than
            16, or one of the features that a parameter has no use for: tags, anchors, aliases, merge keys, YAML 1.1.
    """
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(data) > MAX_BYTES:
        raise refusal(source, key, f"larger than {MAX_BYTES // 1024} KiB; allowed: a small file of parameters")
    yaml = YAML(typ="safe", pure=True)
    try:
        text = data.decode("utf-8")
        _scan(text, source, key)
        return yaml.load(text)
    except YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise refusal(source, key, f"not valid YAML: {problem or str(error).splitlines()[0]}{where}") from None
    except UnicodeDecodeError:
        raise refusal(source, key, "not UTF-8 text") from None
    except ValueError as error:  # the 32nd of a month, an integer of 5000 digits
        raise refusal(source, key, f"not valid YAML: {str(error).split(';')[0]}") from None


def _scan(text: str, source: str, outer: str) -> None:
    """Walks the document's events, which build nothing, and refuses what must not be built."""
    frames: list[dict] = []  # open collections; `keys` is None in a sequence, `key` the key whose value comes next
    yaml = YAML(typ="safe", pure=True)
    for event in yaml.parse(text):
        top = frames[-1] if frames else None
        dotted = ".".join(filter(None, [outer, *(str(f["key"]) for f in frames if f["key"] is not None)]))
        if isinstance(event, DocumentStartEvent) and tuple(event.version or (1, 2)) != (1, 2):
            raise refusal(source, dotted, "a directive for another YAML version; allowed: YAML 1.2")
        if isinstance(event, CollectionEndEvent):
            frames.pop()
            _value_done(frames)
        if not isinstance(event, NodeEvent):
            continue
        if isinstance(event, AliasEvent) or event.anchor is not None:
            raise refusal(source, dotted, "YAML anchors and aliases are not allowed; write the value out")
        if event.tag is not None:
            raise refusal(source, dotted, f"the YAML tag {event.tag} is not allowed; write a plain value")
        if top and top["keys"] is not None and top["key"] is None:
            word = event.value if isinstance(event, ScalarEvent) else None
            here = ".".join(filter(None, [dotted, word]))
            if word in (None, "<<") or yaml.resolver.resolve(ScalarNode, word, event.implicit) != TEXT:
                raise refusal(source, here, "a key must be text")
            if word in top["keys"]:
                raise refusal(source, here, f"duplicate key (line {event.start_mark.line + 1}); keep one of them")
            top["keys"].add(word)
            top["key"] = word
        elif isinstance(event, CollectionStartEvent):
            frames.append({"keys": set() if isinstance(event, MappingStartEvent) else None, "key": None})
            if len(frames) > MAX_DEPTH:
                raise refusal(source, dotted, f"nested deeper than {MAX_DEPTH} levels")
        else:
            _value_done(frames)


def _value_done(frames: list[dict]) -> None:
    if frames and frames[-1]["keys"] is not None:
        frames[-1]["key"] = None
