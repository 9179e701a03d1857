"""Tuning on a real GPU: what is chosen is right, kept, and as fast as the best; what is wrong or crashes is not chosen.

`python -m tests.gpu.test_tuner` prints the table of tuned products alone. Needs torch with CUDA, and pytest.
"""

import gc
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from blockshock_lib.sparse24 import choices, cslt, cslt_tune, small, tuned, tuner, ways
from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuning import Setting

from .test_products import assert_right, backend_for, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
]
KINDS = {"cslt": (Setting,), "small": (Config,), "tuned": (Setting, Config)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(cslt_tune, "chosen", {})


def device():
    return torch.device("cuda", torch.cuda.current_device())


def kept(packed, rows):
    return choices.find(cslt_tune.key_of(packed.shape, rows, packed.dtype, device()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "b"), [(512, 1024, 3), (1024, 512, 64), (192, 320, 128), (2048, 2048, 512)])
def test_a_tuned_product_is_right_and_one_search_is_kept_for_all_backends(n, k, b, dtype, monkeypatch):
    rows = -(-b // 8) * 8
    searches, real = [], cslt_tune.searched
    monkeypatch.setattr(cslt_tune, "searched", lambda *args: searches.append(args) or real(*args))
    for name, kinds in KINDS.items():
        backend = backend_for(name, dtype)
        if name == "small" and b > small.MOST_ROWS:
            continue
        x, weight, mask = problem(n, k, b, dtype)
        packed = backend.pack(weight, mask)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*(damaged|stale|not kept|default stays)")
            backend.tune(x, packed)
        found = kept(packed, rows)
        assert packed.extra == {rows: min((way for way in found if isinstance(way, kinds)), key=found.get)}
        for _ in range(5):  # some algorithms have been wrong now and then only
            x.copy_(torch.randn_like(x))
            assert_right(backend.linear(x, packed), x, weight, mask)
    assert len(searches) == 1


def test_wrong_crashing_and_hanging_ways_cost_a_candidate_each_and_this_process_nothing():
    backend_for("small")
    crashing = small.candidates((1024, 1024), 16)[0]
    one = tuner.Tuner((sys.executable, "-m", "tests.gpu.planted_tuner"), silence=10)
    found = one.search((1024, 1024), 16, torch.bfloat16, device())
    one.close()
    assert not found.failed and found.best() is not None
    wrong = [t for t in found.trials if isinstance(t.way, Config) and t.way.split == 1]
    wrong = [trial for trial in wrong if trial.way != crashing]
    assert wrong and all(trial.wrong for trial in wrong)
    silent = [trial for trial in found.trials if isinstance(trial.way, Setting) and trial.way.alg_id == 1]
    assert silent and all(trial.wrong for trial in silent)
    assert found.trial(crashing).crashed and found.trial(Setting(2)).crashed
    assert "without a word" in found.trial(Setting(3)).crashed
    chosen = found.best(Config).way  # the planted child alone shows its fault: in this process it would be right
    assert chosen != crashing and chosen.split > 1
    x, weight, mask = problem(1024, 1024, 16)
    packed = cslt.pack(weight, mask)
    for kind in (Setting, Config):
        packed.extra[16] = found.best(kind).way
        assert_right(tuned.linear(x, packed), x, weight, mask)


def test_tuning_leaves_this_process_with_the_memory_it_had():
    backend = backend_for("tuned")
    x, weight, mask = problem(2048, 2048, 64)
    packed = backend.pack(weight, mask)
    assert kept(packed, 64) == {}  # asks for the versions, which tries a small weight once
    gc.collect()  # what earlier tests left must not go meanwhile
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backend.tune(x, packed)
    assert torch.cuda.memory_allocated() == before == torch.cuda.max_memory_allocated()


HELD = """
import json, torch
from blockshock_lib.sparse24 import cslt_tune
held = []
for _ in range(2):  # the first also allocates cuBLAS's lasting workspace
    cslt_tune.search((8192, 8192), 64, torch.bfloat16, torch.device("cuda", 0))
    held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
print(json.dumps(held))
"""


def test_a_search_gives_its_memory_back():
    backend_for("cslt")
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", HELD], cwd=root, stdout=subprocess.PIPE, check=True, timeout=300)
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first[1] < 2**27, "the probe's weights are still held"
    assert second[0] - first[0] < 2**20 and second[1] - first[1] < 2**24


def test_the_verb_tunes_prints_and_finds_it_again(tmp_path):
    backend_for("cslt")
    line = [sys.executable, "-m", "blockshock_lib", "tune", "--n", "2048", "--b", "16", "256"]
    for told in (" tried: ", "[kept before]"):
        done = subprocess.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("2048x2048 B=") == done.stdout.count("% of floor") == done.stdout.count(told) == 2
    assert (tmp_path / "choices.json").exists()


def test_the_choice_is_never_slower_than_the_librarys_default_and_prints_its_table(capsys):
    backend_for("cslt")
    with capsys.disabled():
        print()
        rows = list(table())
    assert all(best <= 1.05 * default for default, best in rows)


def table(n=4096, batches=(16, 64, 256, 4096)):
    """Print a few lines a batch; yields (default ms, best ms) of each. The first search also starts its process."""
    version = torch.backends.cusparselt.version()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuSPARSELt {version}, bf16, N = K = {n}")
    print("    B   default  mm_search best cslt best small  right wrong refused  search s")
    for b in batches:
        start = time.perf_counter()
        found = tuner.shared().search((n, n), b, torch.bfloat16, device())
        seconds = time.perf_counter() - start
        ms = [found.trial(Setting()), found.library and found.trial(found.library), found.best(Setting)]
        ms = [trial.ms if trial else float("nan") for trial in (*ms, found.best(Config))]
        right = sum(trial.right for trial in found.trials)
        print(
            f"{b:5d} {ms[0]:9.4f} {ms[1]:10.4f} {ms[2]:9.4f} {ms[3]:10.4f} "
            f"{right:6d} {found.wrong:5d} {found.refused:7d} {seconds:9.2f}   {ways.words(found.best().way)}"
        )
        for trial in found.trials:
            if trial.wrong:
                print(f"      wrong: {ways.words(trial.way)} errors {trial.error}")
        for crash in found.crashes:
            print(f"      crashed: {crash}")
        reasons = {trial.refused for trial in found.trials if trial.refused}
        for reason in sorted(reasons)[:3]:
            print(f"      refused: {reason[:150]}")
        yield ms[0], found.best().ms


if __name__ == "__main__":
    list(table())
