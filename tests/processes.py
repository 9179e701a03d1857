"""Which processes live: what the tests of groups and runs ask."""

import os
import time
from pathlib import Path


def living(pids):
    """Which of the processes still run; a zombie that nobody has collected counts too."""
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
            found.append(pid)
        except ProcessLookupError:
            pass
    return found


def running(pids):
    """Which of them run; orphans are collected by whoever adopts them, so a zombie holds nothing any more."""

    def zombie(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return not living([pid])

    return [pid for pid in living(pids) if not zombie(pid)]


def wait_for(condition, seconds):
    """What `condition()` gives once it is true, or at the end of the time."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found
