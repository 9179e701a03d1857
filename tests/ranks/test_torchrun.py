"""What torchrun and SLURM tell a rank, and how a job with planted faults ends, is named and goes on."""

import socket
import subprocess
import sys

import psutil
import pytest

from blockshock_lib.errors import LaunchError
from blockshock_lib.files import ROOT
from blockshock_lib.ranks.torchrun import job
from blockshock_lib.runs import records
from tests.processes import python, running, wait_for

TORCHRUN = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="10.0.0.1", MASTER_PORT="29400")
TORCHRUN["TORCHELASTIC_RESTART_COUNT"] = "3"
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}


def test_a_rank_knows_its_place():
    found = job(TORCHRUN)
    assert (found.rank, found.size, found.local, found.restarts) == (1, 2, 0, 3)
    assert job(SLURM | TORCHRUN).rank == 1, "srun may start torchrun"
    given = {name: text for name, text in TORCHRUN.items() if name not in ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")}
    assert (job(given).local, job(given).restarts) == (0, 0), "a launcher need not count restarts"


@pytest.mark.parametrize(
    "environment",
    [{}, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, SLURM | {"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "2"}],
    ids=["no launcher", "one rank", "one task", "a batch script is no step"],
)
def test_an_ordinary_process_has_none(environment):
    assert job(environment) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (TORCHRUN | {"RANK": "two"}, "RANK is 'two'"),
        (TORCHRUN | {"RANK": "2"}, "rank 2 of 2"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT is ''"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR=''"),
        (SLURM, "srun has started 2 tasks .* one torchrun on each machine"),
    ],
)
def test_a_broken_environment_is_named(environment, words):
    with pytest.raises(LaunchError, match=words):
        job(environment)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def meeting(folder):
    """torchrun's agents meet in a file: a free port may be taken by the time that they have started."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder / 'meeting'}", "--rdzv-conf=store_type=file"]
    return [*rendezvous, "--rdzv-id=tests", "--local-addr=127.0.0.1"]


def command(tmp_path, *faults, restarts=0):
    """What starts two ranks on one machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    launcher += [*meeting(tmp_path), "--monitor-interval=0.1"]
    return [*launcher, "-m", "tests.faults.torchrun_job", str(tmp_path), *faults]


def torchrun(tmp_path, *faults, restarts=0):
    """How such a job ended, and what torchrun and the ranks said."""
    done = python(*command(tmp_path, *faults, restarts=restarts)[1:])
    return done.returncode, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "named"),
    [("raise", "ValueError: planted"), ("kill", "Signal 9"), ("hang", "DeadlineError: no answer from all ranks")],
)
def test_a_rank_that_fails_ends_the_job_and_torchruns_report_names_it(fault, named, tmp_path):
    code, said = torchrun(tmp_path, "", fault, "")
    report = said[said.rindex("Root Cause") :]
    assert code == 1 and named in report, said
    assert "rank      : 1 " in report, said
    assert "in measure" in said or fault == "kill"
    assert set(records.load(tmp_path, strict=True).case) == {"000000000000"}


@pytest.mark.long
def test_a_restarted_job_gives_up_the_case_that_ended_it_and_measures_the_others(tmp_path):
    code, said = torchrun(tmp_path, "", "raise", "kill", "", restarts=3)
    assert code == 0, said
    frame = records.load(tmp_path, strict=True)
    failed = frame[frame.status != "ok"]
    assert set(frame.case) == {f"{number:0>12}" for number in range(4)}
    assert set(failed.case) == {"000000000001", "000000000002"}
    assert set(failed.reason) == {"the job has ended in this case before; torchrun's report says why"}


@pytest.mark.long
def test_a_killed_torchrun_leaves_no_rank(tmp_path):
    with subprocess.Popen(command(tmp_path, "", "hang"), cwd=ROOT, start_new_session=True) as process:
        assert wait_for(lambda: list(tmp_path.rglob("records/*.json")))
        ranks = [child.pid for child in psutil.Process(process.pid).children()]
        process.kill()
    assert len(ranks) == 2 and wait_for(lambda: not running(ranks))
