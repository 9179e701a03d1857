"""Sparse models on disk: our files, those of compressed-tensors, torch's checkpoints, and what is refused."""

from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from blockshock_lib import Linear24, Sparse24, checkpoint, dense_, fake_sparsify_, load_sparse_, save_sparse, sparsify_
from blockshock_lib.errors import CheckpointError, UnsupportedError
from tests.layers.sparsify.models import Model, same, state
from tests.layers.sparsify.test_convert import ALL, TOKENS


@pytest.fixture
def written(tmp_path):
    """A sparse model, and the file that it was written to."""
    model, path = Model(), tmp_path / "a" / "model.safetensors"
    sparsify_(model, Sparse24())
    save_sparse(path, model)
    return model, path


def test_a_sparse_model_comes_back_into_a_dense_a_sparse_and_a_meta_model(written):
    model, path = written
    with torch.device("meta"):
        empty = Model(seed=1)
    other = Model(seed=2)
    sparsify_(other, Sparse24())
    for into, place in ((Model(seed=3), path), (other, path.parent), (empty, path)):
        report = load_sparse_(into, place, Sparse24(frozen=False))
        assert into.head.weight is into.embed.weight
        assert sorted(report.converted) == sorted(ALL) and torch.equal(into(TOKENS), model(TOKENS))
        assert not into.blocks[0].q.frozen and isinstance(into.blocks[1].up, Linear24)
    dense_(into)
    assert type(into.blocks[1].up).__name__ == "Conv1D"
    weights = sum(layer.in_features * layer.out_features for layer in model.modules() if isinstance(layer, Linear24))
    rest = sum(p.nbytes for name, p in model.named_parameters() if "weight" not in name or "embed" in name)
    assert sum(one.nbytes for one in load_file(path).values()) == 2 * weights + weights // 8 + 16 * len(ALL) + rest
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_into_a_model_partly_on_the_meta_device_what_is_tied_on_the_cpu_comes_under_all_its_names(tmp_path):
    model, part, path = Model(), Model(seed=9), tmp_path / "model.safetensors"
    model.norm, part.norm = nn.LayerNorm(64), nn.LayerNorm(64, device="meta")
    sparsify_(model, Sparse24())
    save_sparse(path, model)
    part.embed.requires_grad_(False)
    load_sparse_(part, path)
    assert part.head.weight is part.embed.weight and not part.head.weight.requires_grad
    assert torch.equal(part(TOKENS), model(TOKENS))


def test_layers_that_only_train_as_if_they_were_sparse_are_not_written_as_such(tmp_path):
    model = Model()
    fake_sparsify_(model, Sparse24())
    with pytest.raises(UnsupportedError, match=r"blocks.0.q is trained as if it were sparse, and a file holds 2:4"):
        save_sparse(tmp_path / "fake.safetensors", model)
    assert not any(tmp_path.iterdir())


