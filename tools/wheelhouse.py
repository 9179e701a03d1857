"""Gather the wheels that a host without internet lacks: python -m tools.wheelhouse --python 3.12

pip resolves the project's requirements for the host's Python. What the host has is shown to the resolver as stub wheels
of the host's versions, with nothing inside and no dependencies, so that every other choice is checked against them.
PyTorch is always the host's own, with its CUDA libraries: gigabytes that belong to a driver, not to this project.
"""

from __future__ import annotations

import argparse
import email
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

try:
    from packaging.markers import default_environment
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name, parse_wheel_filename
    from packaging.version import InvalidVersion, Version
except ImportError:  # a bare Python: pip brings its own copy
    from pip._vendor.packaging.markers import default_environment
    from pip._vendor.packaging.requirements import InvalidRequirement, Requirement
    from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename
    from pip._vendor.packaging.version import InvalidVersion, Version

from tools.offline import ROOT, requirements

# Not gathered, but looked for: PyTorch imports them, and a host may have been given its wheel alone.
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
# PyTorch 2.11 refuses setuptools from 82 on.
SETUPTOOLS = "setuptools<82"
# Gathered even where the host has them: these put files beside site-packages (bin/, share/jupyter, etc/jupyter), which
# Jupyter and the Makefile look for in the project's own virtual environment.
IN_PLACE = {
    *("ipykernel", "jupyter-core", "jupyter-lsp", "jupyter-server-terminals", "jupyterlab", "jupyterlab-pygments"),
    *("jupyterlab-widgets", "nbconvert", "notebook-shim", "widgetsnbextension"),
    "setuptools",  # a new virtual environment of Python 3.11 has one of its own, too old, before the host's
}
# A stub has a local version of its own, so that the resolver cannot take the real wheel of that version for it.
MARK = "host"


class WheelhouseError(Exception):
    """The wheels could not be gathered; one clear sentence."""


