"""Checkpoints come back exactly or are refused with the file or key named; nothing in them is executed."""

import json
import pickle
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from blockshock_lib import checkpoint, launch
from blockshock_lib.errors import CheckpointError, UnsupportedError
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


def fresh(**sizes):
    model = training.mlp(seed=99, **sizes)
    return model, training.adamw(model)


def refused(folder, match, model=None, optimizer=None):
    """The load fails with `match`, and changes neither the model nor the optimizer."""
    if model is None:
        model, optimizer = fresh()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(folder, model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not optimizer or not optimizer.state
    return True


def sealed(folder):
    """Makes the digests fit what lies in the folder now, as somebody who forges a checkpoint would."""
    summary = json.loads((folder / checkpoint.SUMMARY).read_text())
    del summary["digest"]
    summary["files"] = checkpoint._digests(folder)
    (folder / checkpoint.SUMMARY).write_bytes(checkpoint._encode(summary))
    return folder


def test_a_model_its_optimizer_and_its_numbers_come_back_exactly(written):
    folder, model, optimizer = written
    again, other = fresh()
    assert checkpoint.load(folder, again, other) == {"step": 3, "loss": 0.1, "name": "first"}
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    for mine, found in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert mine.keys() == found.keys() and all(torch.equal(mine[key], found[key]) for key in mine)
    assert other.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]


def test_the_optimizers_settings_come_back_but_not_how_the_machine_computes(written):
    model = training.mlp()
    other = torch.optim.AdamW(model.parameters(), lr=1.0, foreach=True)
    checkpoint.load(written[0], model, other)
    assert other.param_groups[0]["lr"] == training.RATE and other.param_groups[0]["foreach"] is True


def test_each_parameters_state_finds_it_though_the_groups_order_is_another(tmp_path):
    model = training.mlp()
    there = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training.steps(model, there, 1)
    checkpoint.save(tmp_path / "c", model, there)
    again = training.mlp(seed=5)
    back = torch.optim.SGD(list(again.parameters())[::-1], lr=0.1, momentum=0.9)
    checkpoint.load(tmp_path / "c", again, back)
    for mine, found in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(there.state[mine]["momentum_buffer"], back.state[found]["momentum_buffer"])


