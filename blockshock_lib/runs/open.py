"""Opening a run: a new one, an earlier one to draw again, or one that was stopped and goes on."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from blockshock_lib import params, studies
from blockshock_lib.engine.study import Study
from blockshock_lib.errors import LaunchError, ParamsError, RecordError
from blockshock_lib.files import ROOT, shown
from blockshock_lib.ranks import group
from blockshock_lib.runs import code, lock, machine, manifest, records, reference, rules
from blockshock_lib.runs.run import OUTPUTS, Run, new_folder, now


def open_run(
    phase: str,
    *,
    hardware: str = "auto",
    settings: Mapping[str, object] | None = None,
    run_dir: str = "",
    redraw: str = "",
    resume: str = "",
    again: str = "",
    out: Path = OUTPUTS,
    root: Path = params.PARAMS,
    said: str = "settings",
    card: dict | None = None,
) -> Run:
    """A new run, validated before anything starts, or an earlier one; this process owns it until `conclude`. Folders
    are relative to the project.

    Args:
        phase: its name, or "<study>/<phase>".
        hardware: "auto", or the name of a file in params/hardware.
        settings: dotted key -> value, as `--set` on the command line takes them.
        run_dir: the folder made for the run; empty: a new dated one under `out`.
        redraw: the folder of an earlier run, whose records are looked at again; nothing is measured then.
        resume: the folder of a run that was stopped, to go on with its own parameters; "latest": the newest. Hardware
            and settings may be left out, or must be those that it was begun with.
        again: the folder of a run, to measure it once more, as a further run of its reference (`runs.reference`);
            "new": the run begins one.
        said: what `settings` are called where they are complained of.
        card: the machine card, where it is not this machine's alone.

    Raises: ParamsError; RecordError when `redraw`, `resume` or `again` holds no such run; LaunchError when it is still
        going on, or the working directory or the environment lies in another clone than the imported library.
    """
    _same_clone()
    if lock.RUN in os.environ and not redraw:  # its ranks wait for no import then
        group.starter(manifest.read(Path(os.environ[lock.RUN]))["params"]["hardware"]["device"])
    # A page cannot be scrolled for what is not in it.
    pd.set_option("display.max_colwidth", None, "display.max_rows", None)
    study, phase, folder = studies.of_phase(phase), phase.rpartition("/")[2], ROOT / run_dir if run_dir else None
    if settings is not None and not isinstance(settings, Mapping):
        raise ParamsError(f"settings: {settings!r}; allowed: a mapping of dotted keys, as in {{'sweep.n': [4096]}}")
    if redraw and (settings or hardware != "auto"):
        raise ParamsError("redraw: an earlier run is drawn as it was measured; leave hardware and settings out")
    chosen = {} if hardware == "auto" else {"hardware": hardware}

    def asked() -> params.RunParams:
        return params.load(study, phase, settings, choose=chosen, root=root, detect=machine.auto_hardware, said=said)

    if resume:
        if redraw or run_dir:
            raise ParamsError("resume: a run goes on in its own folder; leave run_dir and redraw out")
        return _resumed(study, phase, resume, out, card, asked if settings or chosen else None)
    further = again not in ("", "new")
    if further and (settings or chosen or redraw):
        raise ParamsError("again: a run is measured once more as it was; leave hardware, settings and redraw out")
    source, linked = None, {}
    if redraw:
        source, noted, effective = _earlier(study, phase, redraw)
        card, name = noted["machine"], f"{effective.hardware.name}-redrawn"
        if run_dir == redraw and lock.borrowed(folder):  # its notebook is made, from the records
            return Run(study, folder, effective, card, folder)
    if folder is not None and records.any_in(folder):
        raise ParamsError(f"run_dir: {run_dir} holds the records of a run; name another folder, or redraw that one")
    if further:
        effective, card, linked = _again(study, phase, again, card)
        name = effective.hardware.name
    elif not redraw:
        effective = asked()
        card, name = card or machine.probe(), effective.hardware.name
        machine.admit(effective, card)
    run = Run(study, folder or new_folder(out, study.name, phase, name), effective, card, source)
    run.resumes = further  # in the notebook's kernel too: the folder knows its parameters
    run.folder.mkdir(parents=True, exist_ok=True)
    lock.hold(run.folder)
    made, redrawn_from = code.version(study), shown(run.source) if run.redrawn else ""
    facts = dict(run=run.name, study=study.name, phase=phase, status="running", redrawn_from=redrawn_from)
    facts |= dict(params=effective.model_dump(mode="json"), cases=len(run.cases), code=made, machine=run.card)
    facts |= dict(rules=rules.of(study, phase), started=now())
    linked = {"reference": reference.name_of(facts)} if again == "new" else linked
    manifest.note(run.folder, **facts, **linked)
    code.warn_if_stale(made, study)
    return run


def in_place(folder: Path) -> Run:
    """A run that was measured, for its notebook to be made in its own folder; this process owns it."""
    noted = manifest.read(folder)
    _, _, effective = _earlier(study := studies.load(noted["study"]), noted["phase"], shown(folder))
    lock.hold(folder)
    return Run(study, folder, effective, noted["machine"], folder)


def _same_clone() -> None:
    # A copied clone has the .venv of the first one, which imports that one's library and would write there.
    here, named = Path.cwd(), filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    told = code.HERE in [Path(place).resolve() for place in named] or code.HERE.is_relative_to(sys.prefix)
    places = (here, *here.parents, *[Path(sys.prefix).parent] * (not told))
    around = (place for place in places if (place / "blockshock_lib" / "files.py").is_file())
    if (clone := next(around, code.HERE)).resolve() != code.HERE:
        why = f"{clone} is a clone of its own, but its blockshock_lib is imported from {code.HERE}"
        raise LaunchError(f"{why}: this .venv belongs there; in {clone}: make clean setup")


def latest(out: Path, phase: str, job: str = "") -> Path:
    """The folder of the newest run of this phase under `out` that is not completed, and that `job`, where one is named,
    has begun. RecordError where there is none.
    """
    wanted = studies.of_phase(phase).name, phase.rpartition("/")[2]
    found = [
        (noted["started"], folder)
        for folder, noted in manifest.every(out)
        if (noted["study"], noted["phase"]) == wanted and noted["status"] != "completed"
        if not noted.get("redrawn_from") and job in ("", noted.get("job"))
    ]
    if not found:
        raise RecordError(f"{shown(out)} holds no run of {wanted[1]} that was stopped: nothing to resume")
    return max(found)[1]


def _again(study: Study, phase: str, text: str, card: dict | None) -> tuple[params.RunParams, dict, dict[str, str]]:
    folder, earlier, effective = _earlier(study, phase, text)
    card = card or machine.probe()
    machine.admit(effective, card)
    ours, theirs = ({gpu.get("uuid_digest") for gpu in one["gpus"]} for one in (earlier["machine"], card))
    apart = ours and theirs and not ours & theirs
    faults = {
        f"its status is {earlier['status']}": earlier["status"] not in ("completed", "running"),
        # Other GPUs may measure it meanwhile; `reference.others` waits until both are completed.
        "it goes on on this machine's devices": earlier["status"] == "running" and not apart,
        "it only redraws another": earlier.get("redrawn_from"),
        "it took kernels that were chosen before it": effective.hardware.device == "cuda"
        and not earlier.get("reference"),
        (other := reference.differs(earlier, code.version(study), card)): other,
    }
    if why := next((fault for fault, here in faults.items() if here), ""):
        raise RecordError(f"{shown(folder)} cannot be measured once more: {why}; begin a new reference by --again N")
    return effective, card, {"reference": reference.name_of(earlier), "again": earlier.get("again") or shown(folder)}


def _resumed(study: Study, phase: str, text: str, out: Path, card: dict | None, asked: Callable | None) -> Run:
    text = shown(latest(out, f"{study.name}/{phase}")) if text == "latest" else text
    folder, earlier, effective = _earlier(study, phase, text)
    if earlier.get("redrawn_from"):
        raise RecordError(f"{shown(folder)} redraws {earlier['redrawn_from']} and measures nothing: nothing to resume")
    wanted = asked() if asked else effective
    if differ := [name for name, value in effective if value != getattr(wanted, name)]:
        why = f"{shown(folder)} goes on as it was begun, and this asks for other {', '.join(differ)}"
        raise ParamsError(f"resume: {why}: leave it out, or begin a new run")
    job, card = card is not None, card or machine.probe()
    machine.admit(effective, card)
    run = Run(study, folder, effective, card)
    run.resumes = True
    lock.hold(folder)
    try:
        if manifest.read(folder)["status"] == "completed" or records.find(folder) is not None:
            raise RecordError(f"{shown(folder)} is completed: nothing to resume; a new run takes its place")
        again = Counter(run.unfinished().values())
    except RecordError:
        lock.release(folder)
        raise
    facts = {"status": "running", "code": run.context["code"], "machine": card}
    if not lock.borrowed(folder):
        once = {"at": now(), "finished": len(run.finished()), "again": dict(again), "from": earlier["machine"]["title"]}
        facts["resumed"] = [*earlier.get("resumed", []), once]
    facts |= dict.fromkeys(("reason", "verdict", "ended", "files", "figures"))
    left = reference.differs(earlier, facts["code"], card) or "torchrun's ranks take kept kernels" * job
    if left and earlier.get("reference"):
        warnings.warn(
            f"{shown(folder)} leaves the reference of {earlier.get('again', 'its own')}: {left}", stacklevel=3
        )
        facts |= dict.fromkeys(("reference", "again"))
    manifest.note(folder, **facts)
    code.warn_if_stale(facts["code"], study)
    return run


def _earlier(study: Study, phase: str, text: str) -> tuple[Path, dict, params.RunParams]:
    folder, earlier = ROOT / text, manifest.read(ROOT / text)
    if (earlier["study"], earlier["phase"]) != (study.name, phase):
        raise RecordError(f"{text} is a run of {earlier['study']}/{earlier['phase']}, not of {study.name}/{phase}")
    try:
        return folder, earlier, study.params.model_validate(earlier["params"])
    except ValueError as error:
        raise RecordError(f"{text} has parameters that this version does not know: {error}") from None
