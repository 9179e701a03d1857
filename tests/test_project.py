import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from tests.conftest import LONG

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [Requirement(text) for text in PROJECT["dependencies"]]
DEV = [Requirement(text) for extra in ("dev", "browser") for text in PROJECT["optional-dependencies"][extra]]
CONSTRAINTS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip()]
PINS = {canonicalize_name(pin.name): pin for pin in CONSTRAINTS}
# What the library imports and another package always brings along -> the declared package that requires it.
BROUGHT = {
    "beautifulsoup4": "nbconvert",
    "bleach": "nbconvert",
    "ipython": "ipykernel",
    "jinja2": "nbconvert",
    "markupsafe": "nbconvert",
    "nbformat": "nbconvert",
    "numpy": "pandas",
    "pillow": "matplotlib",
    "pydantic-core": "pydantic",
    "pygments": "nbconvert",
    "traitlets": "ipykernel",
}
# What only runs on a GPU and is imported there alone: import name -> the file that does. cuda.bindings is in the extra
# `cuda` unpinned, as its version goes with PyTorch's CUDA; Triton comes with PyTorch.
ON_A_GPU = {"triton": ("kernels.py", "compress_kernels.py"), "cuda": ("compiled.py",), "nvmath": ("plans.py",)}
# DESIGN's "Never": part of the library -> modules that it must not import.
NEVER = {
    "sparse24": ("blockshock_lib.comm",),
    "comm": ("blockshock_lib.sparse24",),
    "report": ("blockshock_lib.layers", "blockshock_lib.launch", "torch.distributed"),
    "plan.py": ("torch",),
    "records.py": ("torch",),
}


def library(part=""):
    place = ROOT / "blockshock_lib" / part
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def imports(source, package):
    """Every module that `source`, a file of `package`, imports or reaches as torch.x.y; names of `from` imports too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.startswith("torch."):
                yield text


def package_of(path):
    return ".".join(path.relative_to(ROOT).parent.parts)


def within(module, names):
    return any(module == name or module.startswith(f"{name}.") for name in names)


def project_files():
    """The files that a commit of everything would hold."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def make(*args):
    # Without what an outer `make test` passes on to the makes below it.
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(["make", *args], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def targets():
    """Target -> its line in `make help`."""
    return dict(re.fullmatch(r"\s+make (\S+)\s+(\S.*)", line).groups() for line in make("help").splitlines())


def test_every_constraint_pins_one_version_of_one_package():
    assert len(PINS) == len(CONSTRAINTS) > len(DECLARED)
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) for pin in CONSTRAINTS)


@pytest.mark.parametrize("wanted", DECLARED + DEV, ids=str)
def test_every_dependency_is_pinned_within_its_own_bounds(wanted):
    pin = PINS[canonicalize_name(wanted.name)]
    assert wanted.specifier.contains(str(pin.specifier).removeprefix("=="))


def test_the_extra_for_gpus_is_pinned_but_for_what_goes_with_cuda():
    extra = [Requirement(text) for text in PROJECT["optional-dependencies"]["cuda"]]
    assert {one.name for one in extra} == {"nvmath-python", "cuda-bindings"} and "cuda-bindings" not in PINS
    (nvmath,) = (one for one in extra if one.name == "nvmath-python")
    assert nvmath.specifier.contains(str(PINS["nvmath-python"].specifier).removeprefix("=="))


def test_torch_is_pinned_to_2_13_0():
    assert str(PINS["torch"].specifier) == "==2.13.0"


def test_no_dependency_is_declared_twice():
    names = [canonicalize_name(wanted.name) for wanted in DECLARED + DEV]
    assert len(names) == len(set(names))


def test_every_distribution_that_the_library_imports_is_declared_or_brought_by_one_that_is():
    declared = {canonicalize_name(wanted.name) for wanted in DECLARED}
    owners = importlib.metadata.packages_distributions()
    for path in library():
        for module in imports(path.read_text(), package_of(path)):
            top = module.split(".")[0]
            if top == "blockshock_lib" or top in sys.stdlib_module_names:
                continue
            if path.name in ON_A_GPU.get(top, ()):
                continue
            found = {canonicalize_name(name) for name in owners.get(top, [top])}
            found = {BROUGHT.get(name, name) for name in found}
            assert found & declared, f"{path.name} imports {module}: declare {', '.join(sorted(found))}"


