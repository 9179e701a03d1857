"""JupyterLab as `make lab` starts it: this machine only, and no request is answered without the token."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
URL = re.compile(r"http://127\.0\.0\.1:(\d+)/lab\?token=(\w+)")


@pytest.fixture
def lab(tmp_path):
    """(make's process, port, token) of a JupyterLab that is up; nothing of it is left afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A token or a password that this computer's user has set must not decide, nor an outer make.
    drop = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "JUPYTER_TOKEN", "JUPYTER_CONFIG_PATH")
    env = {key: value for key, value in os.environ.items() if key not in drop}
    env |= {f"JUPYTER_{kind}_DIR": str(tmp_path / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "s"), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "w")}
    ready = ROOT / ".venv" / ".ready"
    # Only `lab` itself: a file newer than the environment would have it made again.
    command = ["make", "lab", f"--assume-old={ready.relative_to(ROOT)}", f"ARGS=--no-browser --port={port}"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)
    try:
        token = _wait_for_token(process, port)
        yield process, port, token
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _wait_for_token(process, port):
    said, end = "", time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([process.stdout], [], [], 0.2)[0]:
            part = os.read(process.stdout.fileno(), 65536).decode(errors="replace")
            assert part, f"make lab ended:\n{said}"
            said += part
        if (found := URL.search(said)) and int(found[1]) == port:
            return found[2]
    raise AssertionError(f"no address within 60 s:\n{said}")


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nothing: a page that is refused sends a browser to the login, which is there for all."""

    def redirect_request(self, *_):
        return None


def status(port, path, token=""):
    headers = {"Authorization": f"token {token}"} if token else {}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.build_opener(_Stay).open(asked, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def addresses(port):
    """Where this port is listened on, as the system says: on every process's behalf."""
    found = psutil.net_connections(kind="inet")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def test_jupyterlab_from_make_lab(lab):
    process, port, token = lab
    # The address is printed before it is listened on.
    end = time.monotonic() + 30
    while not (found := addresses(port)) and time.monotonic() < end:
        time.sleep(0.1)
    assert found == {"127.0.0.1"}
    assert len(token) >= 32
    for wrong in ("", "0" * len(token)):
        for path in ("/api/contents", "/api/kernels", "/api/terminals"):
            assert status(port, path, wrong)[0] == 403, path
        # For a browser: to the login, and not a byte of the notebook.
        code, answer = status(port, "/files/phase0_correctness.ipynb", wrong)
        assert code == 302 and b"cells" not in answer
    code, answer = status(port, "/api/contents", token)
    assert code == 200
    assert {"phase0_correctness.ipynb", "phase1_forward.ipynb"} <= {
        one["name"] for one in json.loads(answer)["content"]
    }
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(10)
    end = time.monotonic() + 5
    while (left := addresses(port)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
