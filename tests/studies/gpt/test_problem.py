"""Correctness and training: right schedules pass, planted faults are refused, a stopped training goes on as it was."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blockshock_lib import studies
from blockshock_lib.comm import Group
from blockshock_lib.engine import experiment
from blockshock_lib.errors import DataError, ParamsError
from blockshock_lib.layers.gpt import corpus, ranks, shards, streams, training
from blockshock_lib.params import load
from blockshock_lib.runs import machine
from blockshock_lib.studies.gpt import after, problem
from blockshock_lib.studies.gpt.problem import GPTProblem

STUDY = studies.load("gpt")
TINY = {"size": {"width": 16, "heads": 4, "vocab": 300, "context": 8}}


def asked(phase, **settings):
    return load(STUDY, phase, TINY | settings, choose={"hardware": "cpu"})


def measured(phase, done=(), state=None, emit=None, **settings):
    """The rows of the phase's first case; ranks as threads."""
    params = asked(phase, **settings)
    case = STUDY.expand(params)[0]
    own = GPTProblem(case, params, device=torch.device("cpu"), group=Group())
    own.state = state
    return experiment.measure(own, params, STUDY, emit=emit, done=done)


def checks(*methods, **settings):
    rows = measured("gpt_correctness", methods=list(methods), **{"hardware.emulated": True} | settings)
    return {row["method"]: (row["status"], row["reason"]) for row in rows if row["metric"] == "check"}, rows


def test_schedules_equal_their_equation_and_their_syncs_are_counted():
    found, rows = checks("tensor_parallel", "spd", "desync_4", "grouped_3", "ladder", "delayed_1", "none")
    assert {status for status, _ in found.values()} == {"ok"}, [one for one in found.values() if one[0] != "ok"]
    counted = {(row["method"], row["metric"]): row["value"] for row in rows if "syncs" in row["metric"]}
    expected = {"tensor_parallel": 24, "spd": 12, "desync_4": 6, "grouped_3": 4, "ladder": 23, "none": 1}
    for method, count in expected.items():
        assert counted[method, "syncs_forward"] == counted[method, "syncs_backward"] == count
    assert all(row["value"] > 0.999 for row in rows if row["metric"] == "weights_used")


def doubled(patch):
    land = streams.Streams.land

    def wrong(self, i):
        before = self.shared
        land(self, i)
        self.shared = self.shared + before

    patch.setattr(streams.Streams, "land", wrong)


def averaged(patch):
    begin = ranks.Sum.begin
    patch.setattr(ranks.Sum, "begin", lambda self, x: begin(self, x / self.group.world_size))


def biased(patch):
    start = ranks.Sum.start
    patch.setattr(ranks.Sum, "start", lambda self, x: start(self, x + 0.1 * torch.arange(16)))  # by each rank


def silent(patch):
    class Kept(ranks._Land):
        @staticmethod
        def backward(ctx, grad):
            return grad.clone(), None

    patch.setattr(ranks, "_Land", Kept)


def without_residual(patch):
    read = streams.Streams.read
    patch.setattr(streams.Streams, "read", lambda self: sum(self.own.values()) if self.own else read(self))


def rank_1_dropped(patch):
    def backward(ctx, grad):
        ctx.one.wait()
        return grad * (1 - ctx.one.group.rank), None

    patch.setattr(ranks._Start, "backward", staticmethod(backward))


def summed_n_times(patch):
    patch.setattr(problem.GPT, "_before_backward", lambda self, grad: grad)


@pytest.mark.parametrize("plant", [doubled, averaged, biased, silent, without_residual, rank_1_dropped, summed_n_times])
def test_planted_faults_are_refused(plant, monkeypatch):
    plant(monkeypatch)
    found, _ = checks("spd")
    assert found["spd"][0] == "failed" and found["spd"][1]


