"""What docs/attention.md says was seen to work."""

import re

import torch

from blockshock_lib import attention
from blockshock_lib.files import ROOT
from blockshock_lib.kernels.attention import backends
from blockshock_lib.layers.attention import parallel

TEXT = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")


def test_the_examples_of_attention_run():
    made = {}
    for code in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(code, made)
    torch.testing.assert_close(made["whole"], made["layer"].gather(made["out"]))
    assert made["mine"][1].grad.shape == made["k"].shape and made["lists"].block_density < 0.7


def test_every_pattern_and_strategy_of_the_page_exists():
    named = {name for name in re.findall(r"`(\w+)\(", TEXT)} - {"pattern"}
    assert {name for name in named if not hasattr(attention, name)} == set()
    assert {f"`{name}`" for name in (*backends.BACKENDS, *parallel.STRATEGIES)} <= set(re.findall(r"`\w+`", TEXT))
