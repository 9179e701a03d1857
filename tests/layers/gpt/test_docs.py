"""What docs/gpt.md says was seen to work."""

import re

from blockshock_lib import gpt
from blockshock_lib.files import ROOT

TEXT = (ROOT / "docs" / "gpt.md").read_text(encoding="utf-8")


def test_the_examples_of_gpt_run_and_its_table_counts_as_its_schedules_do():
    made = {}
    for code in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(code, made)
    assert made["weights"].keys() == dict(made["model"].named_parameters()).keys()
    assert made["model"].tokens.weight.grad.abs().sum() > 0
    rows = dict(re.findall(r"^\| `(\w+)([^|]*\| \d*)", TEXT, flags=re.MULTILINE))
    assert rows.keys() == gpt.SCHEDULES.keys()
    for name in (name for name, row in rows.items() if "(" not in row):
        assert int(rows[name].split()[-1]) == len(gpt.named(name, 12).syncs), name