def test_more_syncs_than_the_schedule_says_are_refused(monkeypatch):
    monkeypatch.setattr(problem, "used", lambda grads: 1.0)
    sent = ranks.Sum.begin
    monkeypatch.setattr(
        ranks.Sum, "begin", lambda self, x: (self.group.all_reduce(torch.zeros(1, 1)), sent(self, x))[1]
    )
    found, _ = checks("spd")
    assert "syncs forward: 24 were counted, the schedule says 12" in found["spd"][1]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A user's shards of 20,000 tokens in which the next token follows from the last one, mostly."""
    monkeypatch.setattr(corpus, "PLACE", tmp_path / "corpus")
    draw, folder = np.random.default_rng(0), tmp_path / "data"
    folder.mkdir()
    for part, count in (("train", 20_000), ("val", 2_000)):
        tokens = np.cumsum(1 + (draw.random(count) < 0.1)) % 300
        shards.write(folder / f"own_{part}.bin", tokens)
    return str(folder)


SHORT = {"batch": 4, "validations": 2, "validation_tokens": 32, "distill_tokens": 64, "learning_rate": 1e-2}
STEPS = 6


def trained(data, *methods, tokens=STEPS * 32, **more):
    settings = {f"training.{key}": value for key, value in (SHORT | {"tokens": tokens}).items()}
    return measured("gpt_training", methods=list(methods), data=data, tracks=2, **settings | more)


def series(rows, metric):
    return [(row["repeat"], row["value"]) for row in rows if row["metric"] == metric]


@pytest.mark.long
def test_a_stopped_training_goes_on_to_the_same_numbers(data, tmp_path, monkeypatch):
    whole = trained(data, "spd")
    assert [step for step, _ in series(whole, "validation_loss")] == [0, 3, 6]
    assert series(whole, "gemm_rate")[0][1] > 0 and series(whole, "token_rate")
    assert series(whole, "validation_loss")[-1][1] < series(whole, "validation_loss")[0][1]
    state, save = tmp_path / "state", training.Trainer.save

    def stop(self, path):
        save(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "save", stop)
    said = []
    with pytest.raises(KeyboardInterrupt):
        trained(data, "spd", state=state, emit=said.extend)
    monkeypatch.setattr(training.Trainer, "save", save)
    assert [step for step, _ in series(said, "validation_loss")] == [0, 3] and state.exists()
    rest = trained(data, "spd", done=said, state=state)
    for metric in ("train_loss", "validation_loss"):
        assert series(rest, metric) == series(whole, metric)
    assert series(trained(data, "spd", done=[*said, *rest], state=state), "corpus"), "stopped after its last save"


def test_every_arm_of_a_seed_starts_alike_and_sees_the_same_tokens(data):
    first = {
        m: series(trained(data, m, tokens=32, **{"training.after": False}), "train_loss")[0][1]
        for m in ("tensor_parallel", "grouped_2")
    }
    assert first["tensor_parallel"] == pytest.approx(first["grouped_2"], rel=1e-3)
    params = asked("gpt_training", methods=["spd", "none"], seeds=3, data=data)
    cases = STUDY.expand(params)
    assert [(case.seed, case.methods) for case in cases[:3]] == [(0, ("spd",)), (0, ("none",)), (1, ("spd",))]
    assert {case.world_size for case in cases} == {1} and len({case.id for case in cases}) == 6


def test_arms_of_another_recipe_are_other_cases():
    plain = STUDY.expand(asked("gpt_training"))[0]
    for key, other in (("learning_rate", 2e-3), ("warmup", 0.5), ("clip", 2.0), ("validation_tokens", 99)):
        case = STUDY.expand(asked("gpt_training", **{f"training.{key}": other}))[0]
        assert case.recipe != plain.recipe and case.id != plain.id
    assert STUDY.expand(asked("gpt_training", **{"training.validations": 2}))[0] == plain
    longer = STUDY.expand(asked("gpt_training", **{"training.tokens": 1 << 20}))[0]
    assert longer.id != plain.id and longer.recipe == plain.recipe, "equal time is judged between two lengths"
    assert "recipe" not in STUDY.expand(asked("gpt_correctness"))[0].as_dict(), "its cases have no training"


