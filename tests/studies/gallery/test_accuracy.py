"""The accuracy phase: a teacher is the truth, planted faults are refused, a stopped training goes on; its verdicts."""

import numpy as np
import pandas as pd
import pytest
import torch

from blockshock_lib.engine import experiment
from blockshock_lib.layers.gpt import training
from blockshock_lib.layers.pattern_linear import PatternLinear
from blockshock_lib.layers.sparsify import Sparse24, Unstructured, fake
from blockshock_lib.studies.gallery import accuracy, losses, results
from blockshock_lib.studies.gallery.methods import ARMS, DENSE, PRUNED, TRAINED
from blockshock_lib.studies.gallery.params import columns, expand
from tests.report.frames import row
from tests.studies.gallery import cases
from tests.studies.gallery.cases import ABOUT, STUDY, measured, opened, said
from tests.studies.gpt.test_problem import data  # noqa: F401

TINY = {"layers": 1, "heads": 2, "vocab": 32, "context": 16, "batch": 8, "tokens": 768, "validation_tokens": 256}
TINY |= {"seeds": 1, "calibration": 32}


def asked(*methods, **settings):
    settings = {f"accuracy.{name}": value for name, value in (TINY | settings).items()}
    return cases.asked("accuracy", settings | {"methods": list(methods)})


@torch.no_grad()
def test_a_teacher_is_2to4_already_and_loses_nothing_where_2to4_is_pruned_of_it():
    problem = opened(asked(DENSE))
    teacher = problem.trained = problem.task.model
    best = training.validate(teacher, problem.task.held_out)

    class Run:
        agree, refuse = (
            staticmethod(lambda fn: fn()),
            staticmethod(lambda reason: pytest.fail(reason) if reason else None),
        )

    lost = {}
    for name in PRUNED:
        *_, last = accuracy.Pruned(problem, ARMS[name]).samples(Run, ())
        lost[ARMS[name].pattern, ARMS[name].method] = last.value - best
    kept = {key: abs(value) < 1e-5 for key, value in lost.items()}
    assert all(kept["2:4", method] for method in ("magnitude", "wanda", "sparsegpt"))
    assert kept["unstructured", "magnitude"] and lost["rows", "magnitude"] > lost["blocks", "sparsegpt"] > 0.05


def test_every_arm_is_checked_trained_and_pruned():
    params = asked(*ARMS)
    assert [case.methods for case in expand(params)] == [(DENSE, *PRUNED), *((name,) for name in TRAINED)]
    rows = pd.concat([measured(params, case) for case in range(1 + len(TRAINED))])
    assert said(rows) == dict.fromkeys(ARMS, "ok")
    ends = rows[rows["metric"].eq("validation_loss") & rows["repeat"].eq(6)].set_index("method")["value"]
    assert set(ends.index) == set(ARMS) and ends[DENSE] < ends["magnitude_rows"]


def larger(patch):
    keep = Sparse24.keep
    patch.setattr(Sparse24, "keep", lambda self, scores: ~keep(self, scores))


def whole(patch):
    patch.setattr(Unstructured, "keep", lambda self, scores: torch.ones_like(scores, dtype=torch.bool))


def soft(patch):
    sum_of = fake.soft_threshold
    patch.setattr(fake, "soft_threshold", lambda weight: 1.01 * sum_of(weight).roll(1, 0))


def unbiased(patch):
    multiply = PatternLinear.forward
    patch.setattr(PatternLinear, "forward", lambda self, x: multiply(self, x) - self.bias)


@pytest.mark.parametrize(
    ("plant", "arm", "words"),
    [
        (larger, "trained_once", "logits: largest error"),
        (soft, "trained_s_ste", "logits: largest error"),
        (whole, "magnitude_any", "keeps 100.0% of its units"),
        (unbiased, "magnitude_rows", "logits: largest error"),
    ],
)
def test_planted_faults_are_refused(plant, arm, words, monkeypatch):
    plant(monkeypatch)
    rows = measured(asked(DENSE, arm), case=int(arm in TRAINED))
    assert words in said(rows)[arm]


