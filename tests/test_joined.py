import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from blockshock_lib import custodian, manifest, records
from blockshock_lib.errors import LaunchError, ParamsError
from blockshock_lib.joined import Place, cards, hosts, place
from blockshock_lib.manifest import ROOT
from tests.processes import wait_for

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "j",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu[07,11]",
}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu[01-04,07]", ["gpu01", "gpu02", "gpu03", "gpu04", "gpu07"]),
        ("a1,b2", ["a1", "b2"]),
        ("a[1-2],b,c[9-11]d", ["a1", "a2", "b", "c9d", "c10d", "c11d"]),
        ("r[1-2]n[01,3]", ["r1n01", "r1n3", "r2n01", "r2n3"]),
        ("one", ["one"]),
        ("", []),
    ],
)
def test_slurms_short_form_of_hosts(text, found):
    assert hosts(text) == found


@pytest.mark.parametrize("text", ["a[1-2", "a]1", "a[x]", "a[3-1]", "a[]", "a[0-99999999]", "[", "a[1-2]]"])
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(LaunchError, match="no list of hosts"):
        hosts(text)


def test_an_ordinary_process_and_a_job_of_one_rank_have_no_place():
    assert place({}) is None
    assert place(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert place(SLURM | {"SLURM_NTASKS": "1"}) is None
    # A batch script has most of the variables of a step, but it is none: what it runs itself is an ordinary process.
    assert place({key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}) is None


def test_torchrun_says_where_a_rank_stands_and_its_agent_serves_the_store():
    assert place(TORCHRUN) == Place(1, 2, 0, 1, "10.0.0.1", 29400, False, "torchrun-j-0")
    assert not place(TORCHRUN | {"RANK": "0"}).serves
    assert place(TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}).serves
    assert place(TORCHRUN).job != place(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}).job


def test_slurm_says_where_a_rank_stands_and_rank_0_serves_the_store():
    first, second = place(SLURM), place(SLURM | {"SLURM_PROCID": "1", "SLURM_NODEID": "1"})
    assert (first.host, first.serves, second.serves, second.node) == ("gpu07", True, False, 1)
    assert (first.host, first.port, first.job) == (second.host, second.port, second.job)
    assert 15000 <= first.port < 30000 and place(SLURM | {"SLURM_STEP_ID": "1"}).port != first.port
    named = place(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (named.host, named.port) == ("head", 1234)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "two"}, "RANK is 'two'"),
        ({"RANK": "2"}, "rank 2 of 2"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
    ],
)
def test_a_broken_environment_is_named(changes, words):
    environment = {key: value for key, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(LaunchError, match=words):
        place(environment)


def told(node=0, uuid="", **changes):
    gpus = [{"index": 0, "name": "NVIDIA H200", "memory_bytes": 1, "capability": "9.0", "power_limit_w": 700.0}]
    card = {
        "title": "1x NVIDIA H200" if uuid else "CPU, 2 cores: X",
        "gpus": gpus if uuid else [],
        "links": [],
        "driver": "580" if uuid else "",
        "cpu": {"model": "X", "cores": 2},
        "libraries": {"torch": "2.13"},
        "unsupported": {},
    }
    return {"node": node, "card": card | changes, "code": "c", "gpu": 0, "uuid": uuid}


def test_the_card_of_several_machines_counts_them_and_has_a_fingerprint_of_its_own():
    from blockshock_lib import machine

    two = cards.joined([told(0, "a"), told(1, "b")])
    assert two["title"] == "2 nodes of 1x NVIDIA H200"
    assert [(gpu["index"], gpu["node"]) for gpu in two["gpus"]] == [(0, 0), (1, 1)]
    prints = {machine.fingerprint(cards.joined([told(n, u) for n, u in enumerate(us)])) for us in ("a", "ab", "abcd")}
    assert len(prints) == 3
    cpus = [cards.joined([told(node) for node in nodes]) for nodes in ((0, 0), (0, 1))]
    assert [card["title"] for card in cpus] == ["CPU, 2 cores: X", "2 nodes of CPU, 2 cores: X"]
    assert machine.fingerprint(cpus[0]) != machine.fingerprint(cpus[1])
    assert cpus[0] == told()["card"], "one machine is what it is without a launcher"
    unlike = cards.joined([told(0), told(1, title="CPU, 8 cores: Y"), told(2)])
    assert unlike["title"] == "2 nodes of CPU, 2 cores: X + 1 node of CPU, 8 cores: Y"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (told(1, "b") | {"code": "d"}, "rank 1 runs other code than rank 0"),
        (told(1, "b", libraries={"torch": "2.11"}), "rank 1 has torch 2.11, rank 0 has 2.13"),
        (told(1), "rank 1 has no GPU"),
        (told(0, "a"), "ranks 0 and 1 would share one GPU"),
    ],
)
def test_what_the_machines_must_agree_on(second, words):
    with pytest.raises(ParamsError, match=words):
        cards.joined([told(0, "a"), second])


