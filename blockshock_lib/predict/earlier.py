"""What earlier runs know: the ceilings of a machine. Read from saved records; nothing is measured here."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockshock_lib import manifest, records
from blockshock_lib.engine.phases import PHASES
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.errors import RecordError
from blockshock_lib.manifest import ROOT, shown
from blockshock_lib.report.labels import CEILING

REFERENCE = ROOT / "outputs" / "reference"


@dataclass(frozen=True)
class Earlier:
    """A completed run that measured: its folder and its manifest."""

    folder: Path
    manifest: dict

    @property
    def machine(self) -> str:
        return self.manifest["machine"]["title"]

    @property
    def hardware(self) -> dict:
        return self.manifest["params"]["hardware"]

    @property
    def shipped(self) -> bool:
        return self.folder.is_relative_to(REFERENCE)


@dataclass(frozen=True)
class Known:
    """Ceilings and where they come from.

    Attributes:
        ceilings: copy bandwidth (GB/s), dense GEMM rate (TFLOP/s), all-reduce bus bandwidth (GB/s).
        machine: the title of the machine that measured them.
        source: the folder of its run, relative to the project.
        note: what differs from what was asked (machine, dtype, ranks); "" where nothing does.
    """

    ceilings: Ceilings
    machine: str
    source: str
    note: str


def runs(device: str, *, machine: str = "", out: Path | None = None) -> list[Earlier]:
    """Completed runs on that device kind, those of `machine` first and the newest first; shipped ones come last.

    A run of another machine is left out unless it is a shipped reference.
    """
    # Not at the top: the run module may itself ask for a prediction.
    from blockshock_lib.run import OUTPUTS

    found = {one.folder: one for place in (out or OUTPUTS, REFERENCE) for one in _under(place)}
    fit = [one for one in found.values() if one.hardware["device"] == device]
    fit = [one for one in fit if one.machine == machine or one.shipped]
    newest = sorted(fit, key=lambda one: one.manifest["started"], reverse=True)
    return sorted(newest, key=lambda one: (one.machine != machine, one.shipped))


def _under(place: Path) -> Iterator[Earlier]:
    for path in sorted(place.glob(f"**/{manifest.FILE}")):
        try:
            found = manifest.read(path.parent)
            # What a colleague sent is looked at; predictions rest on what was measured here, or shipped.
            ours = not found.get("redrawn_from") and not found.get("received")
            whole = found["status"] == "completed" and ours and found["phase"] in PHASES
            if whole and found["params"]["hardware"] and found["machine"]["title"]:
                yield Earlier(path.parent.resolve(), found)
        except (RecordError, KeyError, TypeError):
            continue  # a prediction can do without a damaged run


def known_ceilings(
    device: str, dtype: str, *, machine: str = "", ranks: int = 2, out: Path | None = None
) -> Known | None:
    """The newest ceilings of that machine, else those of the shipped run of that device kind; None without either.

    Among the runs of one machine those in the asked dtype come first.

    Args:
        device: "cpu" or "cuda".
        dtype: "bf16", "fp16" or "fp32".
        machine: title on the machine card; "" takes the shipped run.
        ranks: how many ranks the case has, for the note.
    """
    earlier = runs(device, machine=machine, out=out)
    for same_machine in (True, False):
        for wanted in (dtype, ""):
            for run in earlier:
                if (run.machine == machine) is same_machine and (found := _measured(run, wanted)):
                    ceilings, measured_in = found
                    return Known(
                        ceilings, run.machine, shown(run.folder), _note(run, machine, dtype, measured_in, ranks)
                    )
    return None


def _measured(run: Earlier, dtype: str) -> tuple[Ceilings, str] | None:
    """Median over the run's fresh groups, and the dtype; a group measures them once and repeats them in each record."""
    asked = run.manifest["params"]
    if not PHASES[run.manifest["phase"]].time or (
        dtype and dtype not in (asked["sweep"]["dtypes"] or [asked["dtype"]])
    ):
        return None
    found: list[dict[str, float]] = []
    for path in sorted((run.folder / "records").glob("*.json")):
        try:
            record = records.read(path)
        except RecordError:
            continue
        if dtype and record["case"]["dtype"] != dtype:
            continue
        rows = {r["metric"]: r["value"] for r in record["rows"] if r["method"] == CEILING and r["status"] == "ok"}
        if rows.get("copy_bandwidth") and rows.get("gemm_rate"):
            dtype = record["case"]["dtype"]
            found.append(rows)
        if len(found) == run.manifest["params"]["timing"]["groups"]:
            break
    if not found:
        return None
    middle = {name: statistics.median(rows.get(name, 0.0) for rows in found) for name in Ceilings._fields}
    return Ceilings(**middle), dtype


def _note(run: Earlier, machine: str, dtype: str, measured_in: str, ranks: int) -> str:
    said = []
    if run.machine != machine:
        said.append(f"of another machine, {run.machine}")
    if measured_in != dtype:
        said.append(f"measured in {measured_in}, not {dtype}")
    if run.hardware["world_size"] != ranks:
        said.append(f"the link's between {run.hardware['world_size']} ranks, not {ranks}")
    return "; ".join(said)


def known_machines(out: Path | None = None) -> list[tuple[str, dict]]:
    """(device, machine card) of every machine that has timed something, those of the shipped runs too; GPUs first."""
    from blockshock_lib.run import OUTPUTS

    found = {
        (one.hardware["device"], one.machine): one.manifest["machine"]
        for place in (REFERENCE, out or OUTPUTS)
        for one in _under(place)
        if PHASES[one.manifest["phase"]].time
    }
    return [(device, found[device, title]) for device, title in sorted(found, key=lambda k: (k[0] != "cuda", k[1]))]