@pytest.mark.parametrize("arm", TRAINED)
def test_a_stopped_training_goes_on_to_the_same_numbers(arm, tmp_path, monkeypatch):
    params, state, save = asked(DENSE, arm, validations=3), tmp_path / "state", training.Trainer.save
    apart = measured(params, 1)

    def stop(self, path):
        save(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "save", stop)
    done = []
    with pytest.raises(KeyboardInterrupt):
        experiment.measure(opened(params, 1, state), params, STUDY, emit=done.extend)
    monkeypatch.setattr(training.Trainer, "save", save)
    rest = pd.DataFrame(experiment.measure(opened(params, 1, state), params, STUDY, done=done))
    for metric in ("train_loss", "validation_loss"):
        both = [rows[rows["metric"].eq(metric)][["repeat", "value"]].to_numpy().tolist() for rows in (apart, rest)]
        assert both[0] == both[1] and len(both[0]) >= 3


def test_a_corpus_is_learned_as_the_gpt_study_does(data, tmp_path):  # noqa: F811
    rows = measured(asked(DENSE, "wanda_24", task="packages", vocab=300, data=data))
    assert said(rows) == {DENSE: "ok", "wanda_24": "ok"}
    digest = rows.loc[rows["metric"].eq("corpus"), "detail"].item()
    assert digest == next(path.name for path in (tmp_path / "corpus").iterdir() if path.is_dir())


def planted(gaps, seeds=6, width=384, run="a", heads=6, task="c0", took=1.0, dense=3.0):
    """Records of losses: by arm the nats over the dense model's 3 of a seed, which differ from seed to seed; `took`:
    seconds of pruning.
    """
    case = {"pattern": "GPT", "n": width, "k": width, "batch": 64, "sparsity": 0.5, "block": 16, "layers": 12}
    about = columns(case | {"heads": heads, "vocab": 8192, "context": 512, "tokens": 64 * 512 * 10, "recipe": "a"})
    about |= ABOUT | {"run": run, "phase": "gallery_accuracy", "group": 0}
    draw, found = np.random.default_rng(0), []
    for seed in range(seeds):
        base = dense + draw.normal(0, 0.1)
        for name, gap in {DENSE: 0.0, **gaps}.items():
            end = base + gap + draw.normal(0, 0.002) * (name != DENSE)
            rows = [row(name, "check", "bool", 1), row(name, "corpus", "token", 1, detail=task)]
            rows += [row(name, "prune_time", "s", took)]
            rows += [row(name, "validation_loss", "nat", value, at) for at, value in ((5, 9.0), (10, end))]
            found += [about | {"seed": seed, "case": f"{seed} {name} {heads} {task}"} | one for one in rows]
    return pd.DataFrame(found)


@pytest.mark.parametrize(
    ("rule", "gaps", "how", "verdict"),
    [
        ("p6a", {"sparsegpt_24": 0.05}, {}, "supported"),
        ("p6a", {"sparsegpt_24": 0.5}, {}, "refuted"),
        ("p6a", {"sparsegpt_24": 0.0915}, {}, "undecided"),
        ("p6a", {"sparsegpt_24": 0.05}, {"seeds": 3}, "undecided"),
        ("p6a", {"sparsegpt_24": 0.05}, {"width": 64}, "not applicable"),
        ("p6a", {"sparsegpt_24": 0.05}, {"task": "teacher-0"}, "not applicable"),
        ("p6b", dict.fromkeys(TRAINED, 0.1), {}, "refuted"),
        ("p6b", dict.fromkeys(TRAINED[1:], 0.1), {}, "undecided"),
        ("p6b", dict.fromkeys(TRAINED, 0.1) | {"trained_decay": 0.001}, {}, "supported"),
        ("p6b", {}, {}, "undecided"),
    ],
)
def test_a_claim_of_accuracy_is_judged_by_its_interval_over_seeds(rule, gaps, how, verdict):
    found = getattr(losses, rule)(planted(gaps, **how))
    assert found.verdict == verdict, found.why


def test_the_arm_that_decides_is_shown_and_not_one_of_larger_scatter():
    frame = planted(dict.fromkeys(TRAINED, 0.1) | {"trained_decay": 0.001})
    far = frame["value"] - frame["method"].eq("trained_once") * (0.2 + frame["seed"] % 2)
    found = losses.p6b(frame.assign(value=far.where(frame["metric"].eq("validation_loss"), frame["value"])))
    assert found.verdict == "supported" and found.high <= losses.DINO


