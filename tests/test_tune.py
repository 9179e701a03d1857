"""Tuning ahead of a run, with a made-up GPU and searches. Real ones: tests/gpu."""

from types import SimpleNamespace

import pytest
import torch

from blockshock_lib import launch, params, tune
from blockshock_lib.__main__ import main
from blockshock_lib.comm import choices as all_reduces
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.errors import ParamsError
from blockshock_lib.sparse24 import choices, cslt, cslt_tune
from blockshock_lib.sparse24.choices import Key, Versions
from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import Error, Found, Setting, Trial
from blockshock_lib.tune import Product

CONFIG, CPU = Config(1, 2, 1, 4, 1), torch.device("cpu")
RIGHT, WRONG = Error(1.0, 1.0), Error(40.0, 9.0)
FOUND = Found((Trial(CONFIG, RIGHT, 0.02), Trial(Setting(17), RIGHT, 0.05), Trial(Setting(3), WRONG)))


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """The keys that were searched for, and what each search finds."""
    seen = SimpleNamespace(keys=[], found=FOUND)
    versions = Versions("580", "2.11.0", 800, "0123")

    def searched(key, device):
        seen.keys.append(key)
        kept = [best for kind in (Setting, Config) if (best := seen.found.best(kind))]
        if kept:
            choices.keep(key, {best.way: best.ms for best in kept})
        return seen.found

    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(cslt, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(cslt_tune, "searched", searched)
    monkeypatch.setattr(
        cslt_tune,
        "key_of",
        lambda shape, rows, dtype, device: Key(*shape, rows, str(dtype).removeprefix("torch."), "some GPU", versions),
    )
    monkeypatch.setattr(tune.roofline, "measure", lambda device, dtype, group: Ceilings(4000.0, 700.0, 0.0))
    return seen


def load(phase="phase1", **settings):
    """Parameters of a phase on two GPUs."""
    given = {"sweep.n": [4096], "sweep.b": [16, 64]} | {key.replace("__", "."): v for key, v in settings.items()}
    return params.load(phase, given, choose={"hardware": "cuda"})


def tuned(products, gpu):
    said = []
    return tune.tune_products(products, CPU, said.append), said


def test_shapes_are_combined_and_square_where_k_is_left_out():
    assert tune.of_shapes([128, 256], [], [1, 8], "bf16") == [
        Product(n, n, b, "bf16") for n in (128, 256) for b in (1, 8)
    ]
    assert tune.of_shapes([128], [64, 192], [8], "fp16") == [Product(128, k, 8, "fp16") for k in (64, 192)]


@pytest.mark.parametrize(("n", "k", "b"), [(100, 64, 1), (64, 96, 1), (64, 64, 0), (0, 64, 1)])
def test_a_size_that_no_product_has_is_refused(n, k, b):
    with pytest.raises(ParamsError, match="multiples of 64"):
        tune.of_shapes([n], [k], [b], "bf16")


def test_a_phase_asks_for_the_term_of_each_rank_and_batch_once():
    assert tune.of_phase(load()) == [Product(4096, 4096, b, "bf16") for b in (16, 64)]
    four = params.load("phase1", {"sweep.n": [4096], "sweep.b": [16]}, choose={"hardware": "cuda-4"})
    assert tune.of_phase(four) == [Product(4096, 2048, 16, "bf16")]


def test_a_phase_that_goes_backward_asks_for_the_transposed_term_too_where_its_mask_allows():
    four = {"sweep.n": [4096], "sweep.b": [16]}
    for mask, count in (("checkerboard", 2), ("random", 1)):
        loaded = params.load("phase2", four, choose={"hardware": "cuda-4", "mask": mask})
        both = [Product(4096, 2048, 16, "bf16"), Product(2048, 4096, 16, "bf16")]
        assert tune.of_phase(loaded) == both[:count]


@pytest.mark.parametrize("settings", [{"product": "reference"}, {"dtype": "fp32"}, {"methods": ["dense"]}])
def test_what_has_no_tuned_product_asks_for_none(settings):
    assert tune.of_phase(load(**settings)) == []


def test_the_ranks_sums_are_those_of_y_and_backward_of_dx_by_size_class():
    assert tune.sums_of_phase(load()) == [16 * 4096 * 2, 64 * 4096 * 2]
    wide = {"sweep__n": [], "sweep__features": [[8192, 4096]], "sweep__b": [16]}
    assert tune.sums_of_phase(load(**wide)) == [1 << 17]
    assert tune.sums_of_phase(load("phase2", **wide)) == [1 << 17, 1 << 18]
    alone = params.load("phase1", {"sweep.n": [4096], "sweep.b": [16]}, choose={"hardware": "cuda-1"})
    assert tune.sums_of_phase(alone) == []


def test_a_product_is_searched_once_and_its_line_tells_the_best_of_each_kind(gpu):
    product = Product(4096, 4096, 13, "bf16")
    done, said = tuned([product], gpu)
    least = 1000 * (4096 * 4096 * 9 / 8 + 2 * 13 * 4096 * 2) / 4e12
    assert done and [key.B for key in gpu.keys] == [16]
    assert said[0] == (
        "4096x4096 B=16 bfloat16: small tiles 1 warpgroups 2 unroll 1 depth 4 split 1 0.0200 ms "
        f"({100 * least / 0.02:.0f}% of floor), cslt alg_id 17 split_k 1 split_k_mode -1 0.0500 ms "
        "[3 tried: 1 wrong, 0 refused, 0 crashed]"
    )
    assert said[1].endswith("choices.json")
    again, said = tuned([product], gpu)
    assert again and len(gpu.keys) == 1 and said[0].endswith("[kept before]") and "0.0200 ms" in said[0]


def test_a_large_products_floor_is_its_arithmetic():
    ceilings = Ceilings(4000.0, 700.0, 0.0)
    assert tune.least_ms(Product(8192, 8192, 8192, "bf16"), ceilings) == pytest.approx(8192**3 / 700e12 * 1000)


def test_a_product_without_a_right_way_is_told_and_fails(gpu):
    gpu.found = Found((Trial(Setting(), WRONG),), failed="given up after 1 crashes")
    done, said = tuned([Product(128, 128, 8, "bf16"), Product(128, 128, 16, "bf16")], gpu)
    assert not done and len(gpu.keys) == 2
    assert said[0].startswith("128x128 B=8 bfloat16: nothing is right [1 tried: 1 wrong")
    assert "given up after 1 crashes" in said[0]


def test_all_reduces_are_tuned_on_the_ranks_and_their_times_told(monkeypatch):
    asked, said = [], []
    way, nccl = all_reduces.Way("two-shot", 16), all_reduces.Way("nccl")
    monkeypatch.setattr(launch, "call", lambda fn, *args, **options: asked.append((fn, args, options["processes"])))
    monkeypatch.setattr(all_reduces, "load", lambda: {all_reduces.Key.of(1 << 17, 2, CPU): {nccl: 0.009, way: 0.008}})
    tune.tune_sums([1 << 17, 1 << 20], 2, CPU, said.append)
    assert asked == [(tune._tune_sums, ([1 << 17, 1 << 20],), 2)]
    assert said[:2] == [
        "all-reduce of 128 KiB on 2: two-shot 0.0080 ms, nccl 0.0090 ms",
        "all-reduce of 1024 KiB on 2: one way only",
    ]
    tune.tune_sums([], 1, CPU, said.append)
    assert len(asked) == 1 and len(said) == 3


def test_real_ranks_take_the_call():
    assert launch.call(tune._tune_sums, [1 << 17], processes=2, seconds=60) == [None, None]


@pytest.mark.parametrize("flags", [[], ["--phase", "phase3"], ["--n", "4096", "--b", "16"]])
def test_a_machine_without_a_gpu_says_why_nothing_can_be_tuned(capsys, flags):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["tune", *flags]) == 2
    assert capsys.readouterr().err == "error: nothing can be tuned on this machine: no CUDA device is available\n"


@pytest.mark.parametrize("flags", [["--n", "64"], ["--b", "8"], ["--k", "64"], ["--dtype", "fp16"]])
def test_shapes_that_are_not_whole_are_refused(capsys, flags):
    assert main(["tune", *flags]) == 2
    assert "--n and --b go together" in capsys.readouterr().err


@pytest.mark.parametrize(("right", "status"), [(True, 0), (False, 1)])
def test_the_verb_tunes_what_is_named_and_its_status_says_whether_all_is_right(gpu, capsys, right, status):
    gpu.found = FOUND if right else Found(failed="given up")
    assert main(["tune", "--n", "128", "--k", "192", "--b", "8", "16", "--dtype", "fp16"]) == status
    assert [(key.N, key.K, key.B, key.dtype) for key in gpu.keys] == [
        (128, 192, 8, "float16"),
        (128, 192, 16, "float16"),
    ]
    assert capsys.readouterr().out.count("128x192") == 2
