"""What the README says was seen to work."""

import os
import re
import subprocess
import sys
import textwrap

import torch

import blockshock_lib
from blockshock_lib import attention, gpt
from blockshock_lib.files import ROOT
from blockshock_lib.kernels.attention import backends
from blockshock_lib.layers.attention import parallel
from blockshock_lib.runs import manifest

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


def test_the_example_for_ones_own_model_trains_and_saves_what_plain_layers_load(tmp_path):
    code, _ = EXAMPLES
    script = tmp_path / "own.py"
    # In a function, as docs/own_model.md says: a mesh or model that outlives its process group can abort Python's exit.
    body = "import torch\nfrom torch import nn\n" + BEFORE + code.replace('"cuda"', '"cpu"') + AFTER
    main = "def main():\n" + textwrap.indent(body, "    ") + "\nmain()\n"
    script.write_text(main + END)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("BlockShockLinear True") == 2


def test_the_example_for_one_gpu_gives_what_the_plain_layer_gives():
    _, code = EXAMPLES
    made = {}
    exec(code, made)
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(0))
    assert made["y"].shape == (16, 512)
    torch.testing.assert_close(made["packed"](x), made["pruned"](x))
    assert (made["pruned"].weight == 0).float().mean() == 0.5


def test_the_examples_of_attention_run():
    made = {}
    for code in re.findall(r"```python\n(.*?)```", PAGES[ROOT / "docs" / "attention.md"], flags=re.DOTALL):
        exec(code, made)
    torch.testing.assert_close(made["whole"], made["layer"].gather(made["out"]))
    assert made["mine"][1].grad.shape == made["k"].shape and made["lists"].block_density < 0.7


def test_the_examples_of_gpt_run_and_its_table_counts_as_its_schedules_do():
    made, text = {}, PAGES[ROOT / "docs" / "gpt.md"]
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(code, made)
    assert made["whole"].tokens.weight.grad is None and made["model"].tokens.weight.grad.abs().sum() > 0
    rows = dict(re.findall(r"^\| `(\w+)([^|]*\| \d*)", text, flags=re.MULTILINE))
    assert rows.keys() == gpt.SCHEDULES.keys()
    for name in (name for name, row in rows.items() if "(" not in row):
        assert int(rows[name].split()[-1]) == len(gpt.named(name, 12).syncs), name


def test_every_pattern_and_strategy_of_the_page_exists():
    text = PAGES[ROOT / "docs" / "attention.md"]
    named = {name for name in re.findall(r"`(\w+)\(", text)} - {"pattern"}
    assert {name for name in named if not hasattr(attention, name)} == set()
    assert {f"`{name}`" for name in (*backends.BACKENDS, *parallel.STRATEGIES)} <= set(re.findall(r"`\w+`", text))


def test_the_answer_is_the_one_of_the_shipped_findings():
    assert f"| {manifest.read(manifest.REFERENCE / 'findings')['answer']} |" in TEXT


def test_it_is_a_page():
    assert TEXT.count("\n") <= 150 and len(TEXT.split()) <= 1500


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
    named = r"(?:`|^)make ([a-z][a-z0-9-]*)"
    assert {name for text in PAGES.values() for name in re.findall(named, text, re.M)} <= targets
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
