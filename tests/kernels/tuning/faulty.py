"""A search on a CPU whose ways misbehave, for test_child.py: the process, its messages and the search's logic are real.

Checks and times are made up: the higher the algorithm, the faster; the other kind's way of depth d is named "small d",
and slower than any algorithm. $FAULTS (JSON) maps an algorithm, a "small d" or "own search" to what happens to the
process that tries it. $FAULTS_LOG gets a line "<process id> <name>" for each check.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from typing import NamedTuple

from blockshock_lib.kernels.tuning.child import Search
from blockshock_lib.kernels.tuning.search import BrokenContextError, Error, search

FAULTS = json.loads(os.environ.get("FAULTS", "{}"))


class Algorithm(NamedTuple):
    number: int


class Small(NamedTuple):
    depth: int


def name(way):
    return f"small {way.depth}" if isinstance(way, Small) else str(way.number)


def meet(step):
    with open(os.environ["FAULTS_LOG"], "a") as log:
        log.write(f"{os.getpid()} {step}\n")
    match FAULTS.get(step):
        case "killed":
            signal.signal(signal.SIGILL, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGILL)
        case "exit":
            os._exit(7)
        case "broken":
            raise BrokenContextError("an illegal instruction was encountered")
        case "bug":
            raise TypeError("a mistake\nof two lines")
        case "hang":
            time.sleep(600)
        case "stuck":
            ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock: no Python thread runs any more
        case "noise":
            print("printed by Python", flush=True)
            os.write(1, b"written by a library\n")
            subprocess.run(["echo", "written by a compiler"], check=True)


def run(problem, device, *, without, started, **options):
    if "own search" not in without:
        started("own search")
        meet("own search")

    def check(way):
        meet(name(way))
        return Error(40.0, 9.0) if FAULTS.get(name(way)) == "wrong" else Error(1.0, 1.0)

    def timed(way):
        return contextlib.nullcontext(lambda: 20.0 - way.depth if isinstance(way, Small) else 10.0 - way.number)

    ways = [Small(3), Small(4), *map(Algorithm, range(problem["algorithms"]))]
    return search(ways, check, timed, finalists=1, started=started, **options)


SEARCH = Search("tests.kernels.tuning.faulty:SEARCH", {"algorithm": Algorithm, "small": Small}, run, 600.0)