def test_a_jobs_hardware_has_a_process_a_rank_and_its_world_size():
    from blockshock_lib import params
    from blockshock_lib.joined import job

    def asked(hardware, card):
        return job._asked("phase1", hardware, {"seed": 1}, card, 4, params.PARAMS)

    settings = {"seed": 1, "hardware.world_size": 4}
    assert asked("auto", {"gpus": []}) == {"hardware": "cpu", "settings": settings}
    assert asked("auto", {"gpus": [{}]}) == {"hardware": "cuda", "settings": settings}
    with pytest.raises(ParamsError, match="cuda-1 plays all ranks in one process, 4 were started"):
        asked("cuda-1", {"gpus": [{}]})


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def supervisors(tmp_path, *arguments, **variables):
    """Two supervisors as srun would start them on two machines; and what each of them has said so far."""
    port, both = free_port(), []
    for rank in range(2):
        scratch = tmp_path / f"scratch{rank}"
        scratch.mkdir()
        env = os.environ | SLURM | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TMPDIR": str(scratch),
            custodian.SCRATCH: str(scratch),
        }
        command = [sys.executable, "-m", "tests.faults.supervisor", str(tmp_path / str(rank)), *arguments]
        with open(tmp_path / f"out{rank}", "w") as out:
            both.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT))

    def said(rank):
        lines = (tmp_path / f"out{rank}").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    try:
        yield both, said
    finally:
        for process in both:
            process.kill()
            process.wait()
        for rank in range(2):
            custodian.sweep(tmp_path / f"scratch{rank}")


def output(tmp_path):
    return "\n".join(f"--- {rank}\n{(tmp_path / f'out{rank}').read_text()}" for rank in range(2))


def test_faults_on_one_machine_are_known_to_all_and_the_next_case_is_measured(tmp_path):
    faults = ["", "", "raise", "kill", "hang", ""]
    with supervisors(tmp_path, "4", "10", *faults) as (both, said):
        assert [process.wait(120) for process in both] == [0, 0], output(tmp_path)
    lines = [said(0), said(1)]
    for rank in range(2):
        assert lines[rank][0] == {"rank": rank, "heard": "x", "time": lines[rank][0]["time"]}
        events = [(line["done"], line["status"]) for line in lines[rank] if "status" in line]
        ends = ["ok", "ok", "failed", "failed", "timeout", "ok"]
        assert events == [step for i, end in enumerate(ends) for step in ((i, "running"), (i + 1, end))]
    assert not (tmp_path / "1" / "records").exists()

    frame = records.load(tmp_path / "0", strict=True)
    assert sorted(set(frame.case)) == [f"{i:0>12}" for i in range(6)]
    reasons = frame[frame.status != "ok"].groupby("case").reason.unique().map(list).to_dict()
    assert reasons == {
        "000000000002": ["rank 1: ValueError: planted"],
        "000000000003": ["rank 1: SIGKILL: the process was ended by SIGKILL, as the system does when memory runs out"],
        "000000000004": ["no answer from all ranks within 4 s"],
    }
    pids = frame[frame.metric == "flops"].set_index("case").value
    assert pids["000000000000"] == pids["000000000001"] != pids["000000000005"]

    log = (tmp_path / "1" / "logs" / "rank1.log").read_text()
    for fault, case in (("raise", "case 2"), ("kill", "case 3"), ("hang", "case 4")):
        at = float(re.search(rf"{fault} at ([\d.]+)", log)[1]) + (4 if fault == "hang" else 0)
        for rank in range(2):
            (end,) = [line["time"] for line in lines[rank] if line.get("case") == case and line["status"] != "running"]
            assert end - at < 2, f"{fault}: rank {rank} knew it after {end - at:.2f} s"

    for rank in range(2):
        *_, ranks, hung = lines[rank]
        assert ranks["ranks"] == [[0, 2, "x"], [1, 2, "x"]]
        assert "in hangs_in_python" in hung["stacks"]["1"] and "recv_bytes" in hung["stacks"]["0"]
        assert not hung["alive"]
        assert not list((tmp_path / f"scratch{rank}").glob("blockshock-*"))


