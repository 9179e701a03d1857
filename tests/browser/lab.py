"""JupyterLab on a copy of the notebooks, as `make lab` starts it, for the time of a test."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60


@contextlib.contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """The URL of a server, token included, whose notebooks, settings and outputs all lie in `folder`."""
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    own = {
        name: str(folder / name.lower()) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")
    }
    own |= {name: str(folder / name.lower()) for name in ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")}
    own |= {"BLOCKSHOCK_OUTPUTS": str(folder / "outputs"), "CUDA_VISIBLE_DEVICES": ""}
    # No question about news, which would lie over the page.
    settings = Path(own["JUPYTERLAB_SETTINGS_DIR"], "@jupyterlab", "apputils-extension")
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    asked = ["--ip=127.0.0.1", "--port=0", "--no-browser", "--allow-root", f"--notebook-dir={folder / 'notebooks'}"]
    command = [sys.executable, "-m", "jupyterlab", *asked]
    with open(folder / "lab.log", "w") as log:
        server = subprocess.Popen(
            command, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield _url(server, folder / "lab.log")
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _url(server: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab\?token=\w+", log.read_text()):
            return found[0]
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")
