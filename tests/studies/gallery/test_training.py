"""The training phase: every way's step is its formulas, planted faults are refused; its table, figure and verdict."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from blockshock_lib.kernels.patterns import dense, two_four
from blockshock_lib.kernels.sparse24 import compress, cslt, packing, pattern
from blockshock_lib.kernels.sparse24.backends import BACKENDS
from blockshock_lib.report import verdicts
from blockshock_lib.studies.gallery import steps, training
from blockshock_lib.studies.gallery.methods import WAYS
from blockshock_lib.studies.gallery.params import columns
from tests.report.frames import row
from tests.studies.gallery import cases
from tests.studies.gallery.cases import ABOUT, opened, said

RUNS = ("step_dense", "step_t1", "step_t3", "step_before", "step_after")  # on a CPU


def asked(*methods, act="GELU"):
    settings = cases.QUICK | {"sweep.weights": [[64, 128]], "sweep.patterns": [act]}
    return cases.asked("training", settings | {"methods": list(methods)})


def measured(*methods, **more):
    return cases.measured(asked(*methods, **more))


@pytest.mark.parametrize("act", ["GELU", "squared ReLU"])
def test_every_way_is_its_formulas_and_says_where_it_has_no_kernel(act):
    rows = measured(*WAYS, act=act)
    found = said(rows)
    assert [name for name, words in found.items() if words == "ok"] == list(RUNS)
    assert all("GPU" in found[name] for name in WAYS if name not in RUNS)
    timed = {(one.method, one.metric) for one in rows.itertuples() if one.value > 0}
    assert {(name, f"{part}_call") for name in RUNS for part in training.STEP} <= timed


def test_autograd_gives_the_same_gradients():
    problem = opened(asked("step_before", "step_after"))
    for name in ("step_before", "step_after"):
        runner = problem.build(name)
        h, weight = (x.double().requires_grad_() for x in (problem.x, problem.weight))
        keep = runner.operand.keep.mask()
        a = problem.f(h * keep) if name == "step_before" else problem.f(h) * keep
        y = a @ weight.t()
        true = y, *torch.autograd.grad(y, (h, weight), problem.dy.double())
        for made, right in zip(runner.step(), true, strict=True):
            assert (made - right).abs().max() < 1e-4 * right.abs().max()


def test_the_dense_products_of_a_step_are_searched_as_their_operands_lie(monkeypatch):
    asked = []

    def choice(store, ways, packed, x, about):
        asked.append((*packed.shape, len(x), *about.get("lie", ())))
        return ways[-1]  # in the most parts

    monkeypatch.setattr(dense, "on_gpu", lambda *place: "")
    monkeypatch.setattr(dense.tune, "choice", choice)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name=None: "default")
    assert said(measured("step_dense", "step_after")) == dict.fromkeys(("step_dense", "step_after"), "ok")
    n, k, b = 64, 128, 64
    assert set(asked) == {(n, k, b), (k, n, b, "N", "T"), (k, b, n, "T", "T")}


def smaller(patch):
    larger = training.larger
    patch.setattr(training, "larger", lambda scores, a: larger(1 / scores, a))


def flipped(patch):
    backward = training.Linear24.backward
    patch.setattr(training.Linear24, "backward", lambda self, dy, x: backward(self, dy.flip(0), x))


@pytest.mark.parametrize(
    ("plant", "method", "words"),
    [
        (smaller, "step_after", "a smaller one of four is kept"),
        (smaller, "step_before", "a smaller one of four is kept"),
        (flipped, "step_t1", "dH: largest error"),
        (flipped, "step_t3", "dH: largest error"),
    ],
)
def test_planted_faults_are_refused(plant, method, words, monkeypatch):
    plant(monkeypatch)
    assert words in said(measured("step_dense", method))[method]


def test_a_kept_weight_of_0_has_a_gradient(monkeypatch):
    linear_of, zero = training.linear_of, torch.zeros(())
    holes = lambda weight: torch.where(torch.rand(weight.shape) < 0.1, zero, weight)  # noqa: E731
    monkeypatch.setattr(training, "linear_of", lambda weight, bias: linear_of(holes(weight), bias))
    assert said(measured("step_dense", "step_t1", "step_t3"))["step_t3"] == "ok"


def test_a_step_packs_as_its_operand_was_tuned_and_checks_no_mask(monkeypatch):
    runner = opened(asked("step_after")).build("step_after")
    weights = torch.randn(2, 64, 128, dtype=torch.bfloat16)
    masks = [training.PATTERN.keep(one.abs(), 0.5, 0) for one in weights]
    monkeypatch.setattr(cslt, "require", lambda *what, **how: None)  # its bytes are made on a CPU too
    monkeypatch.setattr(compress, "known", lambda device: "")
    first, whole = (two_four.TwoFour(*one, 0, BACKENDS["tuned"]) for one in zip(weights, masks, strict=True))
    first.packed.extra[64] = "tuned"
    for module in (packing, pattern):
        monkeypatch.setattr(module, "check_groups", lambda mask: pytest.fail("the host waits for the device"))
    again = first.again(*reversed(pattern.larger(weights[1], weights[1])))
    assert again.packed.extra is first.packed.extra and torch.equal(again.tensors["values"], whole.tensors["values"])
    assert torch.equal(*(one.packed.data[0].view(torch.int16) for one in (again, whole)))
    monkeypatch.setattr(two_four.TwoFour, "again", lambda self, *what: self)
    assert runner.sparsify().packed is runner.operand.packed


def test_tiles_whose_product_is_of_other_places_are_refused(monkeypatch):
    def pack(shift):
        def made(a):
            keep = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).bool().repeat_interleave(2, 0).repeat(64, 128)
            kept = torch.where(keep, a, 0)
            place = SimpleNamespace(to_dense=lambda: kept.t())
            return SimpleNamespace(to_dense=lambda: kept.roll(shift, 0), t=lambda: place)

        return SimpleNamespace(prune_dense_static_sort=made)

    for shift, words in ((0, ""), (1, "other places"), (4, "other places")):
        monkeypatch.setattr(training, "SparseSemiStructuredTensorCUSPARSELT", pack(shift))
        told = training.untrue_tiles.__wrapped__(torch.device("cpu"), torch.bfloat16)
        assert words in told and bool(words) == bool(told)


def planted(speeds, device="cuda", kernel=True, case="a"):
    """A GPU's records: way -> speed over the dense step of 1 ms; `kernel`: whether a graph holds it."""
    shape = {"pattern": "GELU", "n": 1024, "k": 4096, "batch": 8192, "sparsity": 0.5, "block": 0}
    about = columns(shape) | ABOUT | {"phase": "gallery_training", "case": case, "device": device}
    rng, found = np.random.default_rng(0), []
    for group in range(3):
        for name, speed in ({"step_dense": 1.0} | speeds).items():
            rows = [row(name, "check", "bool", 1), row(name, "weight_training", "B", 8 + (name != "step_dense"))]
            for part, share in zip(training.STEP, (0.1, 0.3, 0.6, 1.0), strict=True):
                for kind in ("kernel", "call") if kernel or name == "step_dense" else ("call",):
                    each = share / speed * np.exp(rng.normal(0, 0.002, 4))
                    rows += [row(name, f"{part}_{kind}", "ms", value, at) for at, value in enumerate(each)]
            found += [about | {"group": group} | one for one in rows]
    return pd.DataFrame(found)


