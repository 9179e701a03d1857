import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from blockshock_lib import launch, records
from blockshock_lib.errors import LaunchError, RankError
from blockshock_lib.workers import root_cause
from tests.faults import workers
from tests.processes import living, running, wait_for

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def temporary(tmp_path_factory):
    """A temporary folder that these tests do not share, so that whatever is left in it is theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with launch.WorkerGroup(2, logs=tmp_path_factory.mktemp("logs")) as group:
        yield group


def ended(group, meeting_before):
    """No process of the group runs, nothing of it lies in the temporary folder, and it takes no further call."""
    assert not living(group.pids) and not group.alive
    assert set(meetings()) <= set(meeting_before)
    with pytest.raises(LaunchError, match="has ended"):
        group.call(workers.rank_and, seconds=1)
    return True


def meetings():
    return [path.name for path in Path(tempfile.gettempdir()).iterdir()]


def test_results_come_in_rank_order_with_the_arguments(pair):
    assert pair.call(workers.rank_and, "x", 2, seconds=30) == [(0, 2, "x", 2), (1, 2, "x", 2)]


def test_the_ranks_share_a_process_group(pair):
    assert [float(x) for x in pair.call(workers.total_of_ranks, seconds=30)] == [3.0, 3.0]


def test_what_a_rank_and_its_programs_print_is_in_its_log(pair):
    pair.call(workers.process_facts, seconds=30)
    for rank in range(2):
        text = (pair._logs / f"rank{rank}.log").read_text()
        assert f"said by rank {rank}" in text and "said by a program" in text


def test_ranks_are_processes_of_their_own_with_one_thread(pair):
    facts = pair.call(workers.process_facts, seconds=30)
    assert [f["threads"] for f in facts] == [1, 1] and [f["device"] for f in facts] == ["cpu", "cpu"]
    assert [f["pid"] for f in facts] == pair.pids and os.getpid() not in pair.pids


def in_main():
    pass


in_main.__module__ = "__main__"


def refused():
    def local(ctx):
        pass

    return {"lambda": lambda ctx: None, "local": local, "notebook": in_main, "no function": object()}


@pytest.mark.parametrize("kind", refused())
def test_a_function_that_no_worker_can_import_is_refused_before_any_process_starts(kind, monkeypatch):
    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing, "get_context", start)
    with pytest.raises(LaunchError, match=r"move it into a \.py file"):
        launch.call(refused()[kind])
    with pytest.raises(LaunchError, match=r"move it into a \.py file"):
        launch.run(workers.params(), [], Path(), measure=refused()[kind], run_name="r", context={})


def test_a_refused_call_leaves_the_group_alive(pair):
    with pytest.raises(LaunchError, match="move it"):
        pair.call(lambda ctx: None, seconds=1)
    with pytest.raises(LaunchError, match="cannot be sent to a worker"):
        pair.call(workers.rank_and, lambda: None, seconds=1)
    assert pair.alive and pair.call(workers.rank_and, seconds=30) == [(0, 2), (1, 2)]


def test_nccl_needs_a_gpu_and_a_group_a_process():
    for processes, backend in ((2, "nccl"), (0, "gloo")):
        with pytest.raises(LaunchError, match="no group of workers"):
            launch.WorkerGroup(processes, backend=backend)


def test_two_groups_work_at_once_though_port_29500_is_taken(pair, monkeypatch):
    with closing(socket.socket()) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else has it: that will do
        monkeypatch.setenv("MASTER_PORT", "29500")
        before = meetings()
        with launch.WorkerGroup(2) as other:
            for group in (pair, other, pair):
                assert [float(x) for x in group.call(workers.total_of_ranks, seconds=30)] == [3.0, 3.0]
    assert ended(other, before) and pair.alive


def test_a_peers_complaint_that_comes_first_is_not_taken_for_the_cause():
    with pytest.raises(RankError) as caught:
        launch.call(workers.complains_before_the_cause_dies)
    assert (caught.value.rank, caught.value.kind) == (1, "SIGKILL")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([("RuntimeError", "[pair.cc:534] Connection closed by peer", 1.0), ("ValueError", "planted", 1.2)], 1),
        ([("ValueError", "planted", 1.1), ("TypeError", "planted", 1.0)], 1),
        ([("ValueError", "knocked on in words unknown", 1.0), ("SIGKILL", "ended", 1.2)], 1),
        ([("SIGABRT", "peer lost", 1.2), ("ValueError", "planted", 1.0)], 1),
        ([("RuntimeError", "Connection reset by peer", 1.0), ("RuntimeError", "Broken pipe", 0.9)], 1),
    ],
)
def test_the_cause_is_told_from_what_it_knocked_over(failures, cause):
    errors = {rank: RankError(rank, kind, message, "") for rank, (kind, message, _) in enumerate(failures)}
    assert root_cause(errors, {rank: when for rank, (_, _, when) in enumerate(failures)}).rank == cause


@contextmanager
def parent(tmp_path, body):
    """A program of its own, as a user would write it, whose two ranks each start a program too; and all their ids."""
    script = tmp_path / "program.py"
    script.write_text(
        "from pathlib import Path\n"
        "from blockshock_lib import launch\n"
        "from tests.faults import workers\n"
        "if __name__ == '__main__':\n"
        "    group = launch.WorkerGroup(2, logs=Path('logs'))\n"
        "    print(*group.pids, flush=True)\n" + "".join(f"    {line}\n" for line in body.splitlines())
    )
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path / "tmp")}
    out = tmp_path / "out"
    with out.open("w") as file:
        program = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, env=env, stdout=file, stderr=file)
    everyone = []
    try:
        assert wait_for(lambda: len(helpers(tmp_path)) == 2, 30), out.read_text()
        everyone += [*map(int, out.read_text().split()), *helpers(tmp_path)]
        assert len(running(everyone)) == 4
        yield program, everyone
    finally:
        program.kill()
        program.wait()
        for pid in running(everyone):
            os.kill(pid, signal.SIGKILL)


def helpers(tmp_path):
    texts = [path.read_text() for path in (tmp_path / "logs").glob("rank*.log")]
    return [int(pid) for text in texts for pid in re.findall(r"helper (\d+)\n", text)]


def test_a_killed_parent_leaves_no_process_and_no_file(tmp_path):
    with parent(tmp_path, "group.call(workers.helper_then_sleep, seconds=600)") as (program, everyone):
        program.kill()
        program.wait()
        assert wait_for(lambda: not running(everyone), 1.0), running(everyone)
    assert not list((tmp_path / "tmp").glob("blockshock-*"))


def test_an_interrupted_parent_leaves_no_process_and_no_file(tmp_path):
    call = "group.call(workers.helper_then_sleep, seconds=600)"
    body = f"try:\n    {call}\nexcept KeyboardInterrupt:\n    print('interrupted', group.alive)"
    with parent(tmp_path, body) as (program, everyone):
        program.send_signal(signal.SIGINT)
        assert program.wait(timeout=2) == 0
        assert wait_for(lambda: not running(everyone), 1.0), running(everyone)
    assert (tmp_path / "out").read_text().endswith("interrupted False\n")
    assert not list((tmp_path / "tmp").glob("blockshock-*"))


def test_a_program_without_a_main_guard_is_told_what_it_lacks(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from blockshock_lib import launch\n"
        "from tests.faults import workers\n"
        "launch.call(workers.rank_and, processes=1)\n"
    )
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "unguarded.py starts groups, it needs `if __name__" in done.stderr


def run(tmp_path, cases, finished=frozenset(), **params):
    events = []
    tmp_path.mkdir(exist_ok=True)
    launch.run(
        workers.params(**params),
        cases,
        tmp_path,
        measure=workers.measure,
        run_name="r1",
        context=workers.CONTEXT,
        on_event=events.append,
        finished=finished,
    )
    return records.load(tmp_path, strict=True), events


def test_a_sweep_goes_on_after_every_kind_of_failure(tmp_path):
    faults = ["", "", "oom", "cuda oom", "no time", "raise", ""]
    cases = [workers.Case(str(i), fault) for i, fault in enumerate(faults)]
    frame, events = run(tmp_path, cases)
    statuses = ["ok", "ok", "oom", "oom", "failed", "failed", "ok"]
    assert [e["status"] for e in events] == [s for status in statuses for s in ("running", status)]
    assert [e["done"] for e in events] == [d for i in range(7) for d in (i, i + 1)]
    assert {e["total"] for e in events} == {7} and events[0]["case"] == "case 0"

    failures = frame[frame.status != "ok"].set_index("case")
    assert set(failures.metric) == {"check"} and set(failures.method) == {"row_parallel", "block_shock"}
    reason = {case: failures.loc[case].reason.unique().tolist() for case in failures.index.unique()}
    assert str(2**60) in reason["000000000002"][0] and "Tried to allocate 20.00 GiB" in reason["000000000003"][0]
    assert "time of zero" in reason["000000000004"][0]
    assert reason["000000000005"] == ["rank 0: ValueError: planted"]
    assert all(len(texts) == 1 for texts in reason.values())

    by_case = frame[frame.metric == "flops"].set_index("case").value
    assert by_case["000000000000"] == by_case["000000000001"], "a healthy group is kept from case to case"
    assert by_case["000000000006"] != by_case["000000000000"], "a failed case ends its group"
    assert not living(by_case.astype(int))


@pytest.mark.parametrize(
    ("kind", "message", "status", "reason"),
    [
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2 GiB.",
            "oom",
            "CUDA out of memory. Tried to allocate",
        ),
        (
            "DistBackendError",
            "NCCL error in: x.cpp\nCuda failure 2 'out of memory'",
            "oom",
            "Cuda failure 2 'out of mem",
        ),
        ("MemoryError", "", "oom", "no message"),
        ("ValueError", "\nsecond line", "failed", "second line"),
    ],
)
def test_a_shortage_of_memory_is_told_from_other_failures_and_keeps_the_line_that_says_so(
    kind, message, status, reason
):
    rows = launch.failure_rows(workers.Case("0"), RankError(1, kind, message, "trace"))
    records.validate(rows)
    assert [row["method"] for row in rows] == ["row_parallel", "block_shock"]
    assert {row["status"] for row in rows} == {status} and {row["detail"] for row in rows} == {"logs/rank1.log"}
    assert all(row["reason"].startswith(f"rank 1: {kind}: {reason}") for row in rows)


def test_a_hung_case_times_out_and_every_group_is_fresh(tmp_path):
    cases = [workers.Case("0"), workers.Case("1", "hang")]
    frame, _ = run(tmp_path, cases, groups=2, case_seconds=3)
    assert frame[frame.case == "000000000001"].status.tolist() == ["timeout"] * 4
    assert "within 3 s" in frame[frame.status == "timeout"].reason.iloc[0]
    assert "measure" in (tmp_path / "logs" / "rank0.stacks").read_text()
    times = frame[(frame.metric == "forward_kernel") & (frame.method == "row_parallel")]
    assert times.groupby("group").value.apply(list).to_dict() == {0: [1.5, 1.5], 1: [2.5, 2.5]}
    assert frame[frame.metric == "flops"].value.nunique() == 2


def test_the_gpus_rows_join_the_rows_of_their_case(tmp_path, monkeypatch):
    class Sampler:
        def __init__(self, device, processes):
            assert (device, processes) == ("cuda", 1)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def rows(self):
            return [records.row("machine", "power", 650.0, rank=0)]

    class Group:
        alive = True

        def __init__(self, *_, **__):
            pass

        __enter__, __exit__ = lambda self: self, lambda self, *_: None

        def call(self, measure, case, params, group, seconds):
            return [measure(type("ctx", (), {"rank": 0, "world_size": 1}), case, params, group)]

    import blockshock_lib.engine.power

    monkeypatch.setattr(blockshock_lib.engine.power, "Sampler", Sampler)
    monkeypatch.setattr(launch, "WorkerGroup", Group)
    params = workers.params()
    params.hardware.device = "cuda"
    launch.run(params, [workers.Case("0")], tmp_path, measure=workers.measure, run_name="r", context=workers.CONTEXT)
    frame = records.load(tmp_path)
    assert frame[frame.metric == "power"].value.tolist() == [650.0] and (frame.method == "block_shock").any()


def test_finished_cases_are_counted_and_not_run_again(tmp_path, monkeypatch):
    cases = [workers.Case(str(i)) for i in range(3)]
    finished = {(case.id, 0) for case in cases} | {(cases[1].id, 1)}
    started = []

    def start(self, *args, **options):
        started.append(options["logs"])
        return launch.WorkerGroup(*args, **options)

    monkeypatch.setattr(launch.Team, "group", start)
    frame, events = run(tmp_path, cases, finished=finished, groups=2)
    assert sorted(set(zip(frame.case, frame.group, strict=True))) == [(cases[0].id, 1), (cases[2].id, 1)]
    assert [(e["done"], e["status"]) for e in events] == [(4, "running"), (5, "ok"), (5, "running"), (6, "ok")]
    assert len(started) == 1, "no group is started for what is finished"
    assert run(tmp_path / "all", cases, finished={(c.id, g) for c in cases for g in (0, 1)}, groups=2)[1] == []


def test_a_groups_files_lie_in_the_runs_scratch_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_SCRATCH", str(tmp_path))
    with launch.WorkerGroup(1):
        assert [path.name[:11] for path in tmp_path.iterdir()] == ["blockshock-"]
    assert not list(tmp_path.iterdir())