def test_a_folder_of_shards_that_is_not_there_is_refused_before_anything_starts(data):
    machine.admit(asked("gpt_training", data=data), {"gpus": [], "unsupported": {}})
    with pytest.raises(ParamsError, match="data: /nowhere/fineweb is not there"):
        machine.admit(asked("gpt_training", data="/nowhere/fineweb"), {"gpus": [], "unsupported": {}})
    Path(data, "val.bin").write_bytes(b"odd")
    with pytest.raises(ParamsError, match=r"val\.bin has an odd size"):
        machine.admit(asked("gpt_training", data=data), {"gpus": [], "unsupported": {}})


@pytest.mark.long
def test_a_loss_that_is_no_number_ends_its_arm_with_the_reason(data):
    rows = trained(data, "spd", **{"training.learning_rate": 1e30})
    ends = [row["reason"] for row in rows if row["status"] == "failed"]
    assert ends and "the loss is nan" in ends[0]
    assert not [row for row in trained(data, "none") if row["status"] == "failed"], "the others go on"


def test_a_validation_that_is_no_number_ends_its_arm_with_the_reason(data, monkeypatch):
    losses = iter([5.0, float("nan")])
    monkeypatch.setattr(training, "validate", lambda *_: next(losses))
    ends = [row["reason"] for row in trained(data, "spd") if row["status"] == "failed"]
    assert ends and "the validation loss is nan after" in ends[0]


@pytest.mark.long
def test_syncs_are_dropped_after_training_and_made_up_for(data):
    rows = trained(data, "tensor_parallel")
    assert len(series(rows, "sensitivity")) == 23
    assert [count for count, _ in series(rows, "dropped_loss")] == list(range(1, 24))
    for metric in ("distilled_loss", "affinity_loss"):
        assert [count for count, _ in series(rows, metric)] == [12]


@pytest.mark.long
def test_what_fails_after_training_leaves_the_losses_of_the_arm(data, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(after, "distilled", full)
    rows = trained(data, "tensor_parallel")
    assert series(rows, "validation_loss")[-1][0] == STEPS and len(series(rows, "dropped_loss")) == 23
    assert series(rows, "check") == [(0, 1.0)], "the arm is valid"
    (missed,) = (row for row in rows if row["metric"] == "distilled_loss")
    assert missed["status"] == "oom" and "allocate 20.00 GiB" in missed["reason"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = problem.GPTConfig(width=16, heads=4, vocab=40, context=8, layers=3)
    made = problem.GPT(config, "tensor_parallel", 2).double()
    problem._enlarge(made)
    return made.requires_grad_(False)


TOKENS = torch.arange(16).view(2, 8)


def test_heads_and_neurons_that_are_dealt_by_affinity_leave_the_function_as_it_is(model):
    other = after.by_affinity(model)
    assert (other(TOKENS) - model(TOKENS)).abs().max() < 1e-12
    assert any((a != b).any() for a, b in zip(other.parameters(), model.parameters(), strict=True))
    dropped = [after.without(one, (0, 2))(TOKENS) for one in (model, other)]
    assert (dropped[0] - dropped[1]).abs().max() > 1e-6, "another rank's heads feed these neurons"


def test_items_go_where_they_gain_most_and_ranks_are_equally_full():
    wish = torch.tensor([[5.0, 0], [4, 0], [3, 0], [0, 1]])
    assert after.dealt(wish).tolist() == [0, 0, 1, 1]
    heads, neurons = after.grouped(torch.tensor([[0.0, 9, 0, 9], [9, 0, 9, 0]]), 2)
    assert heads.tolist() == [0, 1] and neurons.tolist() == [1, 3, 0, 2]


def test_pieces_between_kept_syncs_are_the_model(model):
    student = after.without(model, (0, 1, 3))
    assert after.pieces(student.schedule) == [(0, 3), (3, 5), (5, 6)]
    x = model.tokens(TOKENS) + model.positions.weight[:8]
    for first, end in after.pieces(student.schedule):
        x = student.streamed(x, first=first, end=end)
    assert (torch.nn.functional.linear(student.norm(x), student.tokens.weight) - student(TOKENS)).abs().max() < 1e-12


def test_distillation_brings_the_pieces_to_their_teacher(model):
    class Task:
        def at(self, step):
            tokens = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(step))
            return tokens[:, :-1], tokens[:, 1:]

    teacher = problem.GPT(model.config, "tensor_parallel", 2)
    teacher.load_state_dict(model.state_dict())
    settings = asked("gpt_training").training
    trainer = training.Trainer(teacher, settings, 1, Task(), torch.float32)
    dropped = (0, 2)
    taught = [(0, 2), (2, 4)]
    before = after.matched(teacher, after.without(teacher, dropped), taught, TOKENS)
    student = after.distilled(trainer, list(dropped), 40 * 32)
    assert after.matched(teacher, student, taught, TOKENS) < 0.9 * before
    assert all(torch.equal(a, b.float()) for a, b in zip(teacher.parameters(), model.parameters(), strict=True))


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    rates = [training.learning_rate(step, 100, 1.0, 0.1, 0.1) for step in range(100)]
    assert rates[9] == 1.0 == max(rates) and rates[0] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.1, abs=0.01)