def test_plain_torch_reads_it_too(written):
    folder, model, _ = written
    again, _ = fresh()
    state = {"model": again.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(again[0].weight, model[0].weight)


def test_saving_again_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path):
    model, _ = fresh()
    for step in (1, 2):
        checkpoint.save(tmp_path / "deep" / "c", model, step=step)
    assert checkpoint.load(tmp_path / "deep" / "c", model) == {"step": 2}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c"]


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="left alone"):
        checkpoint.save(tmp_path, fresh()[0])
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_failed_save_leaves_the_old_checkpoint(written, copy, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(copy, fresh()[0], step=9)
    assert checkpoint.load(copy, *fresh())["step"] == 3


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", checkpoint.SUMMARY])
def test_a_file_that_is_cut_altered_or_gone_is_named(copy, name):
    path = copy / name
    whole = path.read_bytes()
    said = "damaged" if name == checkpoint.SUMMARY else f"{name} is cut short or altered"
    for place in range(0, len(whole), max(1, len(whole) // 7)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert refused(copy, said)
    for length in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert refused(copy, said)
    path.unlink()
    assert refused(copy, f"{name} is missing" if said != "damaged" else "no checkpoint was finished here")


class Payload:
    """Pickled code: who unpickles it without care makes the file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def in_metadata(folder, payload):
    (folder / ".metadata").write_bytes(pickle.dumps(payload))


def in_a_tensors_place(folder, payload):
    metadata = dcp.FileSystemReader(folder).read_metadata()
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.0.weight")
    data, start = (folder / info.relative_path).read_bytes(), (folder / info.relative_path).stat().st_size
    torch.save(payload, folder / "payload")
    evil = (folder / "payload").read_bytes()
    (folder / "payload").unlink()
    (folder / info.relative_path).write_bytes(data + evil)
    info.offset, info.length = start, len(evil)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def as_an_object(folder, payload):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model.0.weight": payload}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("plant", [in_metadata, in_a_tensors_place, as_an_object])
def test_pickled_code_whose_digests_fit_is_refused_and_not_executed(copy, tmp_path, plant):
    made = tmp_path / "made"
    plant(copy, Payload(made))
    made.unlink(missing_ok=True)  # some writers pickle in ways that run nothing; none may have left it
    assert refused(sealed(copy), r"names io\.open|Weights only load failed|is no tensor")
    assert not made.exists()


def test_the_payload_of_these_tests_does_act(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "made"))).close()
    assert (tmp_path / "made").exists()


def rewritten(folder, change):
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return sealed(folder)


def weight(metadata):
    return metadata.state_dict_metadata["model.0.weight"]


def place(metadata):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "model.0.weight")


def moments(metadata):
    return metadata.state_dict_metadata["optimizer.state.0.weight.exp_avg"]


FORGED = {
    "a file elsewhere": (lambda m: setattr(place(m), "relative_path", "../other"), "outside of the checkpoint's files"),
    "past its end": (lambda m: setattr(place(m), "length", 10**9), "outside of the checkpoint's files"),
    "a part too small": (lambda m: setattr(weight(m).chunks[0], "sizes", torch.Size((1, 1))), "do not make its shape"),
    "no parts": (lambda m: weight(m).chunks.clear(), "do not make its shape"),
    "a size beyond memory": (
        lambda m: (
            setattr(moments(m), "size", torch.Size((2**50,))),
            setattr(moments(m).chunks[0], "sizes", torch.Size((2**50,))),
        ),
        "more bytes than the files have",
    ),
    "no place": (lambda m: m.storage_data.clear(), "where each part"),
    "half of its keys": (lambda m: m.__dict__.pop("storage_data"), "cannot be read"),
    "a size that is none": (lambda m: setattr(weight(m), "size", "big"), "for a size"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_metadata_that_do_not_add_up_are_refused(copy, kind):
    change, match = FORGED[kind]
    assert refused(rewritten(copy, change), match)


def test_another_shape_is_refused_with_key_and_both_shapes(written):
    assert refused(
        written[0], r"model\.0\.weight has shape \[128, 128\] in the checkpoint, \[192, 128\]", *fresh(wide=192)
    )


def test_another_dtype_is_refused_for_it_would_round(written):
    model = training.mlp().bfloat16()
    assert refused(written[0], r"float32 in the checkpoint, torch.bfloat16 in the model", model)


def test_keys_that_are_missing_or_too_many_are_named(written):
    more = nn.Sequential(*training.mlp(), nn.Linear(64, 64, bias=False))
    assert refused(written[0], r"its model has no model\.3\.weight", more)
    assert refused(written[0], r"its model has also model\.2\.bias", nn.Sequential(*training.mlp()[:2]))


def test_an_optimizer_with_other_groups_or_without_state_is_refused(written, tmp_path):
    model, _ = fresh()
    first, second = list(model[0].parameters()), list(model[2].parameters())
    split = torch.optim.AdamW([{"params": first}, {"params": second}])
    assert refused(written[0], "has 1 groups of parameters, this one 2", model, split)
    assert refused(written[0], "optimizer has also 2.bias", model, torch.optim.AdamW(first))
    checkpoint.save(tmp_path / "c", model)
    assert refused(tmp_path / "c", "holds no optimizer state", *fresh())


@pytest.mark.parametrize("other", [torch.optim.RMSprop, torch.optim.SGD, torch.optim.Adam])
def test_the_state_of_another_optimizer_is_refused(written, other):
    model, _ = fresh()
    assert refused(
        written[0],
        f"its state is of AdamW, this optimizer is {other.__name__}",
        model,
        other(model.parameters(), lr=0.1),
    )


def test_what_no_checkpoint_can_hold_is_refused_before_anything_is_written(tmp_path):
    model, _ = fresh()
    with pytest.raises(TypeError, match="step is a Tensor"):
        checkpoint.save(tmp_path / "c", model, step=torch.ones(1))
    with pytest.raises(UnsupportedError, match="not the model's"):
        checkpoint.save(tmp_path / "c", model, training.adamw(training.mlp()))
    other = torch.optim.LBFGS(model.parameters())
    other.step(lambda: training.loss(model, 0))
    with pytest.raises(UnsupportedError, match="tensors only"):
        checkpoint.save(tmp_path / "c", model, other)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def groups():
    with launch.WorkerGroup(2) as two, launch.WorkerGroup(4) as four:
        yield {2: two, 4: four}


def plain(folder):
    """The tensors of a checkpoint as a plain dense model and its optimizer read them."""
    model, optimizer = fresh()
    assert checkpoint.load(folder, model, optimizer)["step"] == 3
    states = {f"{i}.{key}": value for i, state in enumerate(optimizer.state.values()) for key, value in state.items()}
    return dict(model.state_dict()) | states


@pytest.mark.parametrize(("ranks", "mask"), [(2, "random"), (4, "transposable_random"), (2, "checkerboard")])
def test_what_block_shock_wrote_a_plain_model_and_other_ranks_and_masks_read_exactly(groups, tmp_path, ranks, mask):
    views = groups[2].call(training.saved, tmp_path / "first", seconds=60)
    found = plain(tmp_path / "first")
    assert all(torch.equal(found[key], view[key]) for view in views for key in view)
    moved = groups[ranks].call(training.moved, tmp_path / "first", tmp_path / "second", {"mask": mask}, seconds=60)
    assert all(torch.equal(found[key], view[key]) for view in moved for key in view)
    again = plain(tmp_path / "second")
    assert len(found) == 16 and all(torch.equal(again[key], found[key]) for key in found)
    assert any(value.any() for key, value in found.items() if key.endswith("exp_avg"))


def test_what_a_plain_model_wrote_block_shock_reads_and_gives_back_exactly(written, groups, tmp_path):
    folder, model, optimizer = written
    views = groups[4].call(training.moved, folder, tmp_path / "second", {"update": "recompress"}, seconds=60)
    assert all(torch.equal(value, view[key]) for view in views for key, value in model.state_dict().items())
    again, other = fresh()
    checkpoint.load(tmp_path / "second", again, other)
    for mine, found in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(mine[key], found[key]) for key in mine)


def test_torchs_own_save_and_load_take_the_state_dict_as_it_is(groups, tmp_path):
    for wrote, read in groups[2].call(training.plain_dcp, tmp_path / "c", seconds=60):
        model, _ = fresh()
        state = {"model": model.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
        assert all(torch.equal(wrote[key], read[key]) and torch.equal(wrote[key], state["model"][key]) for key in wrote)


def test_optimizer_state_without_a_dense_view_is_refused_before_anything_is_written(groups, tmp_path):
    for said in groups[2].call(training.without_dense_view, tmp_path / "c", seconds=60):
        assert "0.weight.col_var has not its weight's shape" in said
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_read_stops_all_ranks(written, groups):
    for said in groups[2].call(training.refused_on_one_rank, written[0], seconds=60):
        assert "planted on rank 1" in said
