"""Groups of real processes: what a call gives, what is refused, and that nothing outlives a parent."""

import multiprocessing
import os
import re
import signal
import tempfile

import pytest

from blockshock_lib.errors import LaunchError, RankError
from blockshock_lib.ranks import Lost, WorkerGroup, worker
from tests.faults import failing
from tests.processes import call, living, pids_of, python, running, wait_for


@pytest.fixture(scope="module", autouse=True)
def temporary(tmp_path_factory, ranks_of):
    """A temporary folder that these tests do not share, so that whatever is left in it is theirs."""
    ranks_of(2)  # which other files use too
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
    assert not list(folder.iterdir())


def left_over(group):
    with pytest.raises(LaunchError, match="has ended"):
        group.call(failing.rank_and, seconds=1)
    return living(pids_of(group))


def test_a_rank_is_a_process_with_one_thread_whose_print_is_in_its_log(pair):
    assert pair.call(failing.rank_and, "x", 2, seconds=600) == [(0, 2, "x", 2), (1, 2, "x", 2)]
    facts = pair.call(failing.process_facts, seconds=600)
    assert [f["threads"] for f in facts] == [1, 1] and [f["device"] for f in facts] == ["cpu", "cpu"]
    assert [f["pid"] for f in facts] == pids_of(pair) and os.getpid() not in pids_of(pair)
    for rank in range(2):
        text = pair._logs[rank].read_text()
        assert f"said by rank {rank}" in text and "said by a program" in text


def test_two_groups_add_up_at_once_though_torchs_port_is_taken(pair, monkeypatch):
    with multiprocessing.connection.Listener(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.address[1]))
        with WorkerGroup(3, threads=2) as other:
            for group, total in ((pair, 3.0), (other, 6.0), (pair, 3.0)):
                assert [float(x) for x in group.call(failing.total, seconds=600)] == [total] * len(pids_of(group))
            assert [f["threads"] for f in other.call(failing.process_facts, seconds=600)] == [2, 2, 2]
    assert not left_over(other) and pair.alive


@pytest.mark.parametrize("size", range(1, 9))
def test_any_world_size_answers_emits_and_loses_its_last_rank(size, light):
    emitted = []
    with WorkerGroup(size) as group:
        found = group.call(failing.emits, 3, seconds=600, on_emit=lambda rank, value: emitted.append((rank, value)))
        assert found == [(rank, size) for rank in range(size)]
        assert sorted(emitted) == [(rank, number) for rank in range(size) for number in range(3)]
        assert [value for rank, value in emitted if rank == 0] == [0, 1, 2], "in the order in which it sent them"
        *others, last = group.call(failing.waits_for_a_loss, size - 1, seconds=600, may_lose={size - 1})
        assert others == [[size - 1]] * (size - 1), "the others are told, and go on"
        assert (last.rank, last.reason[:45]) == (size - 1, "SIGKILL: the process was ended by SIGKILL, as")
        assert not group.alive
    assert not left_over(group)


def test_a_lost_rank_ends_its_peers_collective_and_they_go_on():
    with WorkerGroup(3) as group:
        first, last, lost = group.call(failing.adds_up_without, 2, seconds=600, may_lose={2})
        assert lost == Lost(2, "ValueError: planted")
        assert first == last == ([2], "RuntimeError")


def test_a_loss_that_the_call_does_not_allow_is_its_error(light):
    with pytest.raises(RankError, match="rank 0 failed with ValueError: planted"), WorkerGroup(2) as group:
        group.call(failing.fails_on, 0, "raise", seconds=600, may_lose={1})
    assert not left_over(group)


def test_an_error_of_the_listener_ends_the_group(light):
    with pytest.raises(ZeroDivisionError), WorkerGroup(2) as group:
        group.call(failing.emits, 1, seconds=600, on_emit=lambda rank, value: 1 / 0)
    assert not left_over(group)


def test_a_refused_call_leaves_the_group_alive(pair):
    for fn, values, why in ((lambda ctx: None, (), "move it"), (failing.rank_and, (lambda: None,), "cannot be sent")):
        with pytest.raises(LaunchError, match=why):
            pair.call(fn, *values, seconds=1)
    assert pair.alive and pair.call(failing.rank_and, seconds=600) == [(0, 2), (1, 2)]


def test_gloo_listens_on_the_loopback_interface_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    worker.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    worker.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_peers_complaint_that_comes_first_is_not_taken_for_the_cause(light):
    with pytest.raises(RankError) as caught:
        call(failing.complains_before_the_cause_dies)
    assert (caught.value.rank, caught.value.kind) == (1, "SIGKILL")


@pytest.mark.parametrize(
    "failures",
    [
        [("RuntimeError", "[pair.cc:534] Connection closed by peer", 1.0), ("ValueError", "planted", 1.2)],
        [("ValueError", "planted", 1.1), ("TypeError", "planted", 1.0)],
        [("ValueError", "knocked on in words unknown", 1.0), ("SIGKILL", "ended", 1.2)],
        [("SIGABRT", "peer lost", 1.2), ("ValueError", "planted", 1.0)],
        [("RuntimeError", "Connection reset by peer", 1.0), ("RuntimeError", "Broken pipe", 0.9)],
    ],
)
def test_the_cause_is_told_from_what_it_knocked_over(failures):
    answers = [worker.Answer(kind=kind, message=message, time=when) for kind, message, when in failures]
    assert worker.root_cause(dict(enumerate(answers))) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_or_interrupted_parent_leaves_no_process_and_no_file(how, tmp_path, monkeypatch, light):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("BLOCKSHOCK_SCRATCH", str(tmp_path / "scratch"))
    said, tell = multiprocessing.Pipe(duplex=False)

    def program():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        group = WorkerGroup(2, logs=tmp_path)
        tell.send(pids_of(group))
        with pytest.raises(KeyboardInterrupt):
            group.call(failing.helper_then_sleep, seconds=600)  # each rank starts a program too
        tell.send(group.alive)

    def helpers():
        text = "".join(path.read_text() for path in tmp_path.glob("rank*.log"))
        return [int(pid) for pid in re.findall(r"helper (\d+)\n", text)]

    parent = multiprocessing.get_context("fork").Process(target=program)
    parent.start()
    tell.close()  # or one that dies in silence would be waited for
    everyone = said.recv()
    try:
        assert wait_for(lambda: len(helpers()) == 2)
        everyone += helpers()
        assert len(running(everyone)) == 4
        assert [path.name[:11] for path in (tmp_path / "scratch").iterdir()] == ["blockshock-"]
        os.kill(parent.pid, how)
        assert how == signal.SIGKILL or said.recv() is False
        assert wait_for(lambda: not running(everyone)), running(everyone)
        assert wait_for(lambda: not list((tmp_path / "scratch").iterdir()))
    finally:
        parent.kill()
        parent.join()
        for pid in running(everyone):
            os.kill(pid, signal.SIGKILL)


def test_a_program_without_a_main_guard_is_told_what_it_lacks(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text("from blockshock_lib.ranks import WorkerGroup\nWorkerGroup(1)\n")
    done = python(script)
    assert done.returncode == 1 and "unguarded.py starts groups, it needs `if __name__" in done.stderr


@pytest.mark.parametrize(("processes", "backend"), [(2, "nccl"), (0, "gloo")])
def test_nccl_needs_a_gpu_and_a_group_a_process(processes, backend):
    with pytest.raises(LaunchError, match="no group of workers"):
        WorkerGroup(processes, backend=backend)
