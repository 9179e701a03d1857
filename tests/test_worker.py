import pickle

import pytest
import torch

from blockshock_lib import launch, params, plan, records, worker
from blockshock_lib.engine import experiment
from blockshock_lib.errors import RankError
from blockshock_lib.layers import problem
from tests.faults import workers


@pytest.fixture(scope="module")
def single():
    with launch.WorkerGroup(1, threads=3) as group:
        yield group


def test_a_single_rank_needs_no_process_group(single):
    assert single.call(workers.rank_and, seconds=30) == [(0, 1)]
    assert single.call(workers.process_facts, seconds=30)[0]["threads"] == 3


def test_an_answer_keeps_the_value_or_the_error_with_its_own_traceback():
    good = worker._answer(workers.rank_and, worker.RankContext(1, 2, None, None), "x")
    assert good.ok and pickle.loads(good.value) == (1, 2, "x")
    bad = worker._answer(workers.raises_on, worker.RankContext(0, 1, None, None), 0)
    assert (bad.ok, bad.kind, bad.message.splitlines()[0]) == (False, "ValueError", "planted in rank 0")
    assert "in raises_on" in bad.traceback and bad.time > 0


def test_a_result_that_cannot_be_pickled_is_an_error_of_that_rank():
    answer = worker._answer(workers.cannot_be_sent_back, None)
    assert not answer.ok and "lambda" in answer.message


def test_gloo_listens_on_the_loopback_interface_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    worker._use_loopback()
    assert worker.os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    worker._use_loopback()
    assert worker.os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("host", "here"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("gpu07", False)]
)
def test_the_loopback_interface_is_for_ranks_that_meet_on_this_machine(host, here):
    assert worker.is_loopback(host) == here


def test_the_engine_gets_the_cases_problem_and_the_runs_folder_and_learns_which_case_is_which(monkeypatch, tmp_path):
    effective = params.load("phase1", {"sweep.n": [128, 256]}, choose={"hardware": "cpu"})
    cases = plan.expand(effective)
    monkeypatch.setattr(experiment, "measure", lambda *args, **named: (*args, named))
    monkeypatch.setattr(problem, "LinearProblem", lambda case, device, draw: (case, device, draw))
    ctx = worker.RankContext(0, 2, torch.device("cpu"), tmp_path / "logs" / "rank0.log")
    assert [case.batch for case in cases] == [16, 256, 16, 256]
    for case in cases:
        found = worker.measure(ctx, case, effective, 3)
        assert found[:2] == ((case, ctx.device, 3), effective)
        told = {"last": case is cases[-1], "smallest": case is cases[0], "first": case.batch == 16}
        assert found[2] == {"group_index": 3, "traces": tmp_path / "traces"} | told


def test_two_real_ranks_measure_a_small_sweep_of_every_method(tmp_path):
    sizes = {"sweep.n": [128], "sweep.b": [16], "timing.groups": 1, "timing.samples": 2, "profile": "none"}
    effective = params.load("phase1", sizes, choose={"hardware": "cpu"})
    launch.run(effective, plan.expand(effective), tmp_path, run_name="r1", context=workers.CONTEXT)
    frame = records.load(tmp_path, strict=True)
    checks = frame[frame.metric == "check"].set_index("method").status
    assert set(checks.index) == set(effective.methods) and set(checks) <= {"ok", "unsupported"}
    assert checks["block_shock"] == checks["row_parallel"] == "ok"
    times = frame[frame.metric == "forward_kernel"]
    assert set(times.method) == set(checks[checks == "ok"].index) and (times.groupby("method").size() == 2).all()


def test_a_task_that_exits_is_heard(single):
    # Last in this file: it ends the group.
    with pytest.raises(RankError) as caught:
        single.call(workers.leaves_on, 0, seconds=30)
    assert (caught.value.kind, caught.value.message) == ("SystemExit", "3")
