"""Checkpoints come back exactly or are refused with the file or key named; nothing in them is executed."""

import json
import os
import pickle
import shutil
from unittest import mock

import pytest
import torch
from torch import nn

from blockshock_lib import checkpoint
from blockshock_lib.errors import CheckpointError, UnsupportedError
from blockshock_lib.files import sha256
from blockshock_lib.layers import Linear24
from tests import training


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of a dense model after three steps of AdamW, and that model and optimizer."""
    model = training.mlp()
    optimizer = training.adamw(model)
    training.steps(model, optimizer, 3)
    folder = tmp_path_factory.mktemp("written") / "last"
    checkpoint.save(folder, model, optimizer, step=3, loss=0.1, name="first")
    return folder, model, optimizer


@pytest.fixture
def copy(written, tmp_path):
    """One of its own for each test that damages it."""
    return shutil.copytree(written[0], tmp_path / "copy")


def fresh():
    model = training.mlp(seed=99)
    return model, training.adamw(model)


def held(model, optimizer):
    """All tensors of a model and of its optimizer's state, by the parameter they belong to."""
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters() if optimizer else ():
        tensors |= {f"{name} {key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {key: value.clone() for key, value in tensors.items()}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def refused(folder, match, model=None, optimizer=None):
    """The load fails with `match`, and changes neither the model nor the optimizer."""
    if model is None:
        model, optimizer = fresh()
    before = held(model, optimizer)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(folder, model, optimizer)
    return same(held(model, optimizer), before)


@pytest.mark.parametrize("order", [1, -1])
def test_a_model_its_numbers_and_its_optimizer_in_any_order_come_back_exactly_but_not_how_the_machine_computes(
    written, order
):
    (folder, model, optimizer), again = written, training.mlp(seed=5)
    other = torch.optim.AdamW(list(again.parameters())[::order], lr=1.0, betas=(0.5, 0.5), foreach=True)
    assert checkpoint.load(folder, again, other) == {"step": 3, "loss": 0.1, "name": "first"}
    assert same(held(again, other), held(model, optimizer))
    (found,), (wanted,) = other.param_groups, optimizer.param_groups
    assert [found[key] for key in ("lr", "betas", "foreach")] == [training.RATE, wanted["betas"], True]


def test_saving_again_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path):
    folder, (model, optimizer) = tmp_path / "deep" / "c", fresh()
    for step in (1, 2):
        checkpoint.save(folder, model, step=step)
    assert checkpoint.load(folder, model) == {"step": 2} and [path.name for path in folder.parent.iterdir()] == ["c"]
    assert refused(folder, "its optimizer is none, this one AdamW", model, optimizer)


def test_a_failed_save_leaves_the_old_checkpoint(copy, monkeypatch):
    monkeypatch.setattr(torch, "save", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(copy, fresh()[0], step=9)
    assert checkpoint.load(copy, *fresh())["step"] == 3


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.SUMMARY])
def test_a_file_that_is_cut_or_gone_is_named(copy, name):  # altered anywhere: faults/test_fuzz
    path, summary = copy / name, name == checkpoint.SUMMARY
    said = "damaged" if summary else f"{name} is missing, cut short or altered"
    path.write_bytes(path.read_bytes()[:-1])
    assert refused(copy, said)
    path.unlink()
    assert refused(copy, "no checkpoint was finished here" if summary else said)


