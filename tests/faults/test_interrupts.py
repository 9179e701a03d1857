"""Interrupted in the notebook, kernel killed, parent killed: nothing is left after 2 s, and the manifest says so."""

import json
import os
import re
import signal

import pytest
from jupyter_client import KernelManager

from blockshock_lib import manifest, workbook
from tests.faults.killed import LONG, Traces, command, flags, private, until

OPEN = f"""
import os
from pathlib import Path
from blockshock_lib import workbook
run = workbook.open_run("phase0", hardware="cpu", settings={LONG!r}, out=Path(os.environ["TMPDIR"]).parent / "out")
"""


@pytest.fixture
def kernel(tmp_path):
    """A bare kernel, as JupyterLab has it: started by no command of ours."""
    manager = KernelManager(kernel_name="python3", connection_file=str(tmp_path / "kernel.json"))
    manager.start_kernel(env=private(tmp_path), cwd=str(workbook.ROOT), extra_arguments=["--log-level=40"])
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(60)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        Traces(tmp_path).end()


def run_cell(client, source):
    """The cell's reply and all text that it put out."""
    said = []
    reply = client.execute_interactive(source, timeout=60, output_hook=lambda m: said.append(json.dumps(m["content"])))
    return reply["content"], "".join(said)


def test_interrupt_in_the_notebook(kernel, tmp_path):
    manager, client = kernel
    traces = Traces(tmp_path, spared=manager.provisioner.pid)
    assert run_cell(client, OPEN)[0]["status"] == "ok"
    # What follows a failed request may be aborted with it, unless asked not to.
    asked = client.execute("run.measure()", stop_on_error=False)
    traces.wait_for_work()
    manager.interrupt_kernel()
    assert until(traces.gone), (traces.left(), traces.status)
    reply = client.get_shell_msg(timeout=10)
    while reply["parent_header"]["msg_id"] != asked:
        reply = client.get_shell_msg(timeout=10)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert len(reply["content"]["traceback"]) < 6, "what waits for the ranks is no news"
    noted = manifest.read(traces.folder)
    assert noted["reason"] == "interrupted by the user" and noted["ended"]

    done = len(list(traces.folder.glob("records/*.json")))
    reply, said = run_cell(client, "print(run.conclude())")
    assert reply["status"] == "ok" and f"{70 - done} of 70 records damaged or missing" in said
    assert traces.status == "interrupted", "the cells that come after do not make it a completed run"


@pytest.mark.parametrize("where", ["by a command", "in JupyterLab"])
def test_killed_kernel(where, tmp_path, request):
    if where == "in JupyterLab":
        manager, client = request.getfixturevalue("kernel")
        traces = Traces(tmp_path)
        client.execute(OPEN + "run.measure()")
        traces.wait_for_work()
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        assert until(traces.gone), (traces.left(), traces.status)
        return
    traces = Traces(tmp_path)
    with command(private(tmp_path), *flags(LONG), "--out", traces.out) as process:
        try:
            traces.spared = process.pid
            traces.wait_for_work()
            (pid,) = (p.pid for p, what in traces.processes().items() if "ipykernel_launcher" in what)
            os.kill(pid, signal.SIGKILL)
            # The command lives on to say so, and its custodian with it.
            told = until(lambda: traces.status == "interrupted" and not [x for x in traces.left() if "custod" not in x])
            assert told, (traces.left(), traces.status)
            said = process.communicate(timeout=60)[0]
        finally:
            process.kill()
            traces.end()
    assert process.returncode == 130 and "phase0 interrupted: the notebook's kernel died" in said
    assert not traces.left() and traces.status == "interrupted"


def test_killed_parent(tmp_path):
    traces = Traces(tmp_path)
    with command(private(tmp_path), *flags(LONG), "--out", traces.out) as process:
        try:
            traces.wait_for_work()
            assert len(traces.ports) >= 5, "a kernel listens on five"
            process.kill()
            assert until(traces.gone), (traces.left(), traces.status)
        finally:
            process.kill()
            traces.end()
    noted = manifest.read(traces.folder)
    assert re.search("ended before the run did", noted["reason"]) and noted["verdict"].startswith("phase0 interrupted")


def test_a_parent_that_is_ended_while_its_kernel_starts_leaves_nothing_either(tmp_path):
    traces = Traces(tmp_path)
    with command(private(tmp_path), *flags(LONG), "--out", traces.out) as process:
        try:
            assert until(lambda: list(traces.tmp.rglob("kernel.json")), 60)
            (traces.folder,) = (path.parent for path in traces.out.rglob(manifest.FILE))
            process.send_signal(signal.SIGTERM)
            assert until(traces.gone), (traces.left(), traces.status)
        finally:
            process.kill()
            traces.end()
