"""Shards are read as their writers meant them or refused; a seed's batches are the same in every arm."""

import numpy as np
import pytest
import torch

from blockshock_lib.errors import DataError
from blockshock_lib.layers.gpt import shards
from blockshock_lib.layers.gpt.shards import Batches


def header(magic, version, count):
    return np.array([magic, version, count] + [0] * 253, "<i4").tobytes()


def tokens(count, seed=0, vocab=1000):
    return np.random.default_rng(seed).integers(vocab, size=count)


def test_what_is_written_is_read_again(tmp_path):
    ids = tokens(100, vocab=1 << 16)
    shards.write(path := tmp_path / "a_train.bin", ids)
    assert np.array_equal(shards.read(path), ids)
    assert path.read_bytes()[:12] == np.array([20240520, 1, 100], "<i4").tobytes()


def test_the_files_of_nanogpt_are_read(tmp_path):
    ids = tokens(64)
    (tmp_path / "train.bin").write_bytes(ids.astype("<u2").tobytes())
    assert np.array_equal(shards.read(tmp_path / "train.bin"), ids)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x_train.bin", bytes(100), "begins with 0, version 0, not with 20240520"),
        ("x_train.bin", header(20240520, 2, 4) + bytes(8), "version 2, not with 20240520, version 1"),
        ("x_train.bin", header(20240801, 7, 4) + bytes(16), "begins with 20240801, version 7"),
        ("x_train.bin", header(20240520, 1, 5) + bytes(8), "says 5 tokens, 1034 bytes .* has 1032"),
        ("x_train.bin", header(20240520, 1, 4) + bytes(4), "says 4 tokens, 1032 bytes .* has 1028"),
        ("x_train.bin", header(20240520, 1, -1), "says -1 tokens"),
        ("x_train.bin", header(20240520, 1, 0), "no tokens"),
        ("train.bin", bytes(101), "odd size, 101 bytes"),
        ("train.bin", b"", "no tokens"),
        ("train.bin", header(20240801, 7, 4) + bytes(16), "begins with 20240801, version 7"),
        ("val.bin", np.arange(9, dtype="<u4").tobytes(), "every second token of .* is 0 or 1"),
        ("val.bin", (np.arange(9, dtype="<u4") * 16000).tobytes(), "every second token of .* is 0 or 1"),
        ("val.bin", np.arange(9, dtype="<i8").tobytes(), "every second token of .* is 0 or 1"),
    ],
)
def test_a_damaged_shard_is_refused(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        shards.read(tmp_path / name)


def test_names_tell_training_from_validation(tmp_path):
    names = ("fineweb_train_000002.bin", "fineweb_train_000001.bin", "fineweb_val_000000.bin", "trained.bin")
    for name in names:
        (tmp_path / name).touch()
    found = shards.named(tmp_path)
    assert [path.name for path in found["train"]] == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert [path.name for path in found["val"]] == ["fineweb_val_000000.bin"]
    (tmp_path / names[2]).unlink()
    with pytest.raises(DataError, match=f"{tmp_path.name}: none is for val by its name"):
        shards.named(tmp_path)


def rows(batches, steps):
    return torch.cat([torch.cat(batches.at(step), 1) for step in steps])


def test_every_arm_of_a_seed_sees_the_same_batches_from_any_step_on():
    parts = [tokens(500), tokens(300, 1)]
    one, other = Batches(parts, 4, 16, seed=3), Batches(parts, 4, 16, seed=3)
    whole = [one.at(step) for step in range(40)]
    for step in (39, 11, 12):
        assert all(torch.equal(a, b) for a, b in zip(whole[step], other.at(step), strict=True))
    ids, targets = whole[0]
    assert ids.shape == targets.shape == (4, 16) and ids.dtype == targets.dtype == torch.int64
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert not torch.equal(ids, Batches(parts, 4, 16, seed=4).at(0)[0])


def test_an_epoch_visits_every_window_once_and_the_next_one_in_another_order():
    parts = [np.arange(100), np.arange(1000, 1260)]
    batches = Batches(parts, 5, 20, seed=0)
    assert batches.windows == 4 + 12  # an offset below a context still leaves these
    epochs = [[], []]
    for place, row in enumerate(rows(batches, range(7))[: 2 * 16]):
        assert torch.equal(row[:20] + 1, row[20:])  # no window goes over the end of its shard
        epochs[place // 16].append(int(row[0]))
    for epoch in epochs:
        offset = min(epoch)
        assert sorted(epoch) == [offset + at for at in (*range(0, 80, 20), *range(1000, 1240, 20))]
    assert min(epochs[0]) != min(epochs[1])
    assert [at - min(epochs[0]) for at in epochs[0]] != [at - min(epochs[1]) for at in epochs[1]]


def test_validation_is_the_same_windows_spread_over_all_shards():
    parts = [np.arange(100), np.arange(1000, 1260)]
    found = shards.fixed(parts, tokens=130, batch=4, context=20)  # 6 whole windows of 4 + 12
    assert [len(ids) for ids, _ in found] == [4, 2]
    starts = [int(row[0]) for ids, _ in found for row in ids]
    assert starts == [0, 40, 1020, 1080, 1120, 1180]
    assert sum(len(ids) for ids, _ in shards.fixed(parts, tokens=340, batch=4, context=20)) == 16
    for few in ({"tokens": 19, "context": 20}, {"tokens": 999, "context": 300}):
        with pytest.raises(DataError, match=f"no window of {few['context']} tokens"):
            shards.fixed(parts, batch=4, **few)
    with pytest.raises(DataError, match="does not fit"):
        Batches(parts, 17, 20, seed=0)


def test_a_shingle_is_known_wherever_it_stands_and_only_there(monkeypatch):
    monkeypatch.setattr(shards, "EVERY", 1)
    ids = tokens(300)
    hashes = shards.shingles(ids)
    assert len(hashes) == len(set(hashes.tolist())) == 300 - shards.WIDTH + 1
    moved = shards.shingles(np.concatenate([tokens(77, 1), ids]))
    assert np.array_equal(moved[77:], hashes)  # the same words later in a text, and of another power
    ids[150] += 1
    assert (shards.shingles(ids) != hashes).sum() == shards.WIDTH
    assert len(shards.shingles(ids[: shards.WIDTH - 1])) == 0


@pytest.mark.parametrize("planted", [0, 3000])
def test_the_share_of_the_validation_in_the_training(planted, monkeypatch):
    monkeypatch.setattr(shards, "EVERY", 1)
    train, val = tokens(20_000, vocab=50_000), tokens(10_000, 1, vocab=50_000)
    train[4100 : 4100 + planted] = val[5500 : 5500 + planted]
    val = np.concatenate([val, val[8000:]])  # what the validation repeats counts each time
    seen = set(shards.shingles(train).tolist())
    share = np.mean([one in seen for one in shards.shingles(val).tolist()])
    monkeypatch.setattr(shards, "CHUNK", 1000)  # stretches on both sides of a chunk's end count too
    assert shards.overlap([train], [val]) == share and (share > 0.2) == bool(planted)


def test_a_validation_that_is_too_short_to_compare_is_refused():
    with pytest.raises(DataError, match=r"the validation, 40 tokens, is too short"):
        shards.overlap([np.arange(9000)], [np.arange(100, 140)])