class Payload:
    """Pickled code: who unpickles it without care makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("made",)


def sealed(folder, tensors, **changes):
    """A checkpoint of these tensors whose digests fit, as somebody who forges one would make it."""
    torch.save(tensors, folder / checkpoint.TENSORS)
    summary = json.loads((folder / checkpoint.SUMMARY).read_text())
    summary |= {checkpoint.TENSORS: sha256(folder / checkpoint.TENSORS)} | changes
    del summary["digest"]
    (folder / checkpoint.SUMMARY).write_bytes(checkpoint._encode(summary))


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "beside tensors"])
def test_pickled_code_whose_digests_fit_is_refused_and_not_executed(copy, tmp_path, monkeypatch, inside):
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Payload()))
    os.rmdir("made")  # so the payload does act
    sealed(copy, torch.load(copy / checkpoint.TENSORS) | {"model.0.weight": Payload()} if inside else Payload())
    assert refused(copy, "Weights only load failed") and not os.path.exists("made")


FORGED = {
    "model.0.weight": ("text", "holds more than tensors"),
    "optimizer.state.0.weight.exp_avg": (torch.zeros(1).expand(2**50), "0.weight.exp_avg has shape"),  # beyond memory
    "optimizer.state.7.weight.step": (torch.ones(()), "no parameter"),
}


def test_another_schema_and_tensors_that_do_not_add_up_are_refused(copy):
    tensors = torch.load(copy / checkpoint.TENSORS)
    for key, (value, match) in FORGED.items():
        sealed(copy, tensors | {key: value})
        assert refused(copy, match)
    sealed(copy, [1, 2])
    assert refused(copy, "holds more than tensors")
    sealed(copy, {}, schema=3)
    assert refused(copy, "is of schema 3")


def test_everything_is_checked_before_anything_is_changed(copy):
    """Signed anew: state without its step, settings that no optimizer takes (more in faults/test_fuzz), odd numbers."""
    tensors, summary = torch.load(copy / checkpoint.TENSORS), json.loads((copy / checkpoint.SUMMARY).read_text())
    sealed(copy, {key: value for key, value in tensors.items() if not key.endswith(".step")})
    assert refused(copy, "its optimizer state has no step")
    sealed(copy, {key: value for key, value in tensors.items() if key != "optimizer.state.2.weight.exp_avg"})
    assert refused(copy, "its optimizer state has no exp_avg")
    for odd in ({"weight_decay": "nan"}, {"lr": 1e308}):
        groups = [group | {"settings": group["settings"] | odd} for group in summary["groups"]]
        sealed(copy, tensors, groups=groups)
        assert refused(copy, "its settings")
    for groups in ([{}], [7], {"names": 1}, "AdamW", [summary["groups"][0] | {"names": 5}]):
        sealed(copy, tensors, groups=groups)
        assert refused(copy, "does not describe an optimizer"), groups
    for numbers in ([1, 2], "text", None, {"step": [1]}, {"step": None}):
        sealed(copy, tensors, numbers=numbers, groups=summary["groups"])
        assert refused(copy, "its numbers are no numbers and text"), numbers
    sealed(copy, tensors, numbers=summary["numbers"])
    assert checkpoint.load(copy, *fresh())["step"] == 3


def test_a_schedule_or_a_hook_of_the_loading_optimizer_is_left_alone(written):
    model, optimizer = fresh()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # which wraps optimizer.step
    called = mock.Mock(return_value=None)
    optimizer.register_step_post_hook(called)
    checkpoint.load(written[0], model, optimizer)
    assert not called.called and same(held(model, optimizer), held(*written[1:]))


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path):
    models = [(training.mlp().double(), torch.tensor(lr)) for lr in (0.01, 1.0)]
    pairs = [(model, torch.optim.AdamW(model.parameters(), lr=lr)) for model, lr in models]
    checkpoint.save(tmp_path / "one", *pairs[0])
    checkpoint.load(tmp_path / "one", *pairs[1])
    assert torch.equal(pairs[1][1].param_groups[0]["lr"], torch.tensor(0.01))


MLP = training.mlp()
PARTS = [{"params": list(MLP[i].parameters())} for i in (0, 2)]
OTHERS = {
    r"model\.0\.weight has shape \[128, 128\] in the checkpoint, \[192, 128\]": (training.mlp(wide=192), None),
    "float32 in the checkpoint, torch.bfloat16 in the model": (training.mlp(dtype=torch.bfloat16), None),  # would round
    r"its model has no model\.3\.weight": (nn.Sequential(*MLP, nn.Linear(64, 64, bias=False)), None),
    r"its model has also model\.2\.bias": (nn.Sequential(*MLP[:2]), None),
    r"its optimizer is AdamW, this one AdamW \+ AdamW": (MLP, torch.optim.AdamW(PARTS)),
    "optimizer has also 2.bias": (MLP, torch.optim.AdamW(MLP[0].parameters())),
    "its optimizer is AdamW, this one SGD": (MLP, torch.optim.SGD(MLP.parameters(), lr=0.1)),
}


@pytest.mark.parametrize("match", OTHERS)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_by_what_differs(written, match):
    assert refused(written[0], match, *OTHERS[match])


def test_what_no_checkpoint_can_hold_is_refused_before_anything_is_written(tmp_path):
    model, own = fresh()
    for value in (torch.ones(1), None, [1], (1,), {}):
        with pytest.raises(TypeError, match=f"'step': '{type(value).__name__}'"):
            checkpoint.save(tmp_path / "c", model, step=value)
    for own.param_groups[0]["extra"] in (torch.ones(2), len, {}, [torch.ones(2)]):
        with pytest.raises(UnsupportedError, match="the optimizer's extra"):
            checkpoint.save(tmp_path / "c", model, own)
    packed = Linear24.from_linear(nn.Linear(64, 64), mask="magnitude", update="recompress")
    packed(torch.ones(1, 64)).sum().backward()
    listed, factored = torch.optim.LBFGS(model.parameters()), torch.optim.Adafactor(packed.parameters())
    listed.step(lambda: training.loss(model, 0))
    factored.step()
    for words, one, optimizer in (
        ("not the model's", model, training.adamw(training.mlp())),
        ("tensors only", model, listed),
        ("col_var has not its weight's shape", packed, factored),
    ):
        with pytest.raises(UnsupportedError, match=words):
            checkpoint.save(tmp_path / "c", one, optimizer)
    assert not list(tmp_path.iterdir())
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="left alone"):
        checkpoint.save(tmp_path, model)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def plain(folder):
    """The tensors of a checkpoint as a plain dense model and its optimizer read them."""
    model, optimizer = fresh()
    assert checkpoint.load(folder, model, optimizer)["step"] == 3
    return held(model, optimizer)


OTHER_LAYERS = [(2, {"mask": "random", "update": "recompress"}), (4, {"mask": "transposable_random"})]


@pytest.mark.parametrize(("ranks", "options"), OTHER_LAYERS, ids=str)
def test_plain_models_and_any_ranks_and_masks_read_each_others_exactly(written, pair, four, tmp_path, ranks, options):
    views = pair.call(training.saved, tmp_path / "first", seconds=600)
    for folder in (written[0], tmp_path / "first"):
        found = plain(folder)
        moved = {2: pair, 4: four}[ranks].call(training.moved, folder, tmp_path / "second", options, seconds=600)
        assert all(torch.equal(found[key], view[key]) for view in moved for key in view)
        assert len(found) == 16 and same(plain(tmp_path / "second"), found)
    assert all(torch.equal(found[key], view[key]) for view in views for key in view)
    assert any(value.any() for key, value in found.items() if key.endswith("exp_avg"))


def test_a_rank_that_cannot_read_stops_all_ranks(written, pair):
    pair.call(training.refused_on_one_rank, written[0], seconds=600)
