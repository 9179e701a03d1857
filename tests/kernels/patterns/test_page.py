"""docs/gallery.md: its example runs, and it names and draws every pattern."""

import re

import torch

from blockshock_lib.files import ROOT
from blockshock_lib.kernels.patterns.table import KERNELS, PATTERNS

TEXT = (ROOT / "docs" / "gallery.md").read_text()


def test_the_example_runs_and_every_pattern_and_kernel_is_named():
    made = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)[1], made)
    x, kept = made["x"].double(), torch.where(made["mask"], made["weight"], 0).double()
    bound = x.shape[1] * torch.finfo(torch.float32).eps * (x.abs() @ kept.abs().t())  # of sums in any order
    assert ((made["y"] - x @ kept.t()).abs() <= bound).all()
    assert not [name for name in (*PATTERNS, *KERNELS) if f"`{name}`" not in TEXT]


def test_the_pictures_are_of_the_masks():
    names, *drawn = re.search(r"```\n(unstructured .*?)```", TEXT, flags=re.DOTALL)[1].splitlines()
    scores = torch.rand(12, 12, generator=torch.Generator().manual_seed(0))
    found = list(re.finditer(r"\S+( \S+)*", names))
    assert len(found) == 6
    for name, at in ((one[0], one.start()) for one in found):
        mask = PATTERNS[name].mask(scores, 0.75 if name == "2:4 in blocks" else 0.5, 4 * PATTERNS[name].blocks)
        picture = ["".join(".#"[kept] for kept in row) for row in mask.tolist()]
        assert [line[at : at + 12] for line in drawn] == picture, name
