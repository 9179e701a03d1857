"""JupyterLab as `make lab` starts it: this machine only, and no request is answered without the token."""

import os
import re
import signal

import psutil
import pytest
import requests

from tests.browser.lab import jupyterlab
from tests.processes import wait_for
from tests.ranks.test_torchrun import free_port


def get(port, path, token=""):
    headers = {"Authorization": f"token {token}"} if token else {}
    return requests.get(f"http://127.0.0.1:{port}{path}", headers=headers, allow_redirects=False, timeout=300)


def addresses(port):
    """Where this port is listened on, as the system says: on every process's behalf."""
    found = psutil.net_connections(kind="inet")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


@pytest.mark.long
def test_jupyterlab_from_make_lab(tmp_path):
    port = free_port()
    # Only `lab` itself: a file newer than the environment would have it made again.
    command = ["make", "lab", "--assume-old=.venv/.ready", f"ARGS=--no-browser --port={port}"]
    with jupyterlab(tmp_path, *command) as (process, url):
        given, token = re.search(r":(\d+)/lab\?token=(\w+)", url).groups()
        # The address is printed before it is listened on.
        # Jupyter takes one near it where another program was quicker.
        assert abs(int(given) - port) <= 102 and len(token) >= 32
        port = int(given)
        assert wait_for(lambda: addresses(port)) == {"127.0.0.1"}
        for wrong in ("", "0" * len(token)):
            for path in ("/api/contents", "/api/kernels", "/api/terminals"):
                assert get(port, path, wrong).status_code == 403, path
            # For a browser: to the login, and not a byte of the notebook.
            answer = get(port, "/files/phase0_correctness.ipynb", wrong)
            assert answer.status_code == 302 and b"cells" not in answer.content
        # What it opens and saves are copies; and it asks nothing about news.
        assert {path.name for path in (tmp_path / "outputs" / "lab").iterdir()} >= {"explore.ipynb", "findings.ipynb"}
        asked = get(port, "/lab/api/settings/@jupyterlab/apputils-extension:notification", token).json()
        assert asked["schema"]["properties"]["fetchNews"]["default"] == "false"
        answer = get(port, "/api/contents", token)
        assert answer.status_code == 200
        assert {"phase0_correctness.ipynb", "phase1_forward.ipynb"} <= {one["name"] for one in answer.json()["content"]}
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(120)
        assert wait_for(lambda: not addresses(port))