def test_only_what_multiplies_decays():
    model = problem.GPT(problem.GPTConfig(16, 4, 300, 8), "spd", 2)
    decayed, plain = training.optimizer(model, 1e-3, 0.1, (0.9, 0.95)).param_groups
    assert {p.dim() for p in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert sum(map(len, (decayed["params"], plain["params"]))) == len(list(model.parameters()))
    assert any(p is model.positions.weight for p in plain["params"]) and plain["weight_decay"] == 0


def test_a_training_does_not_go_on_with_another_corpus(tmp_path):
    model = problem.GPT(problem.GPTConfig(16, 4, 300, 8), "spd", 2)
    task = SimpleNamespace(digest="aaaa")
    trainer = training.Trainer(model, asked("gpt_training").training, 1, task, torch.float32)
    trainer.save(tmp_path / "state")
    trainer.load(tmp_path / "state")
    task.digest = "bbbb"
    with pytest.raises(DataError, match="stopped on corpus aaaa, this is bbbb"):
        trainer.load(tmp_path / "state")
    torch.save({"model": {}}, tmp_path / "other")
    with pytest.raises(DataError, match="other is no checkpoint of a training: remove it"):
        trainer.load(tmp_path / "other")
    for left in (b"", b"PK", b"hello world" * 30, (tmp_path / "state").read_bytes()[:-100]):
        (tmp_path / "state").write_bytes(left)
        with pytest.raises(DataError, match="state cannot be read: remove it, and the training begins anew"):
            trainer.load(tmp_path / "state")


def test_arms_are_trained_on_the_corpus_that_is_asked_for_or_on_none(data):
    rows = trained(data, "tensor_parallel")
    (digest,) = {row["detail"] for row in rows if row["metric"] == "corpus"}
    assert len(trained(data, "tensor_parallel", corpus_digest=digest)) == len(rows)
    with pytest.raises(DataError, match=f"corpus_digest: be77a1af6bf8 is wanted, what lies here is corpus {digest}"):
        trained(data, "tensor_parallel", corpus_digest="be77a1af6bf8")


def test_a_stopped_training_does_not_go_on_with_another_corpus_before_its_first_checkpoint(data):
    said = [row | ({"detail": "aaaa"} if row["metric"] == "corpus" else {}) for row in trained(data, "spd")]
    with pytest.raises(DataError, match="begun on corpus aaaa, this is "):
        trained(data, "spd", done=said)
