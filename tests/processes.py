"""The command in a process of its own, and which processes live: what the tests of groups and runs ask."""

import contextlib
import os
import subprocess
import sys
import time

import psutil

from blockshock_lib.files import ROOT
from blockshock_lib.ranks import WorkerGroup


def call(fn, *args, processes=2, seconds=60, **options):
    """What `fn(ctx, *args)` gives on every rank of a group of its own."""
    with WorkerGroup(processes, **options) as group:
        return group.call(fn, *args, seconds=seconds)


def pids_of(group):
    return [process.pid for process in group._processes.values()]


def living(pids):
    """Which of the processes still run; a zombie that nobody has collected counts too."""
    return [pid for pid in pids if psutil.pid_exists(pid)]


def running(pids):
    """Which of them run; orphans are collected by whoever adopts them, so a zombie holds nothing any more."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
    return found


def wait_for(condition, seconds=120):
    """What `condition()` gives once it is true, or at the end of a time that is long enough on a loaded machine too."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def python(*words, cwd=ROOT, **env):
    """A program of this interpreter that finds the library, at its end; what it said as text."""
    env, line = os.environ | {"PYTHONPATH": str(ROOT)} | env, [sys.executable, *map(str, words)]
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)


def command(env, *args):
    line = [sys.executable, "-m", "blockshock_lib", "run", "phase0", *map(str, args)]
    quiet = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(line, cwd=ROOT, env=env, **quiet)


def flags(settings):
    return ["--hardware", "cpu", *(part for k, v in settings.items() for part in ("--set", f"{k}={v}"))]
