"""What the README says was seen to work."""

import re
import subprocess
import textwrap

import pytest
import torch

import blockshock_lib
from blockshock_lib import studies
from blockshock_lib.files import ROOT
from blockshock_lib.runs import manifest
from tests.processes import python

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


BEFORE = """
torch.manual_seed(0)
layer = lambda: nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)})})
model = nn.ModuleDict({"blocks": nn.ModuleList([layer()])})
loss = lambda model: model["blocks"][0]["mlp"]["down"](model["blocks"][0]["mlp"]["up"](torch.ones(3, 64))).mean()
"""
AFTER = """
later = loss(model).item()
plain = nn.ModuleDict({"blocks": nn.ModuleList([layer()])})
checkpoint.load("folder", plain)
told = f"{type(model['blocks'][0]['mlp']['up']).__name__} {abs(loss(plain).item() - later) < 1e-6}\\n"
print(told, end="")  # in one write, for both ranks write to one pipe
"""
END = """
import torch, weakref
world = weakref.ref(torch.distributed.group.WORLD)
torch.distributed.destroy_process_group()
assert world() is None, "something keeps the process group, whose threads can abort Python's exit"
"""


@pytest.mark.long
def test_the_example_for_ones_own_model_trains_and_saves_what_plain_layers_load(tmp_path):
    code, _ = EXAMPLES
    script = tmp_path / "own.py"
    # In a function, as docs/own_model.md says: a mesh or model that outlives its process group can abort Python's exit.
    body = "import torch\nfrom torch import nn\n" + BEFORE + code.replace('"cuda"', '"cpu"') + AFTER
    main = "def main():\n" + textwrap.indent(body, "    ") + "\nmain()\n"
    script.write_text(main + END)
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("BlockShockLinear True") == 2


def test_the_example_for_one_gpu_prunes_a_model(capsys):
    _, code = EXAMPLES
    made = {"model": torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))}
    exec(code, made)
    assert [type(layer).__name__ for layer in made["model"]] == ["Linear24"] * 2
    assert "2 of 2 layers converted" in capsys.readouterr().out


def test_the_examples_of_one_layer_and_of_sparse_models_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", PAGES[ROOT / "docs" / "own_model.md"], flags=re.DOTALL)
    one, made = {}, {}
    exec(code, one)
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(one["packed"](x), one["pruned"](x))
    assert (one["pruned"].weight == 0).float().mean() == 0.5
    for code in re.findall(r"```python\n(.*?)```", PAGES[ROOT / "docs" / "sparsify.md"], flags=re.DOTALL):
        exec(code, made)
    assert [type(made[name][0]).__name__ for name in ("model", "again")] == ["Linear24"] * 2
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(made["again"](x), made["model"](x))


def test_it_is_a_page_with_the_answer_of_the_shipped_findings():
    assert TEXT.count("\n") <= 150 and len(TEXT.split()) <= 1500
    assert f"| {manifest.read(manifest.REFERENCE / 'findings')['answer']} | " in TEXT


def test_every_column_of_a_record_is_explained():
    told = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "records.md").read_text()))
    assert set(blockshock_lib.load(ROOT / "outputs" / "reference" / "phase0-cpu").columns) <= told


def test_every_linked_file_and_section_exists():
    for page, text in PAGES.items():
        for at, _, section in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]+))?\)", text):
            place = page.parent / at if at else page
            assert place.exists(), (page, at)
            titles = re.findall(r"^#+ (.*)$", place.read_text(), re.M) if section else ()
            known = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not section or section in known, (page, section)


def test_every_make_target_named_exists_and_every_one_can_be_planned():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    targets |= {phase for name in studies.names() for phase in studies.load(name).phases if "_" in phase}
    named = r"(?:`|^)make ([a-z][a-z0-9_-]*)"
    assert {name for text in PAGES.values() for name in re.findall(named, text, re.M)} <= targets
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
