"""Whether this process is a rank of a job on several machines, as torchrun and SLURM tell it: no torch, no network."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from blockshock_lib.errors import LaunchError

MAX_HOSTS = 65536  # more than any machine has: a mistyped range must not fill the memory


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job.

    Attributes:
        rank, size: 0 .. size - 1, and how many there are; size is 2 or more.
        local: this rank's number on its machine.
        node: number of its machine.
        host, port: where the store is served in which the ranks meet.
        serves: whether this process serves it; False where torchrun's agent or another rank does.
        job: what tells this start of this job from any other.
    """

    rank: int
    size: int
    local: int
    node: int
    host: str
    port: int
    serves: bool
    job: str


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place; None for an ordinary process, and where the job has one rank only.

    Read are the variables of torchrun (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT), else
    those of a SLURM step. A batch script itself is no step, so it is an ordinary process.

    Raises:
        LaunchError: the variables are there, but one of them is missing or no number.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _of_torchrun(environment)
    if {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"} <= environment.keys():
        return _of_slurm(environment)
    return None


def hosts(text: str) -> list[str]:
    """The hosts that SLURM's short form names: "gpu[01-03,07],login" -> gpu01, gpu02, gpu03, gpu07, login.

    Raises:
        LaunchError: it is no such list.
    """
    found: list[str] = []
    for one in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|.", text.strip()):
        if one == ",":
            continue
        names = [""]
        for plain, inside in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", one):
            names = [name + end for name in names for end in ([plain] if plain else _numbers(inside, text))]
        if one in "[]" or len(found) + len(names) > MAX_HOSTS:
            raise LaunchError(f"{text!r} is no list of hosts as SLURM writes it, for example gpu[01-04,07]")
        found += names
    return found


def _numbers(inside: str, text: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < int(first) + MAX_HOSTS):
            raise LaunchError(f"{text!r} is no list of hosts as SLURM writes it, for example gpu[01-04,07]")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _of_torchrun(environment: Mapping[str, str]) -> Place | None:
    rank, size = _whole("RANK", environment), _whole("WORLD_SIZE", environment)
    if size < 2:
        return None
    if "MASTER_ADDR" not in environment:
        raise LaunchError("RANK and WORLD_SIZE are set but MASTER_ADDR is not: start the ranks with torchrun")
    job = [environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    return _checked(
        Place(
            rank,
            size,
            _whole("LOCAL_RANK", environment, 0),
            _whole("GROUP_RANK", environment, rank),
            environment["MASTER_ADDR"],
            _whole("MASTER_PORT", environment),
            rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            "torchrun-" + "-".join(job),
        )
    )


def _of_slurm(environment: Mapping[str, str]) -> Place | None:
    size = _whole("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS", environment)
    if size < 2:
        return None
    rank, step = _whole("SLURM_PROCID", environment), _whole("SLURM_STEP_ID", environment)
    number = _whole("SLURM_JOB_ID", environment, 0)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    host = environment.get("MASTER_ADDR") or next(iter(hosts(nodes)), "")
    if not host:
        raise LaunchError("neither MASTER_ADDR nor SLURM_STEP_NODELIST says where the ranks meet: start them with srun")
    # Below the ports that systems hand out, and other for each step of a job.
    port = _whole("MASTER_PORT", environment, 15000 + (number + 127 * step) % 15000)
    job = f"slurm-{number}-{step}-{environment.get('SLURM_RESTART_COUNT', '0')}"
    local, node = _whole("SLURM_LOCALID", environment, 0), _whole("SLURM_NODEID", environment, rank)
    return _checked(Place(rank, size, local, node, host, port, rank == 0, job))


def _checked(found: Place) -> Place:
    if not 0 <= found.rank < found.size:
        raise LaunchError(f"this process is said to be rank {found.rank} of {found.size}; ranks count from 0")
    return found


def _whole(name: str, environment: Mapping[str, str], default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise LaunchError(
            f"the environment variable {name} is {text!r}, not a number: start the ranks with one launcher"
        )
    return int(text)
