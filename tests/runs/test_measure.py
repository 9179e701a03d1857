"""Cases in, records out: a sweep goes on after every failure, and what a case has said survives a kill."""

import multiprocessing
import threading
from unittest import mock

import pytest

from blockshock_lib.errors import Interrupted, RankError, RecordError
from blockshock_lib.ranks import WorkerGroup
from blockshock_lib.runs import measure, record, records
from blockshock_lib.runs.measure import Part
from blockshock_lib.studies.linear import STUDY
from tests.cases import row
from tests.faults import workers
from tests.processes import living


def run(tmp_path, cases, on_event=None, **settings):
    events = []
    named = dict(study=STUDY, run_name="r1", context=workers.CONTEXT, on_event=on_event or events.append)
    measure.run(workers.params(**settings), cases, tmp_path, task=workers.measure, **named)
    return records.load(tmp_path, strict=True), events


def lone(*faults):
    """Cases of one rank that are not timed, one a fault."""
    return [workers.faulty(str(i), fault, phase="phase0", world_size=1) for i, fault in enumerate(faults)]


def test_a_sweep_goes_on_after_every_kind_of_failure(tmp_path, light):
    faults = ["", "", "oom", "cuda oom", "no time", "raise", ""]
    frame, events = run(tmp_path, [workers.faulty(str(i), fault) for i, fault in enumerate(faults)])
    statuses = ["ok", "ok", "oom", "oom", "failed", "failed", "ok"]
    assert [e["status"] for e in events] == [s for status in statuses for s in ("running", status)]
    assert [e["done"] for e in events] == [d for i in range(7) for d in (i, i + 1)]
    assert {e["total"] for e in events} == {7} and events[0]["case"] == "case 0"

    failures = frame[frame.status != "ok"].set_index("case")
    assert set(failures.metric) == {"check"} and set(failures.method) == {"row_parallel", "block_shock"}
    reason = {case[-1]: failures.loc[case].reason.unique().tolist() for case in failures.index.unique()}
    assert str(2**60) in reason["2"][0] and "Tried to allocate 20.00 GiB" in reason["3"][0]
    assert "time of zero" in reason["4"][0] and reason["5"] == ["rank 0: ValueError: planted"]
    assert all(len(texts) == 1 for texts in reason.values())

    pids = frame[frame.metric == "flops"].value.tolist()
    assert pids[0] == pids[1] != pids[-1], "a healthy group is kept from case to case, a failed case ends it"
    assert not living(map(int, pids)) and not list(tmp_path.rglob("*.part"))
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert all(f"{fault} at" in log for fault in ("cuda oom", "raise")), "a fresh group goes on with the log"


def test_untimed_cases_of_one_rank_run_side_by_side_and_one_that_dies_ends_no_other(tmp_path):
    """Each waits until another has begun, so that one after the other would hang; the whole group's case goes first."""
    whole = workers.faulty("9", phase="phase0")
    frame, events = run(tmp_path, [*lone("meet", "meet", "kill", ""), whole], processes=2, groups=2)
    assert events[0]["case"] == whole.label
    assert [e["done"] for e in events if e["status"] != "running"] == [*range(1, 11)]
    pids = frame[frame.metric == "flops"].groupby("case")["value"].agg(set)
    assert not pids["0" * 12] & pids["1".zfill(12)], "each device has a worker of its own"
    assert len(pids["9".zfill(12)]) == 2
    failures = frame[frame.status != "ok"]
    assert set(failures.case) == {"2".zfill(12)} and failures.reason.str.contains("SIGKILL").all()
    assert set(failures.detail) <= {"logs/rank0.log", "logs/rank1.log"}
    assert "kill at" in "".join((tmp_path / "logs" / f"rank{device}.log").read_text() for device in (0, 1))


def test_one_case_of_one_rank_is_measured_by_one_worker_where_there_are_more_devices(tmp_path):
    frame, _ = run(tmp_path, lone("raise"), processes=2)
    assert set(frame["reason"]) == {"rank 0: ValueError: planted"}, "two would write the same files"