@pytest.mark.parametrize(
    ("speeds", "how", "verdict"),
    [
        ({"step_t3": 1.2, "step_after": 0.8}, {}, "supported"),
        ({"step_t3": 1.05}, {}, "refuted"),
        ({"step_t3": 1.1}, {}, "undecided"),
        ({"step_t3": 1.2}, {"device": "cpu"}, "undecided"),
        ({"step_after": 1.2}, {"kernel": False}, "supported"),
        ({}, {}, "undecided"),
        (dict.fromkeys(("step_t1", "step_t3", "step_stock"), 1.108), {}, "undecided"),
    ],
)
def test_training_pays_where_a_whole_step_is_a_tenth_faster(speeds, how, verdict):
    found = steps.p5(planted(speeds, **how))
    assert found.verdict == verdict, found.why


def test_a_case_without_a_graph_is_judged_by_its_calls():
    frame = pd.concat([planted({"step_after": 0.9}), planted({"step_after": 1.2}, kernel=False, case="b")])
    found = steps.speeds(frame).set_index("case")
    assert found["metric"].to_dict() == {"a": "step_kernel", "b": "step_call"}
    assert steps.p5(frame).verdict == "supported"


def test_the_dense_step_is_timed_once_more_as_its_twin():
    assert {f"{part}_call" for part in training.STEP} <= set(measured("step_dense").query("method == 'twin'")["metric"])
    (said,) = verdicts.twin_sentences(planted({"twin": 1.0, "step_t3": 1.2}), steps.AXES)
    assert said.startswith("dense again differs from dense in 0 of 1 cells; smallest difference to claim: ")


def test_the_figure_and_the_tables_say_what_a_step_takes():
    frame = planted({"step_t3": 1.25, "step_after": 0.5}, kernel=False)
    assert "trained packed (T3): 0.80 of the dense step" in steps.break_even(frame).alt
    table = steps.times(frame).set_index("method")
    assert table.loc["Dense", "calls"] == "" and "sparsify" in table.loc["Activations after, strips", "calls"]
    assert steps.held(frame).set_index("method").loc["Weight, trained packed (T3)"].iloc[-3] == 1.125
    assert "T3" in steps.p5(frame).why and "(T3 in 1) beside the dense one: Always here" in steps.answer(frame)
    loose = frame["value"] * np.exp(frame["group"] * frame["method"].eq("step_after"))  # .5, of a larger scatter
    wide = frame.assign(value=loose.where(frame["metric"].str.startswith("step_"), frame["value"]))
    faster = wide["method"].eq("step_after") & wide["metric"].str.startswith("step_")
    said = steps.answer(wide.assign(value=wide["value"].mask(faster, wide["value"] / 20)))
    assert "(T3 in 1) beside the dense one: Always here" in said, "T3 wins, whatever the other may reach"
