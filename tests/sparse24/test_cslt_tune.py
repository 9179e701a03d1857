"""The search and its consumers, against fakes on the CPU. Real values and times: tests/gpu."""

from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.compiled import CompileError
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import choices, cslt, cslt_tune, masks, product, small, tuner
from blockshock_lib.sparse24.choices import Key, Versions
from blockshock_lib.sparse24.probe import Probe
from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import BrokenContextError, Error, Found, Setting, Trial

from .fake_gpu import install

RIGHT = Error(1.0, 1.0)
CONFIGS = [Config(1, 1, 1, 3, 1), Config(1, 2, 1, 3, 1)]
BEST = {"cslt": Setting(17, 2, 1), "small": CONFIGS[1], "tuned": CONFIGS[1]}


@pytest.fixture(autouse=True)
def matmul(monkeypatch):
    return install(monkeypatch)


def problem(b=16, n=128, k=192):
    generator = torch.Generator().manual_seed(b)
    weight = torch.randn(n, k, generator=generator).bfloat16()
    mask = masks.make(SimpleNamespace(family="random", pattern=""), (n, k))
    return torch.randn(b, k, generator=generator).bfloat16(), weight, mask


def packed_by(name, weight, mask):
    return product.BACKENDS[name].pack(weight, mask)


# The consumers


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The cache in a temporary folder, and searches that are counted and find algorithm 17 and a faster config."""
    versions = Versions("580", "2.11.0", 800, "0123")
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(
        cslt_tune, "key_of", lambda shape, rows, dtype, device: Key(*shape, rows, "bfloat16", "some GPU", versions)
    )
    monkeypatch.setattr(cslt_tune, "chosen", {})
    trials = (Trial(CONFIGS[1], RIGHT, 0.2), Trial(Setting(17, 2, 1), RIGHT, 0.5), Trial(Setting(), RIGHT, 0.9))
    planned = SimpleNamespace(count=0, found=Found(trials))

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


@pytest.mark.parametrize("name", BEST)
def test_each_backend_is_given_the_best_of_what_it_can_run(tuned, name):
    x, weight, mask = problem(13)
    packed = packed_by(name, weight, mask)
    product.BACKENDS[name].tune(x, packed)
    assert packed.extra == {16: BEST[name]}


def test_one_search_serves_all_backends_and_further_processes(tuned):
    x, weight, mask = problem()
    for _ in range(2):
        for name in BEST:
            for _ in range(2):
                packed = packed_by(name, weight, mask)
                product.BACKENDS[name].tune(x, packed)
                product.BACKENDS[name].tune(x, packed)
                assert packed.extra == {16: BEST[name]}
        cslt_tune.chosen.clear()  # as in another process
    assert tuned.count == 1


def test_the_library_is_chosen_where_it_is_faster(tuned):
    x, weight, mask = problem()
    tuned.found = Found((Trial(CONFIGS[1], RIGHT, 0.6), Trial(Setting(17), RIGHT, 0.5)))
    packed = packed_by("tuned", weight, mask)
    cslt_tune.tune_any(x, packed)
    assert packed.extra == {16: Setting(17)}


def test_beyond_the_kernels_rows_there_is_nothing_to_tune_for_it(tuned):
    x, weight, mask = problem(small.MOST_ROWS + 1)
    packed = packed_by("small", weight, mask)
    cslt_tune.tune_small(x, packed)
    assert packed.extra == {} and tuned.count == 0


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


NONE_RIGHT = "nothing that was tried gave right values"


@pytest.mark.parametrize(("found", "reason"), [(Found(), NONE_RIGHT), (Found(failed="given up"), "given up")])
@pytest.mark.parametrize("name", ["cslt", "tuned"])
def test_the_default_stays_with_one_warning_when_nothing_is_found(tuned, name, found, reason):
    x, weight, mask = problem()
    tuned.found, tune = found, product.BACKENDS[name].tune
    with pytest.warns(UserWarning, match=f"128x192 B=16 bfloat16: {reason}: the default stays"):
        tune(x, packed_by(name, weight, mask))
    packed = packed_by(name, weight, mask)
    tune(x, packed)
    assert tuned.count == 1 and packed.extra == {16: Setting()} and not choices.default_path().exists()


def test_the_kernel_alone_has_no_default_to_stay_with(tuned):
    x, weight, mask = problem()
    tuned.found = Found((Trial(Setting(17), RIGHT, 0.5), Trial(CONFIGS[0], Error(9.0, 9.0))))
    packed = packed_by("small", weight, mask)
    with pytest.raises(UnsupportedError, match="no config of the small-batch kernel is known to be right"):
        cslt_tune.tune_small(x, packed)
    assert not packed.extra


def test_what_crashed_is_told_and_the_best_of_each_kind_kept_all_the_same(tuned):
    x, weight, mask = problem()
    tuned.found = Found(tuned.found.trials, crashes=("mm_search (SIGILL)",))
    packed = cslt.pack(weight, mask)
    with pytest.warns(UserWarning, match=r"left out what crashed: mm_search \(SIGILL\)"):
        cslt_tune.tune(x, packed)
    key = cslt_tune.key_of(packed.shape, 16, packed.dtype, x.device)
    assert choices.find(key) == {Setting(17, 2, 1): 0.5, CONFIGS[1]: 0.2}


def test_a_default_that_crashes_is_never_left_in_use(tuned):
    x, weight, mask = problem()
    crash = Trial(Setting(), crashed="SIGILL")
    tuned.found = Found((crash,), crashes=("cslt alg_id 0 split_k 1 split_k_mode -1 (SIGILL)",))
    packed = cslt.pack(weight, mask)
    with pytest.warns(UserWarning, match="crashed"), pytest.raises(UnsupportedError, match="default algorithm crashes"):
        cslt_tune.tune(x, packed)
    assert not packed.extra


def test_a_changed_kernel_is_another_version(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 800)
    before = cslt_tune.versions.__wrapped__(torch.device("cpu"))
    assert len(before.kernel) == 12 and before == cslt_tune.versions.__wrapped__(torch.device("cpu"))
    changed = tmp_path / "small.cu"
    changed.write_bytes(small.SOURCE.read_bytes() + b"//")
    monkeypatch.setattr(small, "SOURCE", changed)
    assert cslt_tune.versions.__wrapped__(torch.device("cpu")).kernel not in (before.kernel, "")
    monkeypatch.setattr(small, "unsupported", lambda device, dtype: "no compiler")
    assert cslt_tune.versions.__wrapped__(torch.device("cpu")).kernel == ""


# The search


@pytest.fixture
def probing(monkeypatch):
    """Times are made up: of the configs the second, of the algorithms number 1 is the fastest, and slower than both."""
    monkeypatch.setattr(small, "candidates", lambda shape, rows: CONFIGS if rows <= small.MOST_ROWS else [])
    times = {0: 4.0, 1: 1.0, 2: 3.0, 3: 2.0} | dict(zip(CONFIGS, (0.5, 0.25), strict=True))
    monkeypatch.setattr(Probe, "clock", lambda self, way, samples: times[getattr(way, "alg_id", way)])


def search(shape=(128, 1024), rows=16, seconds=600, **options):
    """With time for every candidate, on a busy machine too."""
    return cslt_tune.search(shape, rows, torch.bfloat16, torch.device("cpu"), seconds=seconds, **options)


def settings(found):
    return [trial.way for trial in found.trials if isinstance(trial.way, Setting)]


def test_a_search_tries_every_algorithm_every_config_and_the_librarys_pick(probing):
    found = search()
    assert found.best().way == found.best(Config).way == CONFIGS[1]
    assert found.best(Setting).way.alg_id == 1 and found.library == Setting(2)
    assert [trial.way for trial in found.trials[:3]] == [*CONFIGS, Setting()]
    assert {setting.alg_id for setting in settings(found)} == {0, 1, 2, 3}
    assert {setting.split_k for setting in settings(found)} == {1, -1, 2, 4}
    assert found.wrong == found.refused == 0
    assert all(abs(trial.error.rms_ratio - 1) < 0.1 for trial in found.trials)


@pytest.mark.parametrize("missing", ["a large batch", "no compiler", "a crash while compiling"])
def test_the_library_alone_is_tried_where_the_kernel_cannot_run(probing, monkeypatch, missing):
    options = {"without": [cslt_tune.COMPILING]} if missing == "a crash while compiling" else {}
    if missing == "no compiler":
        monkeypatch.setattr(small, "unsupported", lambda device, dtype: "no compiler")
    found = search(rows=136 if missing == "a large batch" else 16, **options)
    assert found.best().way.alg_id == 1 and len(settings(found)) == len(found.trials)


def wrong(real):
    def planted(x, buffer, shape, way, out=None, bias=None):
        y = real(x, buffer, shape, way, out, bias)
        return y.mul_(1.02) if way == CONFIGS[1] or getattr(way, "alg_id", None) == 1 else y

    return planted


def test_a_search_rejects_the_fastest_of_either_kind_with_wrong_values(probing, monkeypatch):
    monkeypatch.setattr(cslt, "multiply", wrong(cslt.multiply))
    monkeypatch.setattr(small, "multiply", wrong(small.multiply))
    found = search()
    assert found.best().way == CONFIGS[0] and found.best(Setting).way.alg_id == 3
    assert found.wrong == 3  # algorithm 1 with and without segment-K


def test_a_search_counts_refusals_apart_from_wrong_values(probing, monkeypatch):
    library, kernel = cslt.multiply, small.multiply

    def refusing(x, buffer, shape, setting, out=None, bias=None):
        if setting.split_k != 1:
            raise RuntimeError("CUDA error: operation not supported when calling `cusparseLtMatmulPlanInit`")
        return library(x, buffer, shape, setting, out, bias)

    def compiling(x, buffer, shape, config, out=None, bias=None):
        if config == CONFIGS[1]:
            raise CompileError("too many registers")
        return kernel(x, buffer, shape, config, out, bias)

    def prepare(configs, rows, dtype, device):
        raise CompileError("too many registers")

    monkeypatch.setattr(cslt, "multiply", refusing)
    monkeypatch.setattr(small, "multiply", compiling)
    monkeypatch.setattr(small, "prepare", prepare)
    found = search()
    assert found.best(Setting).way == Setting(1) and found.best().way == CONFIGS[0]
    assert found.wrong == 0 and found.refused == len(found.trials) - 5
    assert found.trial(CONFIGS[1]).refused == "too many registers"


@pytest.mark.parametrize("fault", ["the next kernel fails", "an accelerator's error"])
def test_a_broken_context_ends_the_search_as_no_refusal_does(probing, monkeypatch, fault):
    real, tried = cslt.multiply, []

    def breaking(x, buffer, shape, setting, out=None, bias=None):
        tried.append(setting.alg_id)
        if setting.alg_id != 1:
            return real(x, buffer, shape, setting, out, bias)
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

    def refusing(x, buffer, shape, setting, out=None, bias=None):
        if setting.alg_id == 1:
            raise RuntimeError("CUDA error: internal error when calling `cusparseLtMatmul`")
        return real(x, buffer, shape, setting, out, bias)

    monkeypatch.setattr(cslt, "multiply", refusing)
    found = search()
    assert found.best(Setting).way.alg_id == 3 and "internal error" in found.trial(Setting(1)).refused


def test_every_step_is_announced_before_it_is_taken(probing, monkeypatch):
    told = []
    library = torch._C._cusparselt.mm_search
    monkeypatch.setattr(torch._C._cusparselt, "mm_search", lambda *args: told.append("mm_search!") or library(*args))
    monkeypatch.setattr(small, "prepare", lambda *args: told.append("compiled!"))
    found = search(started=told.append)
    assert told[:4] == [cslt_tune.COMPILING, "compiled!", cslt_tune.OWN_SEARCH, "mm_search!"]
    assert told[4] == CONFIGS[0] and {trial.way for trial in found.trials} == set(told[4:])


@pytest.mark.parametrize(
    ("without", "told", "count"),
    [
        ([cslt_tune.OWN_SEARCH], [cslt_tune.COMPILING, cslt_tune.COUNT], 4),
        ([cslt_tune.OWN_SEARCH, cslt_tune.COUNT], [cslt_tune.COMPILING], max(cslt_tune.FIRST) + 1),
    ],
)
def test_a_search_goes_on_without_the_librarys_own_where_that_crashes(probing, monkeypatch, without, told, count):
    monkeypatch.setattr(Probe, "clock", lambda self, way, samples: 1.0 + abs(way[0] - 2))
    steps = []
    found = search(without=without, started=steps.append)
    assert [step for step in steps if isinstance(step, str)] == told
    assert found.library is None and found.best(Setting).way.alg_id == 2
    assert {setting.alg_id for setting in settings(found)} == set(range(count))


def test_a_refusal_of_the_librarys_own_search_costs_only_its_pick(probing, monkeypatch):
    def refuse(*args):
        raise RuntimeError("CUDA error: operation not supported when calling `cusparseLtMatmulSearch`")

    monkeypatch.setattr(torch._C._cusparselt, "mm_search", refuse)
    monkeypatch.setattr(Probe, "clock", lambda self, way, samples: 1.0 + abs(way[0] - 2))
    found = search()
    assert found.library is None and found.best(Setting).way.alg_id == 2