def test_what_stops_one_lane_stops_all_and_leaves_no_worker_and_no_record_of_what_was_running(tmp_path):
    before, events = set(multiprocessing.active_children()), []

    def stop(event):
        events.append(event)
        if event["status"] == "ok":
            raise Interrupted("enough")

    cases, named = lone("hang", "meet", "", ""), dict(study=STUDY, run_name="r1", context=workers.CONTEXT)
    named |= dict(on_event=stop, task=workers.measure, finished={(cases[3].id, 1)})
    with pytest.raises(Interrupted, match="enough"):
        measure.run(workers.params(processes=2, groups=2), cases, tmp_path, **named)
    assert events[0]["done"] == 1 and events[0]["total"] == 8, "what is finished of a later group is done already"
    assert [path.name for path in (tmp_path / "records").glob("*.json")] == [f"{1:0>12}-0.json"]
    assert len(list(tmp_path.rglob("*.part"))) == 1, "what the stopped case has said is there to go on from"
    assert set(multiprocessing.active_children()) <= before, "a worker is left"


def test_a_lane_that_is_stopped_while_its_workers_start_measures_nothing_and_ends_them(tmp_path, monkeypatch, light):
    """The first device's workers are not there before the other lane has stopped all, and its own have been ended."""
    before = set(multiprocessing.active_children())
    ended, start, leave = threading.Event(), WorkerGroup.__init__, WorkerGroup.__exit__
    monkeypatch.setattr(WorkerGroup, "__exit__", lambda *args: leave(*args) or ended.set())

    def late(*args, **how):
        assert how["first"] or ended.wait(600)
        start(*args, **how)

    def stop(event):
        if event["status"] == "ok":
            raise Interrupted("enough")

    monkeypatch.setattr(WorkerGroup, "__init__", late)
    with pytest.raises(Interrupted, match="enough"):
        run(tmp_path, lone("", ""), stop, processes=2)
    assert not list(tmp_path.rglob("*.part")), "it was measured"
    assert set(multiprocessing.active_children()) <= before, "a worker is left"


SHORTAGES = [
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB.", "oom", "CUDA out of memory. Tried to"),
    ("DistBackendError", "NCCL error\nCuda failure 2 'out of memory'", "oom", "Cuda failure 2 'out of mem"),
    ("MemoryError", "", "oom", "no message"),
    ("ValueError", "\nsecond line", "failed", "second line"),
]


@pytest.mark.parametrize("kind, message, status, reason", SHORTAGES)
def test_a_shortage_of_memory_is_told_from_other_failures_by_the_line_that_says_so(kind, message, status, reason):
    rows = measure.failure_rows(STUDY, workers.faulty("0"), RankError(1, kind, message, "trace"))
    record.validate(rows, STUDY.metrics)
    assert [row["method"] for row in rows] == ["row_parallel", "block_shock"]
    assert {row["status"] for row in rows} == {status} and {row["detail"] for row in rows} == {"logs/rank1.log"}
    assert all(row["reason"].startswith(f"rank 1: {kind}: {reason}") for row in rows)


ILLEGAL = ("AcceleratorError", "CUDA error: an illegal memory access was encountered")
BREAKS = [
    (0, *ILLEGAL, "block_shock", True),
    (0, "RuntimeError", "Triton Error [CUDA]: an illegal memory access was encountered", "permuted_dense", True),
    (0, "SIGSEGV", "the process was ended by SIGSEGV", "block_shock", True),
    (1, "SIGSEGV", "the process was ended by SIGSEGV", "block_shock", False),  # no rank that said so
    *((0, *ILLEGAL, name, False) for name in ("", "twin", "dense", "row_parallel")),  # the first, and the baseline
    (0, "ValueError", "planted", "block_shock", False),
    (0, "AcceleratorError", "CUDA error: out of memory", "block_shock", False),
]


@pytest.mark.parametrize("rank, kind, message, running, anew", BREAKS)
def test_a_case_is_begun_anew_once_without_the_method_that_broke_it(rank, kind, message, running, anew, tmp_path):
    case = workers.faulty("0", methods=("dense", "row_parallel", "block_shock", "permuted_dense"))

    def left_out():
        part, error = Part(tmp_path, case, 0, CONTEXT), RankError(rank, kind, message, "")
        part.hear(0, running)
        part.add(made := measure.left_out(STUDY, case, error, measure.failure_rows(STUDY, case, error), part))
        return [one["method"] for one in made], part.gone

    assert left_out() == ([running] if anew else [], set())
    assert left_out() == ([], {running} if anew else set()), "a run that is stopped then and resumed knows it"


