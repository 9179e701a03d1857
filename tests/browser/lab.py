"""JupyterLab for the time of a test: as `make lab` starts it, or on a copy of the notebooks."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from blockshock_lib.files import ROOT

START_SECONDS = 300
# A token that this computer's user has set must not decide, nor an outer make.
DROP = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "JUPYTER_TOKEN", "JUPYTER_CONFIG_PATH")
PLACES = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")


@contextlib.contextmanager
def jupyterlab(folder: Path, *command: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The process of this command and the URL of its server, token included, whose settings and outputs all lie in
    `folder`. Nothing of it is left afterwards.
    """
    env = {key: value for key, value in os.environ.items() if key not in DROP}
    env |= {f"JUPYTER_{place}": str(folder / place.lower()) for place in PLACES}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "spaces")}
    env |= {"BLOCKSHOCK_OUTPUTS": str(folder / "outputs"), "CUDA_VISIBLE_DEVICES": ""}
    # No question about news, which would lie over the page.
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    log, pipes = folder / "lab.log", {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, start_new_session=True, **pipes)
    try:
        yield server, _url(server, log)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _url(server: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab\?token=\w+", log.read_text()):
            return found[0]
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")