def test_what_only_a_gpu_needs_is_imported_only_where_it_runs():
    code = "import sys, blockshock_lib.layers, blockshock_lib.sparse24.product; "
    code += f"assert not sys.modules.keys() & {set(ON_A_GPU)}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name, parent", BROUGHT.items())
def test_what_is_brought_along_is_required_without_condition(name, parent):
    required = [Requirement(text) for text in importlib.metadata.requires(parent)]
    always = [r for r in required if r.marker is None or "extra" not in str(r.marker)]
    assert name in {canonicalize_name(r.name) for r in always}
    assert name in PINS


def test_the_conda_environment_installs_the_project_itself_with_its_constraints():
    environment = YAML(typ="safe", pure=True).load(ROOT / "environment.yml")
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    plain = {
        Requirement(entry).name: Requirement(entry) for entry in environment["dependencies"] if isinstance(entry, str)
    }
    assert pip == ["--constraint constraints.txt", "--editable .[dev]"]
    assert plain.keys() == {"python", "pip"}, "any other dependency belongs into pyproject.toml"
    assert plain["python"].specifier == SpecifierSet(PROJECT["requires-python"])


def test_make_help_lists_every_target_with_a_line():
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert sorted(targets()) == sorted(phony)


def test_make_has_every_target_that_users_are_told_of():
    readme = (ROOT / "README.md").read_text()
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", readme, re.S))
    told = {"phase0", "phase1", "test", "lab", "help"} | set(re.findall(r"(?:^|[`\s;&])make ([a-z][a-z0-9-]*)", code))
    assert told <= targets().keys()


def test_every_make_target_can_be_planned():
    for target in targets():
        assert make("--dry-run", target)


@pytest.mark.parametrize("failing, told", [("test", ["test"]), ("test-browser", ["test", "test-browser"])])
def test_ci_runs_both_test_commands_and_passes_on_their_failure(tmp_path, failing, told):
    for name, script in {
        "make": f'echo "$PWD: make $*"; test "$1" != {failing} || exit 7',
        "chromium": "exit 0",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run([ROOT / ".ci" / "run"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (ran.stdout.splitlines(), ran.returncode) == ([f"{ROOT}: make {target}" for target in told], 7)


def test_no_file_of_the_project_names_a_path_of_the_machine_that_made_it():
    # In two parts, or this file would name them.
    places = {"/" + "work/", "/" + "root/"} | {f"{p}/" for p in (ROOT, Path.home()) if len(p.parts) > 1}
    for path in project_files():
        data = path.read_bytes()
        for place in places:
            assert place.encode() not in data, f"{path.relative_to(ROOT)} names {place}"


def test_no_file_of_the_project_is_larger_than_1_mb_outside_outputs():
    files = [path for path in project_files() if not path.is_relative_to(ROOT / "outputs")]
    assert files and not [path.name for path in files if path.stat().st_size > 1_000_000]


@pytest.mark.parametrize("part", NEVER)
def test_no_part_of_the_library_imports_what_it_never_may(part):
    files = library(part)
    assert files
    for path in files:
        bad = [module for module in imports(path.read_text(), package_of(path)) if within(module, NEVER[part])]
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


@pytest.mark.parametrize(
    "source",
    [
        "import blockshock_lib.comm.group as group",
        "from blockshock_lib import comm",
        "from blockshock_lib.comm import group",
        "from blockshock_lib.comm.group import Group",
        "from ..comm import group",
        "from .. import comm",
        "def late():\n    from blockshock_lib import comm",
    ],
)
def test_the_rule_sees_every_way_to_import(source):
    assert any(within(module, NEVER["sparse24"]) for module in imports(source, "blockshock_lib.sparse24"))


@pytest.mark.parametrize(
    "source", ["import torch.distributed as dist", "from torch import distributed", "torch.distributed.get_rank()"]
)
def test_the_rule_sees_every_way_to_reach_torch_distributed(source):
    assert any(within(module, NEVER["report"]) for module in imports(source, "blockshock_lib.report"))


@pytest.mark.parametrize(
    "source", ["from blockshock_lib import commerce", "import blockshock_lib.communal", "from . import comm"]
)
def test_the_rule_is_not_fooled_by_a_name_that_starts_alike(source):
    assert not any(within(module, NEVER["sparse24"]) for module in imports(source, "blockshock_lib.sparse24"))


def test_the_test_files_that_are_begun_first_are_there():
    assert all((ROOT / name).is_file() for name in LONG)