def test_a_hung_case_times_out_and_every_repeat_has_a_fresh_group(tmp_path, light):
    frame, _ = run(tmp_path, [workers.faulty("0"), workers.faulty("1", "hang")], groups=2, case_seconds=3)
    late = frame[frame.status == "timeout"]
    assert late.case.tolist() == ["000000000001"] * 4 and "within 3 s" in late.reason.iloc[0]
    assert "measure" in (tmp_path / "logs" / "rank0.stacks").read_text()
    times = frame[(frame.metric == "forward_kernel") & (frame.method == "row_parallel")]
    assert times.groupby("group").value.apply(list).to_dict() == {0: [1.5, 1.5], 1: [2.5, 2.5]}
    assert frame[frame.metric == "flops"].value.nunique() == 2


def test_a_killed_case_keeps_what_it_can_go_on_from_until_it_comes_to_its_end(tmp_path):
    cases = [workers.faulty(str(i), fault, world_size=1) for i, fault in enumerate(["kill late", "kill"])]
    frame, _ = run(tmp_path, cases)
    assert frame["reason"].str.contains("SIGKILL").all() and set(frame.status) == {"failed"}
    kept = [path.name for path in sorted(tmp_path.glob("records/*")) if path.suffix != ".json"]
    assert kept == ["000000000000-0.part", "000000000000-0.state"]
    frame, _ = run(tmp_path, cases[:1])
    assert set(frame[frame.case.eq(cases[0].id)].status) == {"ok"} and not list(tmp_path.glob("records/*[0-9].[ps]*t*"))


CASE, CONTEXT = workers.faulty("0"), workers.CONTEXT
ROWS = [row("block_shock", "loss", 1.0 / step, repeat=step) for step in range(1, 4)]


def said(folder, context=CONTEXT):
    return Part(folder, CASE, 0, context).rows


@pytest.fixture
def part(tmp_path):
    """The file of a case that was killed after three messages."""
    made = Part(tmp_path, CASE, 0, CONTEXT)
    assert made.rows == []
    for one in ROWS:
        made.add([one])
    return made.path


def test_what_a_stopped_case_said_is_there_again_and_more_can_follow(part, tmp_path):
    again = Part(tmp_path, CASE, 0, CONTEXT)
    assert again.rows == ROWS and not again.silent
    again.add(ROWS[:1])
    assert said(tmp_path) == [*ROWS, ROWS[0]]
    assert Part(tmp_path, CASE, 0, CONTEXT).silent, "the attempt before it left nothing"
    again.remove()
    assert said(tmp_path) == []


@pytest.mark.parametrize(
    "damage, kept",
    [
        (lambda lines: [*lines[:3], lines[3][:-9]], 2),  # cut by a kill
        (lambda lines: [*lines[:3], lines[3].rstrip("\n")], 2),
        (lambda lines: [*lines[:2], lines[2].replace("0.5", "0.6"), lines[3]], 1),
        (lambda lines: [lines[0], *lines[2:]], 0),  # one is missing: what follows is not what was written
        (lambda lines: lines[1:], 0),
        (lambda lines: ["\xff\n"], 0),
    ],
)
def test_only_what_is_whole_of_a_damaged_file_is_gone_on_with(damage, kept, part, tmp_path):
    part.write_text("".join(damage(part.read_text().splitlines(keepends=True))))
    assert said(tmp_path) == ROWS[:kept]
    assert said(tmp_path) == ROWS[:kept], "the damage is gone"


def test_what_the_heir_of_a_lost_rank_0_says_is_kept(tmp_path):
    def call(*_, on_emit, **__):
        on_emit(0, ROWS[:1])
        on_emit(1, ROWS[1:])  # rank 0 is gone
        raise KeyboardInterrupt

    group = mock.MagicMock()
    group.return_value.__enter__.return_value.call = group.return_value.call = call
    with pytest.raises(KeyboardInterrupt):
        asked = dict(study=STUDY, run_name="r1", context=CONTEXT, group=group)
        measure.run(workers.params(), [CASE], tmp_path, **asked)
    assert said(tmp_path) == ROWS


@pytest.mark.parametrize("other", [{"code": {"sources": "abd"}}, {"code": {"sources": ""}}, {"machine": "another"}])
def test_rows_of_other_code_or_another_machine_are_begun_anew(other, part, tmp_path):
    part.with_suffix(".state").touch()
    assert said(tmp_path, CONTEXT | other) == [] and not part.with_suffix(".state").exists()


def test_a_part_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "records").touch()
    with pytest.raises(RecordError, match=r"000000000000-0.part could not be written"):
        Part(tmp_path, CASE, 0, CONTEXT)
