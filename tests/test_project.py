import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

import blockshock_lib
from blockshock_lib.files import ROOT
from tests.processes import python
from tests.test_house import LIBRARY, imported, package_of

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = [Requirement(text) for text in PROJECT["dependencies"] + EXTRAS["workbook"]]
DEV = [Requirement(text) for extra in ("dev", "browser") for text in EXTRAS[extra]]
GPU = {Requirement(text).name: Requirement(text) for text in EXTRAS["cuda"]}
CONSTRAINTS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip()]
PINS = {canonicalize_name(pin.name): pin for pin in CONSTRAINTS}
# What the library imports and another package always brings along -> the declared package that requires it.
BROUGHT = dict.fromkeys(("beautifulsoup4", "jinja2", "markupsafe", "nbformat", "pygments"), "nbconvert")
BROUGHT |= {"ipython": "ipykernel", "traitlets": "ipykernel", "numpy": "pandas", "pillow": "matplotlib"}
BROUGHT |= {"pydantic-core": "pydantic"}
# What only runs on a GPU and is imported there alone: import name -> the file that does. cuda.bindings is in the extra
# `cuda` unpinned, as its version goes with PyTorch's CUDA; Triton comes with PyTorch.
ON_A_GPU = {
    "triton": (
        "kernels.py",
        "quantize.py",
        "gluon.py",
        "gluon_forward.py",
        *(f"triton_{part}.py" for part in ("forward", "backward", "merge", "tiles")),
    ),
    "cuda": ("compiled.py",),
    "nvmath": ("plans.py", "unstructured.py"),
}
ON_A_GPU |= {"flash_attn": ("fa4.py",), "cudnn": ("cudnn.py",)}  # the extra `attention`


def test_every_constraint_pins_one_version_of_one_package():
    assert len(PINS) == len(CONSTRAINTS) > len(DECLARED)
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) for pin in CONSTRAINTS)
    assert GPU.keys() == {"nvmath-python", "cuda-bindings"} and "cuda-bindings" not in PINS, "its version is CUDA's"
    assert PROJECT["dependencies"] == ["torch>=2.11"], "torch is all that the layers need"


@pytest.mark.parametrize("wanted", [*DECLARED, *DEV, GPU["nvmath-python"]], ids=str)
def test_every_dependency_is_pinned_within_its_own_bounds(wanted):
    pin = PINS[canonicalize_name(wanted.name)]
    assert wanted.specifier.contains(str(pin.specifier).removeprefix("=="))


def test_every_distribution_that_the_library_imports_is_declared_or_brought_by_one_that_is():
    declared = {canonicalize_name(wanted.name) for wanted in DECLARED}
    owners = importlib.metadata.packages_distributions()
    for path in LIBRARY.rglob("*.py"):
        for module in imported(path.read_text(), package_of(path)):
            top = module.split(".")[0]
            if top in {"blockshock_lib", *sys.stdlib_module_names} or path.name in ON_A_GPU.get(top, ()):
                continue
            found = {canonicalize_name(name) for name in owners.get(top, [top])}
            found = {BROUGHT.get(name, name) for name in found}
            assert found & declared, f"{path.name} imports {module}: declare {', '.join(sorted(found))}"


LAYERS = "('Linear24', 'BlockShockParallel', 'checkpoint', 'clip_grad_norm_', 'Mask')"
REPORTS = "[__import__(one.name) for one in pkgutil.walk_packages(['blockshock_lib/report'], 'blockshock_lib.report.')]"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            f"import blockshock_lib.kernels.sparse24.backends; [getattr(blockshock_lib, name) for name in {LAYERS}]",
            {*ON_A_GPU, "pandas", "pydantic", "ruamel", "papermill", "IPython"},
        ),
        (f"import pkgutil, blockshock_lib.studies.linear.params; {REPORTS}", {"torch"}),
        ("import blockshock_lib; blockshock_lib.load('outputs/reference/phase0-cpu')", {"torch"}),
    ],
    ids=["layers", "parameters and reports", "load"],
)
def test_what_is_imported_loads_no_more_than_it_needs(code, absent):
    done = python("-c", f"import sys; {code}; assert not sys.modules.keys() & {absent}")
    assert not done.returncode, done.stderr


def test_what_the_layers_alone_lack_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "blockshock_lib.runs.records", None)
    with pytest.raises(ImportError, match=r"load needs .*records: pip install 'blockshock-lib\[workbook\]'"):
        blockshock_lib.load  # noqa: B018


def test_a_wheel_holds_every_file_of_the_library():
    (patterns,) = SETUPTOOLS["package-data"].values()
    for path in (path for path in LIBRARY.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")):
        assert any(path.match(one) for one in patterns) and (path.parent / "__init__.py").exists(), path


def test_the_conda_environment_installs_the_project_itself_with_its_constraints():
    environment = YAML(typ="safe", pure=True).load(ROOT / "environment.yml")
    python, pip, own = environment["dependencies"]
    assert own == {"pip": ["--constraint constraints.txt", "--editable .[workbook,dev]"]}
    assert pip == "pip" and python == f"python{PROJECT['requires-python']}"


@pytest.mark.parametrize("failing, told", [("test-all", ["test-all"]), ("test-browser", ["test-all", "test-browser"])])
def test_ci_runs_both_test_commands_and_passes_on_their_failure(tmp_path, failing, told):
    scripts = {"make": f'echo "$PWD: make $*"; test "$1" != {failing} || exit 7', "chromium": "exit 0"}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run([ROOT / ".ci" / "run"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (ran.stdout.splitlines(), ran.returncode) == ([f"{ROOT}: make {target}" for target in told], 7)


def test_no_file_of_the_project_names_a_path_of_the_machine_that_made_it_or_is_large():
    # In two parts, or this file would name them.
    places = {"/" + "work/", "/" + "root/"} | {f"{p}/" for p in (ROOT, Path.home()) if len(p.parts) > 1}
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # The files that a commit of everything would hold.
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    assert len(names) > 100
    for path in (ROOT / name for name in names if name and (ROOT / name).is_file()):
        data = path.read_bytes()
        assert not [place for place in places if place.encode() in data], path
        assert len(data) <= 1_000_000 or path.is_relative_to(ROOT / "outputs"), path


@pytest.mark.parametrize("name", blockshock_lib.__all__)
def test_every_public_name_can_be_imported(name):
    found = getattr(blockshock_lib, name)
    assert found.__name__.rpartition(".")[2] == name
    assert callable(found) == (name not in ("attention", "checkpoint", "gpt"))
    with pytest.raises(AttributeError, match=f"no attribute '{name}x'.*{name}"):
        getattr(blockshock_lib, f"{name}x")


FAKE = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") sleep 1; exit ${FAILS:-0} ;;
    *) test "${2#import sys, torch}" = "$2" ;;
esac
"""


@pytest.mark.parametrize("fails", [0, 3])
def test_setup_says_while_pip_is_silent_that_it_goes_on_and_ends_as_pip_does(fails, tmp_path):
    place = tmp_path / "python"
    place.write_text(FAKE)
    place.chmod(0o755)
    words = ["make", "setup", f"PYTHON={place}", f"VENV={tmp_path / 'venv'}", "EVERY=0.2"]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"FAILS": str(fails)})
    assert (ran.returncode == 0) is (fails == 0), ran.stderr
    assert ran.stdout.count(f" MB in {tmp_path / 'venv'}\n") >= 2
    assert (tmp_path / "venv" / ".ready").exists() is (fails == 0)