def test_losses_are_paired_by_seed_and_shown_beside_what_was_published():
    frame = planted({"wanda_24": 1.2, "trained_gradual": 0.1})
    one = losses.lost(losses.finals(frame), "wanda_24")
    assert one.mean == pytest.approx(1.2, abs=0.003) and one.high - one.low < 0.02, "a seed's own loss cancels"
    table = losses.losses(frame)
    assert table.loc["2:4, Wanda", ["lost (nats)", "published at 124M"]].tolist() == [str(one), "+1.351"]
    assert "trained 2:4 from scratch, gradual, +0.1" in losses.answer(frame) and "least" not in losses.answer(frame), (
        "one of each"
    )
    arms = {"wanda_24": 0.5, "sparsegpt_24": 0.1, "wanda_any": 0.1005}
    said = losses.answer(planted(arms))
    assert "undecided which loses least: 2:4 SparseGPT, +0.0998" in said and " or unstructured Wanda, +0.1" in said
    assert "2:4 Wanda" not in said and "undecided" in losses.answer(planted(arms | {"wanda_any": 9.0}, seeds=3))
    assert "least is lost by 2:4 SparseGPT, +0.0998" in losses.answer(planted(arms | {"wanda_any": 0.2}))
    assert "shows that the code runs" in losses.answer(planted({"wanda_24": 1.0}, width=64))
    assert "2:4, Wanda: +1.2" in losses.nats_lost(frame).alt
    apart = pd.concat([frame, planted({"wanda_24": 9.0}, seeds=1).assign(recipe="b", run="b")])
    assert losses.lost(losses.finals(apart), "wanda_24") == one, "arms of another recipe are another setting"


@pytest.mark.parametrize(
    ("widths", "words"), [(1.43, "it is undecided which"), (1.7, "least is lost by 2:4 SparseGPT")]
)
def test_the_arm_that_loses_least_is_told_at_99_percent_for_all_pairs_together(widths, words):
    """By a difference of so many half widths of its own 99% interval: 6 pairs of 4 arms ask for 6.14 / 4.03 of them."""
    far = {"wanda_any": 9.0, "magnitude_24": 9.5}
    both = lambda gap: planted({"sparsegpt_24": 0.1, "wanda_24": 0.1 + gap} | far)  # noqa: E731
    one = losses.lost(losses.finals(both(0.0)), "wanda_24", over="sparsegpt_24")
    said = losses.answer(both(widths * (one.mean - one.low) - one.mean))
    assert words in said, said


def test_an_arm_far_off_whose_seeds_scatter_is_not_among_the_best():
    frame = planted({"sparsegpt_24": 0.1, "wanda_24": 6.0})
    far = frame["method"].eq("wanda_24") & frame["metric"].eq("validation_loss")
    frame.loc[far, "value"] += 2.0 * (frame.loc[far, "seed"] % 3 - 1)
    assert not losses.lost(losses.finals(frame), "wanda_24", 0.9999, "sparsegpt_24").low > 0
    assert "least is lost by 2:4 SparseGPT" in losses.answer(frame)


def test_arms_are_paired_with_the_dense_model_of_their_own_run_and_setting():
    frame = planted({"wanda_24": 1.2})
    one = losses.lost(losses.finals(frame), "wanda_24")

    def beside(gaps, **how):
        return losses.finals(pd.concat([frame, planted(gaps, **how)]))

    assert losses.lost(beside({}, run="b", dense=3.5), "wanda_24") == one, "cut from the dense model of run a"
    assert losses.lost(beside({"wanda_24": 2.0}, run="b"), "wanda_24").mean == pytest.approx(2, abs=0.003), "the newest"
    both = beside({"trained_s_ste": 0.5}, run="b", dense=3.5, seeds=4)
    assert losses.lost(both, "wanda_24") == one, "what another run trained leaves it"
    trained = losses.lost(both, "trained_s_ste")
    assert trained.seeds == 4 and trained.mean == pytest.approx(0.5, abs=0.003), "beside the dense model of run b"
    assert losses.lost(beside({"wanda_24": 9.0}, run="b", heads=2, seeds=2), "wanda_24") == one, "other heads"
    taught = beside(dict.fromkeys(PRUNED, 0.0), run="b", task="teacher-0", width=768, seeds=9)
    assert losses.lost(taught, "wanda_24") == one, "text before a teacher"
    both = pd.concat([frame, planted({"wanda_24": 1.2}, run="b", heads=2, seeds=5, took=100.0)])
    assert losses.losses(both).loc["2:4, Wanda", "pruned in (s)"] == 1.0, "of the models shown"


def test_the_page_of_results_names_the_arms():
    assert "| 2:4, Wanda | 6 | " in results.page(planted({"wanda_24": 1.2}))
