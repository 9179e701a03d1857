"""Which way the tuned product takes, with both products noted in place of a GPU's."""

import pytest
import torch

from blockshock_lib.sparse24 import cslt, small, tuned
from blockshock_lib.sparse24.packed import Packed
from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import Setting

N, K = 128, 192


@pytest.fixture
def taken(monkeypatch):
    found = []
    for one in (cslt, small):
        monkeypatch.setattr(one, "multiply", lambda *args, one=one: found.append((one, *args)))
    monkeypatch.setattr(small, "unsupported", lambda device, dtype: "")
    tuned._untuned.cache_clear()
    yield found
    tuned._untuned.cache_clear()


def packed(**extra):
    return Packed("tuned", (N, K), torch.bfloat16, (torch.zeros(N, K * 9 // 16).bfloat16(),), extra)


@pytest.mark.parametrize("rows", [9, 16])
@pytest.mark.parametrize(("way", "product"), [(Setting(7), cslt), (Config(1, 2, 1, 3, 1), small)])
def test_the_way_that_was_tuned_for_the_padded_batch_is_taken(taken, rows, way, product):
    form, x, bias = packed(), torch.zeros(rows, K).bfloat16(), torch.zeros(N).bfloat16()
    form.extra.update({8: Setting(1), 16: way, 24: Setting(2)})
    out = torch.empty(rows, N).bfloat16()
    tuned.linear(x, form, out, bias)
    assert taken == [(product, x, form.data[0], (N, K), way, out, bias)]


@pytest.mark.parametrize(("rows", "product"), [(1, small), (128, small), (129, cslt), (200, cslt)])
def test_a_batch_that_nobody_tuned_goes_by_its_size(taken, rows, product):
    tuned.linear(torch.zeros(rows, K).bfloat16(), packed())
    ((one, _, _, _, way, *_),) = taken
    assert one is product and way == (Setting() if product is cslt else small.default((N, K), cslt.padded(rows)))
