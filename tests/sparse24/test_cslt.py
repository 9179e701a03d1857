"""The calls of the raw ops, against a fake of cuSPARSELt on the CPU. Real values and times: tests/gpu."""

from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import choices, cslt, cslt_tune, masks, product, stock, tuner
from blockshock_lib.sparse24.tuning import BrokenContextError, Error, Found, Setting, Trial

from .fake_cusparselt import Matmul, compress


@pytest.fixture(autouse=True)
def matmul(monkeypatch):
    fake = Matmul()
    monkeypatch.setattr(torch, "_cslt_compress", compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", fake)
    monkeypatch.setattr(cslt, "unsupported", lambda device, dtype: "")
    return fake


def problem(b=16, n=128, k=192):
    generator = torch.Generator().manual_seed(b)
    weight = torch.randn(n, k, generator=generator).bfloat16()
    mask = masks.make(SimpleNamespace(family="random", pattern=""), (n, k))
    return torch.randn(b, k, generator=generator).bfloat16(), weight, mask


def dense_product(x, weight, mask):
    return x @ torch.where(mask, weight, 0).t()


@pytest.mark.parametrize("b", [1, 7, 8, 16, 33])
def test_any_batch_is_multiplied_and_the_output_is_contiguous(b):
    x, weight, mask = problem(b)
    y = cslt.linear(x, cslt.pack(weight, mask))
    assert y.is_contiguous() and y.shape == (b, 128)
    torch.testing.assert_close(y, dense_product(x, weight, mask), rtol=2e-2, atol=2e-2)


def test_a_column_slice_is_not_read_as_if_it_were_contiguous():
    x, weight, mask = problem()
    packed = cslt.pack(weight, mask)
    wide = torch.randn(16, 384).bfloat16()
    wide[:, 192:] = x
    assert torch.equal(cslt.linear(wide[:, 192:], packed), cslt.linear(x, packed))
    raw = cslt.multiply(wide[:, 192:], packed.data[0], Setting())
    assert not torch.equal(raw, cslt.linear(x, packed))  # the trap is real: the op itself takes the slice and is wrong


def test_a_transposed_weight_is_not_read_as_if_it_were_contiguous():
    x, weight, mask = problem()
    packed = cslt.pack(weight.t().contiguous().t(), mask.t().contiguous().t())
    assert torch.equal(cslt.linear(x, packed), cslt.linear(x, cslt.pack(weight, mask)))


def test_an_input_of_another_width_is_refused_as_the_op_would_read_past_its_end():
    x, weight, mask = problem()
    with pytest.raises(ValueError, match=r"\[B, 192\]"):
        cslt.linear(x[:, :128].contiguous(), cslt.pack(weight, mask))


def test_packed_bytes_are_nine_sixteenths_and_the_values_are_the_kept_weights():
    _, weight, mask = problem()
    packed = cslt.pack(weight, mask)
    assert packed.nbytes == weight.nbytes * 9 // 16
    assert torch.equal(packed.values, weight[mask].view(128, 96))


def test_a_stale_packed_copy_is_renewed_by_writing_its_values():
    x, weight, mask = problem()
    packed = cslt.pack(weight, mask)
    weight = weight * 2
    assert not torch.equal(cslt.linear(x, packed), dense_product(x, weight, mask))
    packed.values.copy_(weight[mask].view(128, 96))
    torch.testing.assert_close(cslt.linear(x, packed), dense_product(x, weight, mask), rtol=2e-2, atol=2e-2)


def test_a_kept_zero_stays_kept_so_that_a_later_value_reaches_its_place():
    x, weight, mask = problem()
    packed = cslt.pack(torch.zeros_like(weight), mask)
    assert packed.values.count_nonzero() == 0 and cslt.linear(x, packed).count_nonzero() == 0
    packed.values.copy_(weight[mask].view(128, 96))
    assert torch.equal(cslt.linear(x, packed), cslt.linear(x, cslt.pack(weight, mask)))
    torch.testing.assert_close(cslt.linear(x, packed), dense_product(x, weight, mask), rtol=2e-2, atol=2e-2)


def test_a_mask_that_keeps_three_of_four_never_reaches_the_op():
    _, weight, mask = problem()
    mask[0, :4] = torch.tensor([True, True, True, False])
    with pytest.raises(ValueError, match="keep 3 of 4"):
        cslt.pack(weight, mask)


def test_two_to_the_32_weights_are_multiplied_and_one_tile_more_is_refused_by_name():
    for shape in ((65536, 65536), (8192, 524288), (128, 192)):
        assert cslt.too_large(shape) == ""
    for shape in ((65536, 65536 + 64), (65536 + 64, 65536)):
        reason = cslt.too_large(shape)
        assert f"{shape[0]}x{shape[1]} has more than 2^32 entries" in reason and "wrong values" in reason
        assert "more ranks" in reason and 'product="reference"' in reason
    assert product.BACKENDS["reference"].too_large((65536, 131072)) == ""


@pytest.mark.parametrize("name", ["torch", "cslt"])
def test_a_weight_that_would_be_multiplied_wrongly_is_refused_before_anything_is_made_of_it(name, monkeypatch):
    backend = product.BACKENDS[name]
    monkeypatch.setattr(stock, "unsupported", lambda device, dtype: "")
    # Without storage: whatever computed with them would fail.
    weight, mask = (torch.empty(65536, 65600, dtype=d, device="meta") for d in (torch.bfloat16, torch.bool))
    makers = [lambda: backend.pack(weight, mask), lambda: backend.blank(mask, weight.dtype)]
    makers += [lambda: stock.compress(weight)] if name == "torch" else []
    for make in makers:
        with pytest.raises(UnsupportedError, match=f"{name!r} cannot run: a weight of 65536x65600 has more than"):
            make()


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The cache in a temporary folder, and searches that are counted and find algorithm 17."""
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(
        cslt_tune,
        "key_of",
        lambda packed, rows: choices.Key(*packed.shape, rows, "bfloat16", "some GPU", "2.11.0", 800),
    )
    monkeypatch.setattr(cslt_tune, "chosen", {})
    planned = SimpleNamespace(count=0, found=Found(Trial(Setting(17, 2, 1), Error(1.0, 1.0), 0.5)))

    def search(shape, rows, dtype, device):
        planned.count += 1
        return planned.found

    monkeypatch.setattr(tuner, "shared", lambda: SimpleNamespace(search=search))
    return planned


def test_an_untuned_product_uses_the_default_algorithm(matmul):
    x, weight, mask = problem()
    cslt.linear(x, cslt.pack(weight, mask))
    assert matmul.calls == [(0, 1, -1)]


def test_a_tuned_product_uses_its_choice_for_that_batch_size_only(tuned, matmul):
    x, weight, mask = problem(16)
    packed = cslt.pack(weight, mask)
    cslt_tune.tune(x, packed)
    cslt.linear(x, packed)
    cslt.linear(x[:15], packed)  # padded to 16
    cslt.linear(x[:8], packed)
    assert matmul.calls == [(17, 2, 1), (17, 2, 1), (0, 1, -1)]


def test_a_choice_is_searched_once_and_then_read_from_its_file(tuned, matmul):
    x, weight, mask = problem()
    for _ in range(2):
        packed = cslt.pack(weight, mask)
        cslt_tune.tune(x, packed)
        cslt_tune.tune(x, packed)
        cslt.linear(x, packed)
        cslt_tune.chosen.clear()  # as in another process
    assert tuned.count == 1 and set(matmul.calls) == {(17, 2, 1)}


def test_more_copies_of_a_weight_cost_no_look_into_the_file(tuned, matmul, monkeypatch):
    x, weight, mask = problem()
    cslt_tune.tune(x, cslt.pack(weight, mask))
    monkeypatch.setattr(choices, "find", lambda key: pytest.fail("the file was read again"))
    packed = cslt.pack(weight, mask)
    cslt_tune.tune(x, packed)
    cslt.linear(x, packed)
    assert tuned.count == 1 and matmul.calls == [(17, 2, 1)]


def test_a_damaged_file_of_choices_is_searched_again(tuned):
    x, weight, mask = problem()
    cslt_tune.tune(x, cslt.pack(weight, mask))
    choices.default_path().write_text("{")
    cslt_tune.chosen.clear()
    with pytest.warns(UserWarning, match="damaged"):
        cslt_tune.tune(x, cslt.pack(weight, mask))
    assert tuned.count == 2


@pytest.mark.parametrize(
    ("found", "reason"),
    [(Found(None), "no algorithm of cuSPARSELt gave right values"), (Found(None, failed="given up"), "given up")],
)
def test_the_default_stays_with_one_warning_when_nothing_is_found(tuned, matmul, found, reason):
    x, weight, mask = problem()
    tuned.found = found
    with pytest.warns(UserWarning, match=f"128x192 B=16 bfloat16: {reason}: the default stays"):
        cslt_tune.tune(x, cslt.pack(weight, mask))
    packed = cslt.pack(weight, mask)
    cslt_tune.tune(x, packed)
    cslt.linear(x, packed)
    assert tuned.count == 1 and matmul.calls == [(0, 1, -1)] and not choices.default_path().exists()


def test_what_crashed_is_told_and_the_choice_kept_all_the_same(tuned):
    x, weight, mask = problem()
    tuned.found = Found(tuned.found.best, crashes=("mm_search (SIGILL)",))
    with pytest.warns(UserWarning, match=r"left out what crashed: mm_search \(SIGILL\)"):
        cslt_tune.tune(x, cslt.pack(weight, mask))
    assert [setting for setting, _ in choices.load().values()] == [Setting(17, 2, 1)]


def test_a_default_that_crashes_is_never_left_in_use(tuned):
    x, weight, mask = problem()
    crash = Trial(Setting(), crashed="SIGILL")
    tuned.found = Found(None, trials=(crash,), crashes=("algorithm (0, 1, -1) (SIGILL)",))
    packed = cslt.pack(weight, mask)
    with pytest.warns(UserWarning, match="crashed"), pytest.raises(UnsupportedError, match="default algorithm crashes"):
        cslt_tune.tune(x, packed)
    assert not packed.extra


@pytest.fixture
def probing(monkeypatch):
    """What the search asks of CUDA, answered by the CPU; times are made up, algorithm 1 the fastest."""
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype)))
    gpu = SimpleNamespace(L2_cache_size=50_000, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    library = SimpleNamespace(mm_search=lambda *args: (2, 1, 1, 4))
    monkeypatch.setattr(torch._C, "_cusparselt", library, raising=False)
    times = {0: 4.0, 1: 1.0, 2: 3.0, 3: 2.0}
    monkeypatch.setattr(cslt_tune.Probe, "clock", lambda self, setting, samples: times[setting.alg_id])


def search(shape=(128, 1024), rows=16, seconds=600, **options):
    """With time for every candidate, on a busy machine too."""
    return cslt_tune.search(shape, rows, torch.bfloat16, torch.device("cpu"), seconds=seconds, **options)


def test_a_search_tries_every_algorithm_and_the_librarys_pick(probing):
    found = search()
    assert found.best.setting.alg_id == 1 and found.library == Setting(2)
    assert {trial.setting.alg_id for trial in found.trials} == {0, 1, 2, 3}
    assert {trial.setting.split_k for trial in found.trials} == {1, -1, 2, 4}
    assert found.wrong == found.refused == 0
    assert all(abs(trial.error.rms_ratio - 1) < 0.1 for trial in found.trials)


@pytest.mark.parametrize("fault", ["one tile", "scaled", "nothing written", "NaN"])
def test_a_search_rejects_a_fastest_algorithm_with_wrong_values(probing, monkeypatch, fault):
    real, last = cslt.multiply, []

    def planted(x, compressed, setting):
        y = real(x, compressed, setting)
        if setting.alg_id == 1:
            if fault == "one tile":
                y[:8, :16] = y[:8, 16:32].clone()
            if fault == "scaled":
                y *= 1.02
            if fault == "nothing written":
                return last[-1]  # as if the memory still held the product of the call before
            if fault == "NaN":
                y[0, 0] = torch.nan
        last.append(y)
        return y

    monkeypatch.setattr(cslt, "multiply", planted)
    found = search()
    assert found.best.setting.alg_id == 3
    assert found.wrong == 2  # with and without segment-K


def test_a_search_counts_refusals_apart_from_wrong_values(probing, monkeypatch):
    real = cslt.multiply

    def refusing(x, compressed, setting):
        if setting.split_k != 1:
            raise RuntimeError("CUDA error: operation not supported when calling `cusparseLtMatmulPlanInit`")
        return real(x, compressed, setting)

    monkeypatch.setattr(cslt, "multiply", refusing)
    found = search()
    assert found.best.setting == Setting(1) and found.wrong == 0 and found.refused == len(found.trials) - 4


@pytest.mark.parametrize("fault", ["the next kernel fails", "an accelerator's error"])
def test_a_broken_context_ends_the_search_as_no_refusal_does(probing, monkeypatch, fault):
    real, tried = cslt.multiply, []

    def breaking(x, compressed, setting):
        tried.append(setting.alg_id)
        if setting.alg_id != 1:
            return real(x, compressed, setting)
        if fault == "an accelerator's error":
            raise torch.AcceleratorError("CUDA error: an illegal instruction was encountered")
        monkeypatch.setattr(torch.cuda, "synchronize", fails)
        raise RuntimeError("CUDA error: internal error when calling `cusparseLtMatmul`")

    def fails(device):
        raise torch.AcceleratorError("CUDA error: an illegal instruction was encountered")

    monkeypatch.setattr(cslt, "multiply", breaking)
    with pytest.raises(BrokenContextError, match=r"illegal instruction|internal error"):
        search()
    assert tried[-1] == 1  # nothing was tried in the broken context


def test_an_internal_error_that_leaves_the_context_whole_is_a_refusal(probing, monkeypatch):
    real = cslt.multiply

    def refusing(x, compressed, setting):
        if setting.alg_id == 1:
            raise RuntimeError("CUDA error: internal error when calling `cusparseLtMatmul`")
        return real(x, compressed, setting)

    monkeypatch.setattr(cslt, "multiply", refusing)
    found = search()
    assert found.best.setting.alg_id == 3 and "internal error" in found.trial(Setting(1)).refused


def test_every_step_is_announced_before_it_is_taken(probing, monkeypatch):
    told = []
    library = torch._C._cusparselt.mm_search
    monkeypatch.setattr(torch._C._cusparselt, "mm_search", lambda *args: told.append("mm_search!") or library(*args))
    found = search(started=told.append)
    assert told[:3] == [cslt_tune.OWN_SEARCH, "mm_search!", Setting(0)]
    assert {trial.setting for trial in found.trials} == set(told[2:])


@pytest.mark.parametrize(
    ("without", "told", "count"),
    [
        ([cslt_tune.OWN_SEARCH], [cslt_tune.COUNT], 4),
        ([cslt_tune.OWN_SEARCH, cslt_tune.COUNT], [], max(cslt_tune.FIRST) + 1),
    ],
)
def test_a_search_goes_on_without_the_librarys_own_where_that_crashes(probing, monkeypatch, without, told, count):
    monkeypatch.setattr(cslt_tune.Probe, "clock", lambda self, setting, samples: 1.0 + abs(setting.alg_id - 2))
    steps = []
    found = search(without=without, started=steps.append)
    assert [step for step in steps if isinstance(step, str)] == told
    assert found.library is None and found.best.setting.alg_id == 2
    assert {trial.setting.alg_id for trial in found.trials} == set(range(count))


def test_a_refusal_of_the_librarys_own_search_costs_only_its_pick(probing, monkeypatch):
    def refuse(*args):
        raise RuntimeError("CUDA error: operation not supported when calling `cusparseLtMatmulSearch`")

    monkeypatch.setattr(torch._C._cusparselt, "mm_search", refuse)
    monkeypatch.setattr(cslt_tune.Probe, "clock", lambda self, setting, samples: 1.0 + abs(setting.alg_id - 2))
    found = search()
    assert found.library is None and found.best.setting.alg_id == 2
