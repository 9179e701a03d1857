"""Make the virtual environment of a host without internet: PYTHON -m tools.offline FOLDER_OF_WHEELS VENV

Run by the host's own interpreter, the one that imports torch. It installs what `tools.wheelhouse` gathered, all of it
and nothing else, over the packages that the host has; no index is asked. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import site
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Ruff reads source text, which is the same on every machine: lint where the internet is. It is 11 MB.
NOT_OFFLINE = ("ruff",)
MADE_OFFLINE = ".offline"  # in the virtual environment: `make lint` asks for it


class OfflineError(Exception):
    """The environment could not be made; one clear sentence."""


def requirements(project: Path) -> list[str]:
    """What a GPU host needs to run, test and look at this project: its dependencies and the extras, but NOT_OFFLINE."""
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"]
    wanted = [*declared["dependencies"], *extras.get("workbook", ()), *extras["dev"], *extras.get("cuda", ())]
    return [one for one in wanted if re.match(r"[\w.-]+", one)[0] not in NOT_OFFLINE]


def show_host(venv: Path) -> None:
    """Let `venv` see this interpreter's packages where this is itself a virtual environment.

    `venv --system-site-packages` looks past it, to the interpreter that it was made from.
    """
    if sys.prefix == sys.base_prefix:
        return
    place = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    # addsitedir, and not the bare path, so that the .pth files of the host's packages count too.
    lines = [f"import site; site.addsitedir({folder!r})" for folder in site.getsitepackages()]
    (Path(place) / "host-packages.pth").write_text("\n".join(lines) + "\n")


def make(wheels: Path, venv: Path, project: Path = ROOT) -> None:
    """Make `venv` of the wheels in a folder and this interpreter's packages.

    Raises:
        OfflineError: no wheels there, no torch here, or something is in neither.
    """
    # The wheelhouse keeps a folder for each Python.
    own = wheels / f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels = own if own.is_dir() else wheels
    if not list(wheels.glob("*.whl")):
        raise OfflineError(f"{wheels} holds no wheels: fill it where there is internet, by make wheelhouse")
    if importlib.util.find_spec("torch") is None:
        raise OfflineError(f"{sys.executable} has no torch: install PyTorch first, or name its interpreter as PYTHON")
    _run(sys.executable, "-m", "venv", "--clear", "--system-site-packages", venv)
    show_host(venv)
    install(wheels, venv, project)
    (venv / MADE_OFFLINE).touch()


def install(wheels: Path, venv: Path, project: Path) -> None:
    """Install all the wheels of a folder, and the project, into `venv`; OfflineError when something is missing then."""
    pip = (venv / "bin" / "python", "-m", "pip", "--isolated", "install", "--quiet", "--no-index")
    # Not left to the resolver: it would leave out what the host has too, such as JupyterLab, whose files have their
    # place in this environment.
    _run(*pip, "--no-deps", "--ignore-installed", *sorted(wheels.glob("*.whl")))
    # Looks whether all that the project requires is there now.
    _run(*pip, "--find-links", wheels, "--no-build-isolation", "--editable", project, *requirements(project))


def _run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        told = [line for line in (done.stderr or done.stdout).splitlines() if not line.startswith("WARNING")]
        hint = "gather the wheels again, with HAVE= a new `python -m pip freeze` of this host"
        raise OfflineError("\n".join([f"{' '.join(map(str, command[:4]))} failed:", *told, hint]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("venv", type=Path)
    args = parser.parse_args(argv)
    try:
        make(args.wheels, args.venv)
    except OfflineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
