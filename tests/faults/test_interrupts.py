"""Interrupted in the notebook, kernel killed, command killed: nothing runs after 2 s, and every reader says so."""

import contextlib
import json
import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from jupyter_client import KernelManager

from blockshock_lib.files import ROOT
from blockshock_lib.runs import lock, manifest
from tests.processes import command, flags, wait_for

pytestmark = pytest.mark.long
LONG = {"sweep.n": [256, 512, 1024, 2048]}  # 140 cases of phase 0: minutes of work after the first record
SECONDS = 60.0  # at most: what waits goes on as soon as nothing is left

OPEN = f"""
import os
from pathlib import Path
from blockshock_lib.notebook import workbook
run = workbook.open_run("phase0", hardware="cpu", settings={LONG!r}, out=Path(os.environ["TMPDIR"]).parent / "out")
"""


@pytest.fixture
def tmp_path():
    """A short one: the path of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="bs-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def private(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary files, and whose processes, can be told from all others."""
    (tmp_path / "tmp").mkdir()
    ours = {"TMPDIR": str(tmp_path / "tmp"), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "PYTHONPATH": str(ROOT)}
    return os.environ | ours


class Traces:
    """All that a run in a private environment could leave: looked at while it works, and when it should be gone."""

    def __init__(self, tmp_path: Path, spared: int = 0):
        self.tmp, self.out, self.spared = tmp_path / "tmp", tmp_path / "out", spared
        self.folder = None  # once it has written a record

    def wait_for_work(self) -> None:
        assert wait_for(lambda: list(self.out.rglob("records/*.json"))), "no record was written"
        (self.folder,) = (path.parent for path in self.out.rglob(manifest.FILE))
        # A write that was cut short leaves this; the real ones are too quick to be caught.
        (self.folder / "records" / ".cut-0.json.1.tmp").write_text("{")
        # Between one group of ranks and the next there are none for a moment.
        assert wait_for(lambda: len(self.ranks()) == 2), "two ranks"
        assert wait_for(self.scratch), "the ranks meet in a folder of the run's scratch"

    def processes(self) -> dict[psutil.Process, str]:
        """All living ones of the private environment, but for the one to be spared with multiprocessing's two servers,
        which end with it; and what they run."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                what = " ".join(process.cmdline())
                own = process.ppid() == self.spared and ("resource_tracker" in what or "forkserver" in what)
                spared = process.pid == self.spared or own
                if not spared and process.environ().get("TMPDIR") == str(self.tmp):
                    found[process] = what
        return found

    def ranks(self) -> list[psutil.Process]:
        """Forked from multiprocessing's server, each at the head of a process group."""
        forked = [process for process, what in self.processes().items() if "forkserver" in what]
        return [process for process in forked if os.getpgid(process.pid) == process.pid]

    def scratch(self) -> list[Path]:
        return list(self.tmp.glob("blockshock-*"))

    def assert_gone(self) -> dict:
        """Nothing is left in time, and the run is read as interrupted; its manifest."""
        over = wait_for(lambda: not self.processes() and self.status == "interrupted", SECONDS)
        assert over, (self.processes(), self.status)
        return manifest.read(self.folder)

    def assert_swept(self) -> None:
        """The next process that starts finds, and removes, the files of the one that was killed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tempfile.tempdir", str(self.tmp))
            lock.sweep_stale()
        lock.hold(self.folder)
        lock.release(self.folder)
        assert not self.scratch() and not list(self.folder.rglob(".*.tmp"))

    @property
    def status(self) -> str:
        return manifest.read(self.folder)["status"]

    def end(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def kernel(tmp_path):
    """A bare kernel, as JupyterLab has it: started by no command of ours."""
    manager = KernelManager(kernel_name="python3", connection_file=str(tmp_path / "kernel.json"))
    manager.start_kernel(env=private(tmp_path), cwd=str(ROOT), extra_arguments=["--log-level=40"])
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(300)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        Traces(tmp_path).end()


@contextlib.contextmanager
def running_command(tmp_path):
    """A command that executes the notebook, and the traces of what it starts."""
    traces = Traces(tmp_path)
    with command(private(tmp_path), *flags(LONG), "--out", traces.out) as process:
        try:
            yield process, traces
        finally:
            process.kill()
            traces.end()


def run_cell(client, source):
    """All text that the cell put out."""
    said = []
    reply = client.execute_interactive(source, timeout=600, output_hook=lambda m: said.append(json.dumps(m["content"])))
    assert reply["content"]["status"] == "ok" and '"name": "stderr"' not in "".join(said), said  # which Lab shows red
    return "".join(said)


def test_interrupt_in_the_notebook(kernel, tmp_path):
    manager, client = kernel
    traces = Traces(tmp_path, spared=manager.provisioner.pid)
    run_cell(client, OPEN)
    # What follows a failed request may be aborted with it, unless asked not to.
    asked = client.execute("run.measure()", stop_on_error=False)
    traces.wait_for_work()
    manager.interrupt_kernel()
    noted = traces.assert_gone()
    assert noted["reason"] == "interrupted by the user" and noted["ended"]
    assert wait_for(lambda: not traces.scratch() and not list(traces.folder.rglob(".*.tmp")), SECONDS)
    reply = client.get_shell_msg(timeout=120)
    while reply["parent_header"]["msg_id"] != asked:
        reply = client.get_shell_msg(timeout=120)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert len(reply["content"]["traceback"]) < 6, "what waits for the ranks is no news"

    done = len(list(traces.folder.glob("records/*.json")))
    said = run_cell(client, "print(run.conclude())")
    assert f"{140 - done} of 140 records not measured" in said
    assert traces.status == "interrupted", "the cells that come after do not make it a completed run"


def test_killed_kernel_in_jupyterlab(kernel, tmp_path):
    manager, client = kernel
    traces = Traces(tmp_path)
    client.execute(OPEN + "run.measure()")
    traces.wait_for_work()
    os.kill(manager.provisioner.pid, signal.SIGKILL)
    traces.assert_gone()
    traces.assert_swept()


def test_killed_kernel_of_a_command(tmp_path):
    with running_command(tmp_path) as (process, traces):
        traces.wait_for_work()
        (pid,) = (p.pid for p, what in traces.processes().items() if "ipykernel_launcher" in what)
        traces.spared = process.pid
        os.kill(pid, signal.SIGKILL)
        traces.assert_gone()  # the command lives on to say so
        said = process.communicate(timeout=600)[0]
    assert process.returncode == 130 and "phase0 interrupted: the notebook's kernel died" in said
    assert not traces.processes() and not traces.scratch() and traces.status == "interrupted"


def test_ctrl_c_of_a_command(tmp_path):
    with running_command(tmp_path) as (process, traces):
        traces.wait_for_work()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=600)[0]
        noted = traces.assert_gone()
    assert process.returncode == 130 and "phase0 interrupted: interrupted by the user" in said and noted["ended"]


@pytest.mark.parametrize("beside", ["nothing", "kernel", "everything"])
def test_killed_command(tmp_path, beside):
    with running_command(tmp_path) as (process, traces):
        traces.wait_for_work()
        family = traces.processes() if beside != "nothing" else {}
        for child, what in family.items():
            if beside == "everything" or "ipykernel_launcher" in what:
                os.kill(child.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        noted = traces.assert_gone()
    assert noted["verdict"] == "phase0 interrupted: the process that ran it ended before the run did"
    traces.assert_swept()


def test_a_command_that_is_ended_while_its_kernel_starts_leaves_no_process_either(tmp_path):
    with running_command(tmp_path) as (process, traces):
        assert wait_for(lambda: list(traces.tmp.rglob("kernel.json")))
        (traces.folder,) = (path.parent for path in traces.out.rglob(manifest.FILE))
        process.send_signal(signal.SIGTERM)
        process.wait()
        traces.assert_gone()
    traces.assert_swept()
