"""A dry run: what it prints, on what its time rests, and that nothing is started."""

import datetime as dt
import shutil

import pandas as pd
import pytest

from blockshock_lib import files
from blockshock_lib.runs import dry_run, manifest, records
from blockshock_lib.runs.manifest import REFERENCE
from blockshock_lib.studies.linear import STUDY
from tests.small_runs import copied
from tests.studies.linear.measuring import load as asked

SHIPPED = REFERENCE / "phase1-cpu"
CPU, H200 = (manifest.read(REFERENCE / f"phase1-{kind}")["machine"] for kind in ("cpu", "cuda"))


def text_of(effective, card, out=None):
    return dry_run.dry_run(STUDY, effective, card, out)


@pytest.mark.parametrize("hardware", ["cpu", "cuda"])
@pytest.mark.parametrize("phase", STUDY.phases)
def test_a_dry_run_tells_every_case_starts_no_process_and_makes_no_folder(phase, hardware, tmp_path, nothing_starts):
    effective = asked(phase, hardware)
    text = text_of(effective, H200 if hardware == "cuda" else CPU, tmp_path)
    assert not list(tmp_path.iterdir())
    assert max(map(len, text.splitlines())) <= 120
    cases = STUDY.expand(effective)
    for case in cases:
        assert f"\n  {case.label} " in text
    assert f"{len(cases) * effective.timing.groups} records" in text
    for said in (f"base < linear < {phase}", f"sweeps/{phase}-{hardware}", "estimate", "outputs/reference", "fits"):
        assert said in text
    assert all(STUDY.axes.label(name) in text for name in effective.methods)


def test_what_would_be_refused_is_said_and_a_method_that_cannot_run_has_its_reason():
    text = text_of(asked("phase1", "cuda-4"), CPU)
    assert "would be refused here: hardware cuda-4" in text and "40960x40960" in text
    assert " 8/8 " in text and "cannot run" not in text and "what this machine has for it is not known" in text
    card = H200 | {"unsupported": {"cslt": "this build of torch has no cuSPARSELt"}}
    text = text_of(asked("phase0", "cuda-1", methods=["block_shock"], sweep__n=[512]), card)
    assert "2 ranks in one process" in text and "cannot run: this build of torch has no cuSPARSELt" in text
    both = asked(hardware="cuda", methods=["row_parallel", "block_shock"], sweep__n=[65664], sweep__b=[16])
    text = " ".join(text_of(both, H200).split())
    assert " 1/2 " in text and "cannot run: a weight of 65664x65664 has more than 2^32 entries" in text


def test_a_case_that_cannot_fit_has_its_sentence_and_the_others_have_none(monkeypatch):
    monkeypatch.setattr(dry_run.memory, "available", lambda: 3 * 2**30)
    told = text_of(asked(sweep__n=[256, 16384], sweep__b=[16]), CPU)
    assert told.count("needs up to") == 1 and "256x256 B=16 bf16 checkerboard gaussian needs" not in told
    assert "16384x16384 B=16 bf16 checkerboard gaussian needs up to " in told
    assert "of 3 GiB free here: it cannot" in " ".join(told.split())
    assert " NO " in text_of(asked(sweep__n=[16384], sweep__b=[16]), CPU)


def test_the_same_plan_takes_what_the_run_took_that_it_is_scaled_by(tmp_path):
    effective, shipped = asked("phase1"), manifest.read(SHIPPED)
    own, why = dry_run.estimate(STUDY, effective, CPU, tmp_path)
    started, ended = (dt.datetime.fromisoformat(shipped[key]) for key in ("started", "ended"))
    assert own == pytest.approx((ended - started).total_seconds() + dry_run.COMMAND_SECONDS)
    assert why == "outputs/reference/phase1-cpu, this machine"
    times = dict(started="2026-11-23T10:00:00+00:00", ended="2026-11-23T10:01:40+00:00")
    copied(SHIPPED, tmp_path / "slow", **times)
    assert dry_run.estimate(STUDY, effective, CPU, tmp_path)[0] == pytest.approx(100 + dry_run.COMMAND_SECONDS)
    assert dry_run.estimate(STUDY, asked("phase1", timing__groups=4), CPU, tmp_path)[0] > 1.7 * 100
    assert CPU["title"] in dry_run.estimate(STUDY, effective, CPU | {"title": "x"}, tmp_path)[1]


def newest_shipped():
    return files.shown(max(REFERENCE.glob("phase[1-9]-cpu"), key=lambda folder: manifest.read(folder)["started"]))


def test_ceilings_come_from_the_newest_whole_run_of_the_machine_else_from_the_shipped_one(tmp_path):
    for name, text in {"a": "{", "b": "[]", "c": '{"run": 1}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.FILE).write_text(text)
    _, source = dry_run.known_ceilings("linear", "cpu", "bf16", machine="another computer", out=tmp_path)
    assert source == f"{newest_shipped()} on {CPU['title']}, bf16, 2 ranks"
    for day in ("2026-11-21", "2026-11-22", "2026-11-20"):
        copied(SHIPPED, tmp_path / day, started=f"{day}T10:00:00+00:00")
    without = manifest.read(tmp_path / "2026-11-22")["params"]
    del without["sweep"], without["dtype"]  # of a study that has no such keys
    copied(SHIPPED, tmp_path / "other", started="2026-11-23T10:00:00+00:00", params=without)
    assert dry_run.known_ceilings("linear", "cpu", "bf16", machine=CPU["title"], out=tmp_path)[0].gemm_rate > 0
    shutil.rmtree(tmp_path / "other")
    ceilings, source = dry_run.known_ceilings("linear", "cpu", "bf16", machine=CPU["title"], out=tmp_path)
    assert source.startswith(str(tmp_path / "2026-11-22")) and ceilings.gemm_rate > 0
    assert "bf16" in dry_run.known_ceilings("linear", "cpu", "fp32", machine=CPU["title"])[1]
    known = dry_run.known_machines("linear", tmp_path)
    assert ("cpu", CPU["title"]) in [(device, card["title"]) for device, card in known]


@pytest.mark.parametrize(
    "change", [{"status": "failed"}, {"redrawn_from": "elsewhere"}, {"phase": "phase0"}, {"received": {"zip": "x"}}]
)
def test_a_run_that_did_not_measure_to_its_end_gives_no_ceilings(change, tmp_path):
    copied(SHIPPED, tmp_path / "a", started="2027-01-01T10:00:00+00:00", **change)
    assert dry_run.known_ceilings("linear", "cpu", "bf16", machine=CPU["title"], out=tmp_path)[1].startswith(
        newest_shipped()
    )


def test_of_a_run_in_two_dtypes_the_ceilings_are_those_of_the_asked_one(tmp_path, monkeypatch):
    frame = records.load(SHIPPED)
    both = pd.concat([frame.assign(dtype="fp32", value=9.0), frame.assign(dtype="bf16", value=4.0)])
    copied(SHIPPED, tmp_path / "a")
    monkeypatch.setattr(records, "load", lambda folder: both)
    for dtype, rate in (("fp32", 9.0), ("bf16", 4.0)):
        assert dry_run.known_ceilings("linear", "cpu", dtype, machine=CPU["title"], out=tmp_path)[0].gemm_rate == rate
