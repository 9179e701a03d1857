"""A reference: several whole runs of the same parameters, by the same code, on machines of one kind, linked in their
manifests (`reference`, the same in all; `again`, the folder of the first). Each chose its kernels anew.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockshock_lib import files
from blockshock_lib.errors import RecordError
from blockshock_lib.files import ROOT
from blockshock_lib.runs import manifest


def name_of(about: Mapping[str, Any]) -> str:
    """12 hex digits of the first run; a run that has no other is the first of its own."""
    return about.get("reference") or files.sha256(files.canonical([about["run"], about["started"]]))[:12]


def others(folder: Path, about: Mapping[str, Any]) -> list[Path]:
    """The folders of the other completed runs of the reference of the run in `folder`, by path, those that came as a
    zip too: under outputs/, or near it where it lies elsewhere, or where its first run lies. A copy is no other run.
    """
    near = folder.absolute().parents[1]
    inside = near.is_relative_to(manifest.OUTPUTS)
    found = manifest.folders(manifest.OUTPUTS) if inside else manifest.folders(near, "*/*")
    first = ROOT / about.get("again", "")
    found += [first] if (first / manifest.FILE).is_file() else []
    known, runs = {about["run"]}, []
    for place in found:
        with contextlib.suppress(RecordError, AttributeError, KeyError, TypeError):  # a stranger may have written it
            other = manifest.read(place)
            whole = other["status"] == "completed" and not other.get("redrawn_from") and other["run"] not in known
            if whole and other["params"] == about["params"] and linked(about, other):
                known.add(other["run"])
                runs.append(place)
    return runs


def linked(about: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both are of one reference, by the same code, on machines of one kind."""
    named = (about.get("reference") or other.get("reference")) and name_of(other) == name_of(about)
    return bool(named) and not differs(about, other.get("code") or {"sources": ""}, other.get("machine"))


def differs(about: Mapping[str, Any], code: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """What forbids that this code on this machine measures the run `about` once more; "" where nothing does."""
    try:
        then, kinds = about["machine"], []
        for one in (then, card):
            gpus = Counter(f"{gpu['name']} ({gpu.get('power_limit_w')} W)" for gpu in one["gpus"])
            kinds.append(" + ".join(f"{count}x {name}" for name, count in sorted(gpus.items())) or one["cpu"]["model"])
        was, now = then["libraries"], card["libraries"]
        changed = [name for name in sorted({*was, *now}) if was.get(name, "") != now.get(name, "")]
        faults = {
            "it was measured by other code": (about.get("code") or {}).get("sources") != code["sources"],
            f"it was measured on {kinds[0]}, this is {kinds[1]}": kinds[0] != kinds[1],
            f"it was measured with another {', '.join(changed)}": bool(changed),
        }
    except (AttributeError, KeyError, TypeError):
        return "its manifest does not say by what and where it was measured"
    return next((fault for fault, here in faults.items() if here), "")
