"""What of a stopped run stands, and what has to be measured again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockshock_lib import manifest, records
from blockshock_lib.errors import RecordError
from blockshock_lib.manifest import shown

if TYPE_CHECKING:
    from blockshock_lib.plan import Case


def latest(out: Path, phase: str) -> Path:
    """The folder of the newest run of this phase under `out` that is not completed. RecordError where there is none."""
    found = [
        (noted["started"], folder)
        for folder, noted in manifest.every(out)
        if noted["phase"] == phase and noted["status"] != "completed" and not noted.get("redrawn_from")
    ]
    if not found:
        raise RecordError(f"{shown(out)} holds no run of {phase} that was stopped: nothing to resume")
    return max(found)[1]


def unfinished(
    folder: Path, cases: Sequence[Case], groups: int, context: Mapping[str, Any]
) -> dict[tuple[str, int], str]:
    """The (case id, group) pairs that have to be measured, each with why.

    A record stands only if it is whole and was made by the same code on the same machine, as `context` has them (see
    `records.write`). A record of a stale kernel is of no one code, so it does not stand.
    """
    found = {}
    for group in range(groups):
        for case in cases:
            why = _why(folder / "records" / f"{case.id}-{group}.json", case, group, context)
            if why:
                found[case.id, group] = why
    return found


def _why(path: Path, case: Case, group: int, context: Mapping[str, Any]) -> str:
    if not path.exists():
        return "missing"
    try:
        record = records.read(path)
    except RecordError:
        return "damaged"
    if (record["id"], record["group"]) != (case.id, group):
        return "of another case"
    made = record["context"]
    if made["machine"] != context["machine"]:
        return "of another machine"
    code = made["code"]
    if not code["sources"] or code["sources"] != context["code"]["sources"]:
        return "of other code"
    if code.get("imported", code["sources"]) != code["sources"]:
        return "of a stale kernel"
    return ""
