"""A run: its parameters, its cases, the folder that its records go to, and what is said of it in the end."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from blockshock_lib import launch, machine, manifest, params, plan, records
from blockshock_lib.errors import ParamsError, RecordError
from blockshock_lib.manifest import ROOT, shown
from blockshock_lib.report import tables, verdicts

# Where dated folders go. The environment variable lets a test re-run notebooks without a trace under outputs/.
OUTPUTS = ROOT / os.environ.get("BLOCKSHOCK_OUTPUTS", "outputs")
CACHE = ROOT / ".cache" / "blockshock"


class Run:
    """One run of one phase: its parameters, its cases, and the folder that its records go to.

    Attributes:
        folder: the run's folder; records/, logs/, traces/ and manifest.json are written there and nowhere else.
        params: the effective parameters.
        cases: what the parameters expand to.
        card: the machine card (see machine.probe).
        source: the folder the records are read from: `folder`, or an earlier run's when this one redraws it.
    """

    def __init__(self, folder: Path, effective: params.Params, card: dict, source: Path | None = None):
        self.folder, self.params, self.card = folder, effective, card
        self.source = source or folder
        self.cases = plan.expand(effective)

    @property
    def name(self) -> str:
        return shown(self.folder)

    @property
    def redrawn(self) -> bool:
        """Whether the records are an earlier run's: then nothing is measured."""
        return self.source != self.folder

    @property
    def context(self) -> dict:
        """What every record carries beside its case: code, machine and libraries."""
        return {
            "code": machine.code_version(),
            "machine": machine.fingerprint(self.card),
            "libraries": self.card["libraries"],
            "emulated": self.params.hardware.emulated,
        }

    def measure(self, progress: bool = True) -> Run:
        """Measures every case and writes its record; a no-op when the run redraws an earlier one.

        Raises: LaunchError when the processes cannot be started. A case that fails becomes rows that say so.
        """
        if self.redrawn:
            return self
        machine.admit(self.params, self.card)
        # The workers inherit it: tuned algorithms are kept with the project, whatever folder the kernel runs in.
        os.environ.setdefault("BLOCKSHOCK_CACHE", str(CACHE))
        with tqdm(total=len(self.cases) * self.params.timing.groups, disable=not progress, leave=False) as bar:

            def show(event: dict) -> None:
                bar.n = event["done"]
                bar.set_postfix_str(event["case"])

            launch.run(self.params, self.cases, self.folder, run_name=self.name, context=self.context, on_event=show)
        return self

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The records, one row a measurement."""
        return records.load(self.source)

    def plan_table(self) -> pd.DataFrame:
        """What is asked, a row a (workload, dtype, size): the masks and batches it is run with. Nothing was
        measured.
        """
        rows = [
            {
                "workload": c.workload.name,
                "dtype": c.dtype,
                "size (out x in)": f"{c.out_features}x{c.in_features}",
                "B": c.batch,
                "mask": c.mask.name,
            }
            for c in self.cases
        ]
        grouped = pd.DataFrame(rows).groupby(["workload", "dtype", "size (out x in)"], sort=False)
        return grouped.agg(lambda values: ", ".join(map(str, dict.fromkeys(values)))).reset_index()

    def card_table(self) -> pd.DataFrame:
        """The machine that measured, a line a fact."""
        libraries = {f"{name}": version for name, version in self.card["libraries"].items() if version}
        facts = {"machine": self.card["title"], "driver": self.card.get("driver") or "none", **libraries}
        facts |= {f"cannot run {what}": why for what, why in self.card.get("unsupported", {}).items()}
        return pd.DataFrame({"value": facts.values()}, index=pd.Index(facts, name="fact"))

    def lost(self) -> str:
        """What is missing from the records, as the end of a verdict's line; "" when all cases of all groups
        are there.
        """
        wanted = len(self.cases) * self.params.timing.groups
        found = self.frame[["case", "group"]].drop_duplicates().shape[0]
        return f" · {wanted - found} of {wanted} records damaged or missing" if found < wanted else ""

    def conclude(self) -> str:
        """Writes verdict, clocks and power seen, end and digests into the manifest; returns the verdict as one line."""
        line, files = verdicts.one_line(self.frame) + self.lost(), manifest.digests(self.folder)
        facts = {"status": "completed", "verdict": line, "seen": _seen(self.frame), "ended": now(), "files": files}
        manifest.note(self.folder, **facts)
        return line


def open_run(
    phase: str,
    *,
    hardware: str = "auto",
    settings: Mapping[str, object] | None = None,
    run_dir: str = "",
    redraw: str = "",
    out: Path = OUTPUTS,
    root: Path = params.PARAMS,
) -> Run:
    """A new run, validated before anything starts; or, with `redraw`, the records of an earlier one to look at again.

    Args:
        phase: "phase0" or "phase1".
        hardware: "auto", or the name of a file in params/hardware.
        settings: dotted key -> value, as `--set` on the command line takes them.
        run_dir: the folder made for the run; empty: a new dated one under `out`.
        redraw: the folder of an earlier run, relative to the project; nothing is measured then.

    Raises: ParamsError for a bad parameter; RecordError when `redraw` holds no run of this phase.
    """
    # A reason is worth its whole sentence, and a table all its rows: a page cannot be scrolled for what is not in it.
    pd.set_option("display.max_colwidth", None, "display.max_rows", None)
    folder = _place(run_dir) if run_dir else None
    if settings is not None and not isinstance(settings, Mapping):
        raise ParamsError(f"settings: {settings!r}; allowed: a mapping of dotted keys, as in {{'sweep.n': [4096]}}")
    if redraw and (settings or hardware != "auto"):
        raise ParamsError("redraw: an earlier run is drawn as it was measured; leave hardware and settings out")
    if folder is not None and list(folder.glob("records/*.json")):
        raise ParamsError(f"run_dir: {run_dir} holds the records of a run; name another folder, or redraw that one")
    if redraw:
        source = _place(redraw)
        earlier = manifest.read(source)
        if earlier["phase"] != phase:
            raise RecordError(f"{redraw} is a run of {earlier['phase']}, not of {phase}")
        try:
            effective, card = params.Params.model_validate(earlier["params"]), earlier["machine"]
        except ValueError as error:
            raise RecordError(f"{redraw} has parameters that this version does not know: {error}") from None
        run = Run(folder or new_folder(out, phase, f"{effective.hardware.name}-redrawn"), effective, card, source)
    else:
        chosen = {} if hardware == "auto" else {"hardware": hardware}
        effective, card = params.load(phase, settings, choose=chosen, root=root), machine.probe()
        machine.admit(effective, card)
        run = Run(folder or new_folder(out, phase, effective.hardware.name), effective, card)
    run.folder.mkdir(parents=True, exist_ok=True)
    manifest.note(
        run.folder,
        run=run.name,
        phase=phase,
        status="running",
        redrawn_from=shown(run.source) if run.redrawn else "",
        params=effective.model_dump(mode="json"),
        cases=len(run.cases),
        code=machine.code_version(),
        machine=card,
        started=now(),
    )
    return run


def new_folder(out: Path, phase: str, hardware: str) -> Path:
    """<out>/<date>/<time>-<phase>-<hardware>, made; numbered when two runs start in the same second."""
    now = dt.datetime.now()
    base = Path(out) / now.strftime("%Y-%m-%d") / f"{now.strftime('%H%M%S')}-{phase}-{hardware}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise ParamsError(f"{shown(base)} and 998 more like it exist already")


def _place(text: str) -> Path:
    """The folder that a parameter names: relative ones are relative to the project, whatever the kernel's folder is."""
    return ROOT / text


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _seen(frame: pd.DataFrame) -> list[dict]:
    """Clocks and power of each GPU during the run, for the manifest; nothing on a CPU."""
    seen = tables.machine_table(frame)
    return seen.to_dict("records") if "power median (W)" in seen else []