def python_version(text: str) -> str:
    """ "3.12.4", or an interpreter that is here -> "3.12.4"; a bare "3.12" or "python3.12" -> "3.12.99".

    Wheels may ask for a patch release, and pip takes 3.12 for 3.12.0: the newest one is the better guess.

    Raises:
        WheelhouseError: neither a version nor an interpreter.
    """
    script = "import platform; print(platform.python_version())"
    named = re.fullmatch(r"(?:.*/)?(?:python)?(\d+\.\d+)(\.\d+)?", text)
    if named and (named[2] or not shutil.which(text)):
        return f"{named[1]}{named[2] or '.99'}"
    try:
        return subprocess.run([text, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        if named:
            return f"{named[1]}.99"
        raise WheelhouseError(f"PYTHON={text}: neither a version, as in 3.12, nor an interpreter here") from None


def frozen(text: str) -> tuple[dict[str, Version], list[str]]:
    """What `pip freeze` printed -> name -> version, and the lines that name no version: those count as not there."""
    have, unknown = {}, []
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*|\s--hash=.*", "", line).strip().rstrip("\\").strip()
        if not line or line.startswith("--") or re.match(r"-[^e]", line):
            continue
        try:
            wanted = Requirement(line)
            pins = [one.version for one in wanted.specifier if one.operator in ("==", "===")]
            if wanted.url and (name := wanted.url.split("#")[0].rsplit("/", 1)[-1]).endswith(".whl"):
                pins = [str(parse_wheel_filename(name.replace("%2B", "+"))[1])]
            have[canonicalize_name(wanted.name)] = Version(pins[0])
        except (InvalidRequirement, InvalidVersion, IndexError, ValueError):
            unknown.append(line)
    return have, unknown


def minor(python: str) -> str:
    """ "3.12.4" -> "3.12"."""
    return ".".join(python.split(".")[:2])


def platforms(machine: str, glibc: str) -> list[str]:
    """The wheel tags that a Linux with this glibc takes: manylinux_2_5 up to its own version, and the old names."""
    major, newest = map(int, glibc.split("."))
    old = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    tags = []
    for version in range(newest, 4, -1):
        tags += [f"manylinux_{major}_{version}_{machine}", *([f"{old[version]}_{machine}"] if version in old else [])]
    return [*tags, f"linux_{machine}"]


def markers(python: str, machine: str) -> dict[str, str]:
    """The environment that a requirement's marker is true or false in: the host's, not this machine's."""
    facts = {"python_version": minor(python), "python_full_version": python, "implementation_version": python}
    facts |= {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux", "platform_machine": machine}
    facts |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return default_environment() | facts


def stub(folder: Path, name: str, version: Version) -> str:
    """Write a wheel that holds a name and a version; return the pin that selects it."""
    marked = f"{version}.{MARK}" if version.local else f"{version}+{MARK}"
    stem = f"{name.replace('-', '_')}-{marked}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {marked}\n")
        tags = "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{stem}.dist-info/WHEEL", tags)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{name}=={marked}"


@dataclass(frozen=True)
class Wheel:
    """A wheel that pip chose, and what its metadata says."""

    path: Path
    requires: list[str]

    @classmethod
    def read(cls, path: Path) -> Wheel:
        with zipfile.ZipFile(path) as wheel:
            (name,) = (n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            said = email.message_from_bytes(wheel.read(name))
        return cls(path, said.get_all("Requires-Dist", []))


class Resolver:
    """pip, asked for the wheels of another Python and machine.

    Args:
        place: an empty folder, where the wheels of the last choice are kept.
        index: options of pip's, such as --no-index.
    """

    def __init__(self, python: str, machine: str, glibc: str, place: Path, index: Iterable[str] = ()):
        self.place, self.index = place, [*index]
        self.env = markers(python, machine)
        self.target = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
        self.target += [part for tag in platforms(machine, glibc) for part in ("--platform", tag)]

    def choose(self, roots: list[str], pins: list[str], have: dict[str, Version]) -> dict[str, Wheel]:
        """name -> the wheel that pip chooses for `roots`, with `pins` kept to and `have` as stubs.

        Not `pip install --dry-run`: that holds Requires-Python against the Python that pip runs on.
        """
        stubs, wheels = self.place / "stubs", self.place / "wheels"
        for folder in (stubs, wheels):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        held = [stub(stubs, name, version) for name, version in have.items()]
        free = [pin for pin in pins if canonicalize_name(Requirement(pin).name) not in have]
        (stubs / "constraints.txt").write_text("\n".join([*free, *held]) + "\n")
        options = ("--find-links", stubs, "--constraint", stubs / "constraints.txt", "--dest", wheels)
        self._download(*options, *self.target, *roots)
        return {canonicalize_name(path.name.split("-")[0]): Wheel.read(path) for path in wheels.glob("*.whl")}

    def _download(self, *options: object) -> None:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-color", *self.index]
        command += ["--progress-bar", "off", *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = re.search(r"The conflict is caused by:\n(.*?)\n\n", done.stdout, re.S)
            told = [*(why[1].splitlines() if why else []), *re.findall(r"ERROR: (.*)", done.stderr)]
            raise WheelhouseError("pip found no set of wheels that fits:\n" + "\n".join(told or [done.stderr]))


def walk(roots: list[str], chosen: dict[str, Wheel], stop: Iterable[str], env: dict[str, str]) -> dict[str, list]:
    """What the host needs: name -> the requirements on it, (requirement, by whom).

    A requirement's marker is read for the host: pip reads it for the Python that pip itself runs on. Nothing is
    followed beyond the names in `stop`, which the host has with all that they need.
    """
    wants: dict[str, list] = {}
    waiting = [(Requirement(root), "this project") for root in roots]
    followed = set()
    while waiting:
        wanted, by = waiting.pop()
        name = canonicalize_name(wanted.name)
        wants.setdefault(name, []).append((wanted, by))
        for extra in {"", *wanted.extras}:
            if name in stop or name not in chosen or (name, extra) in followed:
                continue
            followed.add((name, extra))
            for text in chosen[name].requires:
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate(env | {"extra": extra}):
                    waiting.append((inner, name))
    return wants


def unfit(wants: dict[str, list], have: dict[str, Version]) -> dict[str, str]:
    """What the host has but in a version that will not do -> why."""
    found = {}
    for name in wants.keys() & have.keys():
        for wanted, by in wants[name]:
            if not wanted.specifier.contains(have[name], prereleases=True):
                found[name] = f"the host's {name} {have[name]} is not {wanted.specifier}, as {by} requires"
    return found


def plan(
    roots: list[str], pins: list[str], have: dict[str, Version], resolver: Resolver
) -> tuple[list[str], list[str]]:
    """The wheels to gather, name==version each, and a line for each of the host's packages that is gathered anew."""
    torch = have.get("torch") or next(Version(pin.split("==")[1]) for pin in pins if pin.startswith("torch=="))
    have = {name: version for name, version in have.items() if name not in IN_PLACE} | {"torch": torch}
    if old := unfit(walk(roots, {}, (), resolver.env), {"torch": torch}):
        raise WheelhouseError(f"{old['torch']}: update PyTorch on the host, for it is not gathered")
    roots, stubs, said, asked = [*roots, *TORCH_NEEDS], {"torch"}, [], None
    while True:
        # Each round adds a root or a stub, or drops one of the host's packages, so that there is a last one.
        if asked != (asked := (len(roots), frozenset(stubs & have.keys()))):
            chosen = resolver.choose(roots, pins, {name: have[name] for name in asked[1]})
        wants = walk(roots, chosen, have.keys(), resolver.env)
        if bad := unfit(wants, have):
            said += [f"gathered anew: {why}" for _, why in sorted(bad.items())]
            have = {name: version for name, version in have.items() if name not in bad}
            continue
        missing = [wanted for name in wants.keys() - chosen.keys() - have.keys() for wanted, _ in wants[name]]
        if not missing and wants.keys() & have.keys() <= stubs:
            return [chosen[name].path for name in wants.keys() - have.keys()], said
        for wanted in missing:
            wanted.marker = None
            roots.append(str(wanted))
        stubs |= wants.keys() & have.keys()


def gather(wheels: list[Path], folder: Path) -> list[Path]:
    """Make these the wheels of `folder`; those of an earlier gathering go. Returns where they are now."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    return [Path(shutil.copy(new, folder)) for new in wheels]


def table(files: list[Path]) -> str:
    """What was gathered, the largest first, and the total. 1 MB is 1,000,000 bytes."""
    sizes = sorted(((path.stat().st_size, path.name) for path in files), key=lambda one: (-one[0], one[1]))
    rows = [f"{size / 1e6:8.2f} MB  {name}" for size, name in sizes]
    return "\n".join([*rows, f"{sum(size for size, _ in sizes) / 1e6:8.2f} MB  {len(files)} wheels in all"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", required=True, metavar="3.12", help="the host's Python: a version or an interpreter"
    )
    parser.add_argument("--have", type=Path, metavar="FILE", help="what `python -m pip freeze` prints on the host")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="default: wheelhouse/<python>")
    parser.add_argument("--machine", default="x86_64", help="as `uname -m` prints it on the host (default: x86_64)")
    parser.add_argument("--glibc", default="2.28", help="the host's, or an older one (default: 2.28)")
    parser.add_argument("--project", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument(
        "--pip", action="append", default=[], metavar="OPTION", help="passed on to pip, as --pip=--no-index"
    )
    args = parser.parse_args(argv)
    try:
        python = python_version(args.python)
        declared = tomllib.loads((args.project / "pyproject.toml").read_text())
        roots = [*requirements(args.project), *declared["build-system"]["requires"], SETUPTOOLS]
        pins = (args.project / "constraints.txt").read_text().split()
        have, unknown = frozen(args.have.read_text()) if args.have else ({}, [])
        folder = args.to or args.project / "wheelhouse" / minor(python)
        with tempfile.TemporaryDirectory(prefix="wheelhouse-") as place:
            wheels, said = plan(roots, pins, have, Resolver(python, args.machine, args.glibc, Path(place), args.pip))
            files = gather(wheels, folder)
    except (OSError, WheelhouseError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*(f"no version in {args.have.name}, so taken as not there: {line}" for line in unknown), *said]))
    print(table(files))
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    print(f"\nFor Python {minor(python)} on {args.machine}. Copy the project with {shown} to the host, and there:")
    print(f"  make setup PYTHON=python{minor(python)} WHEELHOUSE={shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