def test_compressed_tensors_reads_our_files_and_we_read_its(written, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import Sparse24BitMaskCompressor
    from compressed_tensors.config import Sparse24BitMaskConfig

    model, path = written
    theirs = Sparse24BitMaskCompressor(Sparse24BitMaskConfig(sparsity_structure="2:4"))
    # Theirs are [out, in] all, while a Conv1D's state is [in, out].
    state = {name: value.t() if "up.weight" in name else value for name, value in model.state_dict().items()}
    state = {name: value.contiguous() for name, value in state.items()}
    for name, value in theirs.decompress(path):
        assert torch.equal(value, state[name if name in state else f"{name}.weight"]), name
    del state["head.weight"]
    save_file(theirs.compress(state, compression_targets=ALL), tmp_path / "theirs.safetensors")
    assert load_file(tmp_path / "theirs.safetensors").keys() == load_file(path).keys()
    other = Model(seed=4)
    load_sparse_(other, tmp_path / "theirs.safetensors")
    assert torch.equal(other(TOKENS), model(TOKENS))
    model = Model().bfloat16()
    sparsify_(model, Sparse24(dtype="float8_e4m3fn"))
    save_sparse(path, model)
    read = dict(theirs.decompress(path))
    for name in ALL:
        found, wanted = read[name if name in read else f"{name}.weight"], model.get_submodule(name).packed.quantized()
        assert torch.equal(found.float(), wanted.float())


def test_states_of_sparse_models_are_dense_for_our_checkpoints_and_torchs(written, tmp_path):
    model, _ = written
    checkpoint.save(tmp_path / "ours", model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "torchs", no_dist=True)
    other = Model(seed=5)
    sparsify_(other, Sparse24())
    with pytest.raises(RuntimeError, match=r"q.weight could not be loaded: W\[\d+, \d+\] is not zero but pruned"):
        checkpoint.load(tmp_path / "ours", other)
    found = {key: torch.empty_like(value) for key, value in model.state_dict().items()}
    dcp.load(found, checkpoint_id=tmp_path / "torchs", no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())
    checkpoint.load(tmp_path / "ours", model)


def damaged(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_checkpoint_that_is_not_this_models_or_is_damaged_is_refused_by_name_and_changes_nothing(written):
    _, path = written
    whole = path.read_bytes()
    model, sparse = Model(seed=7), Model(seed=8)
    sparsify_(sparse, Sparse24(), "blocks.0.q")

    def moved(name, to):
        return lambda tensors: tensors.update({to: tensors.pop(name)})

    def set_to(name, make):
        return lambda tensors: tensors.update({name: make(tensors[name])})

    q, cases = "blocks.0.q", []
    cases += [("KeyError|bitmask", moved(f"{q}.bitmask", "x"))]
    cases += [("blocks.0.q of 64x64 has other values", set_to(f"{q}.compressed", lambda v: v[:, 1:].contiguous()))]
    cases += [("row 0, columns 0 to 3 keep 4", set_to(f"{q}.bitmask", lambda v: v | 15))]
    cases += [(r"embed.weight: .*\(95, 64\)", set_to("embed.weight", lambda v: v[1:].contiguous()))]
    cases += [("embed.weight: .*bfloat16", set_to("embed.weight", torch.Tensor.bfloat16))]
    cases += [("blocks.0.q: .*bfloat16", set_to(f"{q}.compressed", torch.Tensor.bfloat16))]
    cases += [("the model has no extra", moved("embed.weight", "extra"))]
    cases += [("the checkpoint has no blocks.0.k.bias", lambda tensors: tensors.pop("blocks.0.k.bias"))]
    for words, change in cases:
        path.write_bytes(whole)
        damaged(path, change)
        before = state(model)
        with pytest.raises(CheckpointError, match=words):
            load_sparse_(model, path)
        assert same(model, before), words
    path.write_bytes(whole)
    damaged(path, lambda t: [t.pop(f"{q}.{part}") for part in ("compressed", "bitmask", "shape")])
    with pytest.raises(CheckpointError, match=r"blocks.0.q is sparse in the model.*dense_\(model\) first"):
        load_sparse_(sparse, path)
    for data in (whole[: len(whole) // 2], b""):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_sparse_(model, path)
    path.unlink()
    for place in (path, path.parent):
        with pytest.raises(CheckpointError, match=r"No such file|no \.safetensors file"):
            load_sparse_(model, place)
    path.write_bytes(whole)
    model.blocks[0].k = nn.ReLU()
    with pytest.raises(CheckpointError, match=r"blocks.0.k is 2:4 in the checkpoint and no linear layer"):
        load_sparse_(model, path)
    for hooked, words in ((Model(), "q cannot be made 2:4: it has hooks"), (sparse, "blocks.0.q: it has hooks")):
        hooked.blocks[0].q.register_forward_hook(lambda *_: None)
        with pytest.raises(CheckpointError, match=words):
            load_sparse_(hooked, path)


def test_layers_that_are_read_to_be_trained_train_but_for_what_was_frozen_in_a_dense_model(written):
    _, path = written
    frozen, part, dense = Model(seed=1), Model(seed=2), Model(seed=3)
    sparsify_(frozen, Sparse24())
    part.blocks[0].k.weight.requires_grad_(False)
    for into in (frozen, part, dense):
        load_sparse_(into, path, Sparse24(frozen=False))
        trained = {name: p.requires_grad for name, p in into.named_parameters()}
        assert [name for name, does in trained.items() if not does] == ["blocks.0.k.weight"] * (into is part)
        optimizer = torch.optim.SGD(into.parameters(), 1.0)
        before = into(TOKENS)
        before.square().mean().backward()
        optimizer.step()
        assert not torch.equal(into(TOKENS), before)
    load_sparse_(dense, path)
    assert not any(p.requires_grad for p in dense.blocks.parameters())


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)


def test_what_no_file_holds_of_a_model_on_the_meta_device_is_named_and_default_devices_do_not_matter(tmp_path):
    model, path = Rotary(), tmp_path / "model.safetensors"
    sparsify_(model, Sparse24())
    with torch.device("meta"):
        save_sparse(path, model)
        empty, into = Rotary(), Rotary()
    into.inv_freq = model.inv_freq.clone()
    with pytest.raises(CheckpointError, match=r"inv_freq is on the meta device and in no checkpoint: .*build"):
        load_sparse_(empty, path)
    assert empty.linear.weight.is_meta and type(empty.linear) is nn.Linear
    for device in ("meta", "cpu"):
        with torch.device(device):
            load_sparse_(into, path)
        assert torch.equal(into.linear(torch.ones(1, 64)), model.linear(torch.ones(1, 64)))
    dense_(model)
    save_sparse(path, model)
    assert str(load_sparse_(Rotary(), path)).startswith("0 of 0 layers converted")


@pytest.mark.parametrize("meta", [False, True])
def test_a_file_that_is_read_and_interrupted_leaves_every_value(written, meta):
    _, path = written
    model = Model(seed=5)
    model.last = nn.Linear(64, 64, device="meta" if meta else None)
    whole = Model()
    whole.last = nn.Linear(64, 64)
    sparsify_(whole, Sparse24(), "blocks.*")
    save_sparse(path, whole)
    sparsify_(model, Sparse24(), "blocks.0.q")
    before, kinds = {n: p for n, p in model.named_parameters()}, [type(m) for m in model.modules()]
    values = {n: p.clone() for n, p in before.items() if not p.is_meta}
    right = nn.Linear._load_from_state_dict

    def fails(module, *given):
        if module is model.last:
            raise KeyboardInterrupt
        right(module, *given)

    with mock.patch.object(nn.Linear, "_load_from_state_dict", fails), pytest.raises(KeyboardInterrupt):
        load_sparse_(model, path)
    after = dict(model.named_parameters())
    assert all(after[n] is p for n, p in before.items()) and [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(after[n], value) for n, value in values.items())


@pytest.mark.parametrize("config", [None, Sparse24(frozen=False)])
def test_an_optimizer_of_before_is_refused_where_layers_are_read(written, config):
    _, path = written
    model = Model(seed=1)
    optimizer = torch.optim.SGD(model.parameters())
    load_sparse_(model, path, config)
    model(TOKENS).sum().backward()
    with pytest.raises(UnsupportedError, match=r"holds the parameters that blocks\.\d\.\w+ had before"):
        optimizer.step()


def test_a_trained_weight_that_is_zero_just_now_keeps_its_place_in_a_file(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64))
    nn.init.zeros_(model[0].weight)
    sparsify_(model, trained := Sparse24(frozen=False))
    with torch.no_grad():
        model[0].weight[0, 1] = 7.0  # W[0, 1]
    save_sparse(tmp_path / "m.safetensors", model)
    load_sparse_(other := nn.Sequential(nn.Linear(64, 64)), tmp_path / "m.safetensors", trained)
    assert torch.equal(other[0].weight, model[0].weight) and other[0].weight[0, 1] == 7
    assert torch.equal(other[0].pattern.mask(), model[0].pattern.mask())
    with pytest.raises(ValueError, match=r"save_sparse\(path, model\): the model is an nn.Module, not str"):
        save_sparse(model, "m.safetensors")