def kill_second(both):
    both[1].send_signal(signal.SIGKILL)


def interrupt_second(both):
    both[1].send_signal(signal.SIGINT)


def stop_first(both):
    # It serves the store, so the other asks and is never answered: as with a machine that lost its power.
    both[0].send_signal(signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fault", "heard_by", "words", "seconds"),
    [
        (kill_second, 0, r"rank 1 has not been heard of for 4 s.*--resume", 8),
        (interrupt_second, 0, r"rank 1 ended the run: KeyboardInterrupt", 4),
        (stop_first, 1, r"the ranks' store at 127.0.0.1:\d+ does not answer; --resume", 12),
    ],
)
def test_a_lost_supervisor_ends_the_others_in_time_with_its_name(fault, heard_by, words, seconds, tmp_path):
    with supervisors(tmp_path, "600", "4", "", "hang") as (both, said):
        assert wait_for(lambda: all(len(said(rank)) >= 4 for rank in range(2)), 60), output(tmp_path)
        time.sleep(0.3)
        fault(both)
        heard = wait_for(lambda: re.search(words, (tmp_path / f"out{heard_by}").read_text()), seconds)
        assert heard, output(tmp_path)
        assert both[heard_by].wait(30) != 0
        scratch = tmp_path / f"scratch{heard_by}"
        assert wait_for(lambda: not custodian.started_under(scratch), 1)
    assert not list(scratch.glob("blockshock-*"))


def test_two_torchrun_nodes_make_one_run(outputs, tmp_path):
    port, both = free_port(), []
    command = ["run", "phase0", "--out", str(outputs), "--set", "sweep.n=[128]", "--set", "timing.groups=1"]
    command += ["--set", "sweep.masks=['checkerboard']", "--set", "sweep.workloads=['gaussian']"]
    for node in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        launcher += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        env = os.environ | {"TMPDIR": str(tmp_path)}
        with open(tmp_path / f"out{node}", "w") as out:
            both.append(
                subprocess.Popen(
                    [*launcher, "-m", "blockshock_lib", *command],
                    cwd=ROOT,
                    env=env,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        assert [process.wait(150) for process in both] == [0, 0], output(tmp_path)
    finally:
        for process in both:
            process.kill()
            process.wait()
    (folder,) = [path.parent for path in outputs.glob("*/*/manifest.json")]
    noted = manifest.read(folder)
    assert noted["status"] == "completed" and noted["params"]["hardware"]["world_size"] == 2
    assert noted["machine"]["title"].startswith("2 nodes of CPU") and noted["redrawn_from"] == ""
    frame = records.load(folder, strict=True)
    assert set(frame.world_size) == {2} and set(frame[frame.metric == "check"].status) <= {"ok", "unsupported"}
    (record,) = [records.read(path) for path in (folder / "records").glob("*.json")]
    assert record["context"]["code"]["sources"] == noted["code"]["sources"]

    assert (folder / "logs" / "rank0.log").exists() and (folder / "logs" / "rank1.log").exists()
    notebook = json.loads((folder / "phase0_correctness.ipynb").read_text())
    text = json.dumps([cell.get("outputs") for cell in notebook["cells"]])
    assert "phase0: PASS" in text and "2 nodes of CPU" in text
    assert (folder / "phase0_correctness.html").exists()
    assert "phase0: PASS" in (tmp_path / "out0").read_text() and "PASS" not in (tmp_path / "out1").read_text()
    assert not list(tmp_path.glob("blockshock-*"))
