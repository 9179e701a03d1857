"""A child that searches without a GPU: `python -m tests.sparse24.faulty_tuner <faults> <log> <parent> <device>`.

The process, its messages and the search's logic are the real ones. Checks and times are made up: the higher the
algorithm, the faster; the small-batch kernel's config of depth d is named "small d", and slower than any algorithm.
`faults` (JSON) maps an algorithm, a config or "mm_search" to what happens to the process that tries it, and "idle" or
"alarm" to other limits in seconds. The log gets a line "<process id> <name>" for each check.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time

from blockshock_lib.sparse24 import tuner, tuning
from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import BrokenContextError, Error, Found, Setting

FAULTS, LOG = json.loads(sys.argv[1]), sys.argv[2]
ALGORITHMS = 8
CONFIGS = [Config(1, 1, 1, depth, 1) for depth in (3, 4)]


def name(way):
    return f"small {way.depth}" if isinstance(way, Config) else str(way.alg_id)


def meet(step):
    with open(LOG, "a") as log:
        log.write(f"{os.getpid()} {step}\n")
    match FAULTS.get(str(step)):
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


def search(shape, rows, dtype, device, *, seconds, known, without, started, ended):
    library = None
    if "mm_search" not in without:
        started("mm_search")
        meet("mm_search")
        library = Setting(2)

    def check(way):
        meet(name(way))
        return Error(40.0, 9.0) if FAULTS.get(name(way)) == "wrong" else Error(1.0, 1.0)

    trials = tuning.search(
        [*CONFIGS, *(Setting(i) for i in range(ALGORITHMS))],
        check,
        lambda way, samples: 20.0 - way.depth if isinstance(way, Config) else 10.0 - way.alg_id,
        finalists=1,
        seconds=seconds,
        known=known,
        started=started,
        ended=ended,
    )
    return Found(tuple(trials), library)


if __name__ == "__main__":
    tuner.IDLE_SECONDS = FAULTS.get("idle", tuner.IDLE_SECONDS)
    tuner.ALARM_SECONDS = FAULTS.get("alarm", tuner.ALARM_SECONDS)
    tuner.main(search)
