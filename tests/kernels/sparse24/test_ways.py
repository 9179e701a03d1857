"""Which way the tuned product takes; and the judge of a way, with faults planted. Real times: tests/gpu."""

import pytest
import torch

from blockshock_lib.kernels.sparse24 import cslt, small, tune
from blockshock_lib.kernels.sparse24.packing import Packed
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config
from blockshock_lib.kernels.sparse24.tune import Probe

from .fake_cusparselt import install

N, K = 128, 192
WAYS = [(cslt, Setting()), (small, Config(1, 1, 1, 3, 1))]


@pytest.fixture
def taken(monkeypatch):
    found = []
    for one in (cslt, small):
        monkeypatch.setattr(one, "multiply", lambda *args, one=one: found.append((one, *args)))
    monkeypatch.setattr(small, "unsupported", lambda device, dtype: "")
    tune._untuned.cache_clear()
    yield found
    tune._untuned.cache_clear()


def packed(**extra):
    return Packed("tuned", (N, K), torch.bfloat16, (torch.zeros(N, K * 9 // 16).bfloat16(),), extra)


@pytest.mark.parametrize("rows", [9, 16])
@pytest.mark.parametrize(("way", "product"), [(Setting(7), cslt), (Config(1, 2, 1, 3, 1), small)])
def test_the_way_that_was_tuned_for_the_padded_batch_is_taken(taken, rows, way, product):
    form, x, bias = packed(), torch.zeros(rows, K).bfloat16(), torch.zeros(N).bfloat16()
    form.extra.update({8: Setting(1), 16: way, 24: Setting(2)})
    out = torch.empty(rows, N).bfloat16()
    tune.linear(x, form, out, bias)
    assert taken == [(product, x, form.data[0], (N, K), way, out, bias)]


@pytest.mark.parametrize(
    ("rows", "missing", "product"),
    [(1, "", small), (128, "", small), (129, "", cslt), (200, "", cslt), (16, "no compiler", cslt)],
)
def test_a_batch_that_nobody_tuned_goes_by_its_size_and_by_what_runs_here(taken, monkeypatch, rows, missing, product):
    monkeypatch.setattr(small, "unsupported", lambda device, dtype: missing)
    tune.linear(torch.zeros(rows, K).bfloat16(), packed())
    ((one, _, _, _, way, *_),) = taken
    assert one is product and way == (Setting() if product is cslt else small.default((N, K), cslt.padded(rows)))


@pytest.fixture
def probe(monkeypatch):
    install(monkeypatch)
    return Probe((N, K), 16, torch.bfloat16, torch.device("cpu"))


# y and the product of the call before -> y made wrong.
FAULTS = {
    "scaled": lambda y, last: y.mul_(1.02),
    "a tile moved": lambda y, last: y[: len(y) // 2, :16].copy_(y[: len(y) // 2, 16:32].clone()),
    "one NaN": lambda y, last: y[0, 0].fill_(torch.nan),
    "nothing written, where the last product lay": lambda y, last: y.copy_(last[: len(y)]),
    "nothing written": lambda y, last: y.fill_(torch.nan),  # what the output held before the call
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize(("room", "way"), WAYS)
def test_wrong_values_are_seen_at_every_check(probe, monkeypatch, room, way, fault):
    real, last = room.multiply, [torch.zeros(16, 128, dtype=torch.bfloat16)]

    def planted(x, buffer, shape, way, out=None, bias=None):
        y = real(x, buffer, shape, way, out, bias)
        right = y.clone()
        fault(y, last[-1])
        last.append(torch.cat((right, right))[:16])
        return y

    monkeypatch.setattr(room, "multiply", planted)
    assert not any(probe.check(way).right for _ in range(4))


def test_rows_behind_the_output_that_are_written_are_seen(probe, monkeypatch):
    def past_the_end(x, buffer, shape, config, out=None, bias=None):
        if more := -len(x) % 8:
            torch.as_strided(out, (more, shape[0]), (shape[0], 1), len(x) * shape[0]).zero_()
        return real(x, buffer, shape, config, out, bias)

    real, way = small.multiply, WAYS[1][1]
    monkeypatch.setattr(small, "multiply", past_the_end)
    assert sorted(probe.check(way).right for _ in range(2)) == [False, True]  # wrong for 13 rows, right for 16
