"""A corpus of installed packages: the same packages, the same digest; and nothing is in it that may not be."""

import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer

from blockshock_lib import files
from blockshock_lib.errors import DataError
from blockshock_lib.files import ROOT, sha256
from blockshock_lib.layers.gpt import corpus, shards, sources
from blockshock_lib.layers.gpt.corpus import Recipe

NAMES = ("alder", "birch", "cedar", "dogwood", "elm", "fir")
SMALL = Recipe(vocab=300)


def code(seed, lines=60):
    """Made-up text of about 40 bytes a line, of which no 50 words stand in another seed's."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(300)]
    return "".join(f"{' '.join(draw.choices(words, k=6))}\n" for _ in range(lines))


def install(site, name, files, licence="License-Expression: MIT", version="1.0"):
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{licence}\n")
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in [*files, f"{info.name}/METADATA"]))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Six packages of text of their own; the standard library is one file of the folder `stdlib`."""
    site, stdlib = tmp_path / "site", tmp_path / "stdlib"
    for name in NAMES:
        install(site, name, {f"{name}/{n}.py": code(f"{name}{n}") for n in ("a", "b", "c")})
    stdlib.mkdir()
    (stdlib / "os.py").write_text(code("os"))
    pins = tmp_path / "constraints.txt"
    pins.write_text("".join(f"{name}==1.0\n" for name in (*NAMES, "ash-lib", "secret")))
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(stdlib))
    here = partial(sources.importlib.metadata.distributions, path=[str(site)])
    monkeypatch.setattr(sources.importlib.metadata, "distributions", here)
    monkeypatch.setattr(sources, "PINS", pins)
    monkeypatch.setattr(sources, "HELD_OUT", (0.01, 0.2))
    monkeypatch.setattr(corpus, "PLACE", tmp_path / "corpora")
    return site


def kept_and_out(site):
    kept, out = sources.read(sources.packages()[0])
    return {f"{file.package}/{file.name}" for file in kept}, out


def test_a_corpus_holds_the_text_of_its_files_and_lists_them(site):
    found = corpus.ready(SMALL)
    listed = json.loads((found.folder / corpus.SOURCES).read_text())
    assert listed.keys() == {*NAMES, "python"} and listed["elm"]["licence"] == "MIT"
    assert listed["python"]["licence"] == "PSF-2.0" and listed["elm"]["version"] == "1.0"
    assert listed["elm"]["files"]["elm/a.py"] == sha256(site / "elm/a.py")

    vocabulary = json.loads((found.folder / corpus.VOCABULARY).read_text())["model"]["vocab"]
    assert len(vocabulary) == 300 and vocabulary[corpus.END] == 0
    # Byte-level: a token's string has a character for each of its bytes.
    lengths = {number: len(text) * (number != 0) for text, number in vocabulary.items()}
    text = {part: sum(len(code) for code in texts(site, listed, part)) for part in ("train", "val")}
    for part in ("train", "val"):
        ids = np.concatenate(found.read(part))
        assert len(ids) == found.tokens[part] and sum(lengths[int(one)] for one in ids) == text[part]
        assert (ids == 0).sum() == len(list(texts(site, listed, part)))
    written = Tokenizer.from_file(str(found.folder / corpus.VOCABULARY)).decode(found.read("val")[0].tolist())
    assert written == "".join(code.decode() for code in texts(site, listed, "val"))
    assert found.bytes_per_token == text["val"] / found.tokens["val"]
    assert corpus.ready(SMALL) == found == corpus._known(found.made)


def texts(site, listed, part):
    for name, row in listed.items():
        if row["split"] == part:
            yield from ((site.parent / "stdlib" / path if name == "python" else site / path).read_bytes()
                        for path in row["files"])  # fmt: skip


def test_the_digest_is_of_the_packages_alone(site, monkeypatch):
    first = corpus.ready(SMALL)
    shutil.rmtree(first.folder)
    assert corpus.ready(SMALL).digest == first.digest
    for path in site.glob("*/RECORD"):  # in another order, on another day
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
        os.utime(path.parent, (0, 0))
    monkeypatch.setattr(corpus, "PLACE", corpus.PLACE.with_name("other"))
    assert corpus.ready(SMALL).digest == first.digest
    (site / "elm/a.py").write_text(code("new"))  # of another size
    assert corpus.ready(SMALL).digest != first.digest
    assert corpus.ready(Recipe(vocab=301)).digest != first.digest


@pytest.mark.long
def test_another_process_with_other_hashes_and_one_thread_makes_the_same_digest(site, tmp_path):
    first = corpus.ready(SMALL)
    program = """if True:
        import sys, pathlib
        from blockshock_lib.layers.gpt import corpus, sources
        site, pins, stdlib, place = map(pathlib.Path, sys.argv[1:])
        found = sources.importlib.metadata.distributions
        sources.sysconfig.get_path = lambda _: str(stdlib)
        sources.importlib.metadata.distributions = lambda: found(path=[str(site)])
        sources.PINS, sources.HELD_OUT, corpus.PLACE = pins, (0.01, 0.2), place
        print(corpus.ready(corpus.Recipe(vocab=300)).digest)"""
    words = (site, tmp_path / "constraints.txt", tmp_path / "stdlib", tmp_path / "there")
    others = {"PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=os.environ | others, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == first.digest


def test_packages_without_a_licence_of_nvidia_or_not_pinned_are_skipped_by_name(site):
    install(site, "secret", {"secret/a.py": code("s")}, licence="License: UNKNOWN")
    install(site, "nvidia-tools", {"nvt/a.py": code("n")})
    install(site, "stray", {"stray/a.py": code("t")})
    install(site, "ash_lib", {"g/a.py": code("g")}, licence="Classifier: License :: OSI Approved :: BSD License")
    found, skipped = sources.packages()
    assert {p.name: p.licence for p in found}["ash-lib"] == "BSD License"
    assert skipped == {
        "secret": "its metadata name no licence", "nvidia-tools": "NVIDIA's", "stray": "not pinned in constraints.txt",
    }  # fmt: skip
    with pytest.raises(DataError, match="nvidia-tools is skipped: NVIDIA's"):
        sources.packages(["nvidia-tools"])
    with pytest.raises(DataError, match="ceder is not installed"):
        sources.packages(["ceder"])


def test_copies_and_vendored_copies_are_left_out_and_the_original_kept(site):
    original = (site / "elm/a.py").read_text()
    near = original.replace("\n", "\n\n", 20) + code("some more", 10)
    install(site, "ash-lib", {"g/_vendor/elm/a.py": original, "g/_vendor/elm/near.py": near, "g/a.py": code("g")})
    shutil.copy(site / "cedar/b.py", site / "alder/b.py")
    kept, out = kept_and_out(site)
    assert out == {
        "ash-lib/g/_vendor/elm/a.py": "copy of elm/elm/a.py",
        "ash-lib/g/_vendor/elm/near.py": out["ash-lib/g/_vendor/elm/near.py"],
        "cedar/cedar/b.py": "copy of alder/alder/b.py",
    }
    assert "stands in files before it" in out["ash-lib/g/_vendor/elm/near.py"]
    assert {"elm/elm/a.py", "ash-lib/g/a.py", "alder/alder/b.py"} <= kept


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("# @generated by gen.py\n" + code(1), "generated: it says so"),
        ("/* AUTOGENERATED FILE: DO NOT EDIT */\n" + code(1), "generated: it says so"),
        ("table = [\n" + "  [0x1f, 12, 99],\n" * 200 + "]\n", "generated: less than 35% letters"),
        (code(1).replace("\n", ";"), "generated: lines of"),
        ("# Copyright (c) 2024, NVIDIA CORPORATION.\n" + code(1), "NVIDIA's"),
        (code(1).encode() + b"\xff\xfe", "not UTF-8"),
        ("a\0b", "empty or binary"),
        ("\n", "empty or binary"),
        (code(1), ""),
        ("# generators are generated lazily here\n" + code(1), ""),
    ],
)
def test_what_is_no_text_to_learn_from_is_left_out(content, why):
    found = sources.unfit(content if isinstance(content, bytes) else content.encode())
    assert found.startswith(why) and bool(found) == bool(why)


def test_whole_packages_are_held_out_and_none_of_their_text_is_trained_on(site):
    parts, leaked = sources.divided(sources.read(sources.packages()[0])[0])
    held = {file.package for file in parts["val"]}
    assert held and not held & {file.package for file in parts["train"]} and not leaked
    # A file of the training now has a third of one of the validation's, which leaves.
    victim, text = parts["val"][0], parts["val"][0].text
    planted = site / parts["train"][0].name
    planted.write_text(code("around") + text[: len(text) // 3] + code("more"))
    again, leaked = sources.divided(sources.read(sources.packages()[0])[0])
    assert leaked.keys() == {f"{victim.package}/{victim.name}"} and "training" in "".join(leaked.values())
    assert {file.name for file in parts["val"]} - {file.name for file in again["val"]} == {victim.name}


def test_too_little_to_hold_out_or_to_make_a_vocabulary_of_is_refused(site, monkeypatch):
    with pytest.raises(DataError, match=r"none of elm make up 1% to 20% of the bytes"):
        corpus.ready(Recipe(("elm",), 300))
    with pytest.raises(DataError, match="a smaller vocabulary or more text"):
        corpus.ready(Recipe(vocab=60_000))
    for vocab in (256, 70_000):
        with pytest.raises(DataError, match="vocab"):
            Recipe(vocab=vocab)


def test_the_small_corpus_has_as_many_tokens_as_are_asked_for(site, monkeypatch):
    monkeypatch.setattr(corpus, "NANO", Recipe(("elm", "fir", "alder", "birch", "cedar"), 320))
    vocabulary = json.loads((corpus.chosen("", "nano", 300).folder / corpus.VOCABULARY).read_text())
    assert len(vocabulary["model"]["vocab"]) == 300


def test_a_limit_takes_files_of_every_package_in_proportion(site):
    found = sources.packages()[0]
    some = sources.sample(found, sum(one.size for one in found) // 2)
    for whole, part in zip(found, some, strict=True):
        assert part.size <= whole.size / 2 and part.files.items() <= whole.files.items()
        assert part.files or len(whole.files) == 1


@pytest.mark.parametrize("harm", ["changed", "missing", "gone", "damaged"])
def test_a_corpus_that_changed_since_its_digest_is_made_anew(site, harm):
    found = corpus.ready(SMALL)
    path = found.folder / found.train[0]
    if harm == "changed":
        data = bytearray(path.read_bytes())
        data[2000] ^= 1
        path.write_bytes(data)
    elif harm == "damaged":
        (found.folder / corpus.SUMMARY).write_text("{")
    else:
        path.unlink() if harm == "missing" else shutil.rmtree(found.folder)
    assert corpus._known(found.made) is None
    again = corpus.ready(SMALL)
    assert (again.digest, again.tokens) == (found.digest, found.tokens) and corpus._known(found.made) == again


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PLACE", tmp_path / "corpora")
    folder = tmp_path / "own"
    folder.mkdir()
    for name, seed in (("train", 0), ("val", 1)):
        ids = np.random.default_rng(seed).integers(5000, size=5000)
        shards.write(folder / f"fineweb_{name}_000001.bin", ids)
    return folder


def test_shards_of_ones_own_are_a_corpus_with_a_digest(own, monkeypatch):
    found = corpus.given(own, 5000)
    assert found.tokens == {"train": 5000, "val": 5000} and found.bytes_per_token is None
    assert np.array_equal(found.read("val")[0], shards.read(own / "fineweb_val_000001.bin"))
    with monkeypatch.context() as patch:
        patch.setattr(shards, "overlap", None)  # it is read once
        assert corpus.given(own, 5000) == found
    path = own / "fineweb_train_000001.bin"
    was = path.stat()
    shards.write(path, np.random.default_rng(2).integers(5000, size=5000))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))  # of the same size, too
    assert corpus.given(own, 5000).digest != found.digest


def test_a_token_beyond_the_vocabulary_is_refused(own):
    with pytest.raises(DataError, match="token 4999, beyond the vocabulary of 4999"):
        corpus.given(own, 4999)


@pytest.mark.parametrize("whole", [True, False])
def test_validation_that_stands_in_the_training_is_refused(own, whole):
    val = shards.read(own / "fineweb_val_000001.bin")
    more = val if whole else np.concatenate([np.arange(900), val[1000:2500], np.arange(5)])
    shards.write(own / "more_train.bin", more)
    with pytest.raises(DataError, match=r"validation stands in the training: \d+% of"):
        corpus.given(own, 5000)


@pytest.mark.parametrize(
    ("harm", "said"), [("gone", "is not there"), ("dangling", "cannot be read: No such file"), ("folder", "cannot be")]
)
def test_what_is_no_file_of_shards_is_refused_by_name(own, harm, said):
    if harm == "gone":
        shutil.rmtree(own)
    elif harm == "dangling":
        (own / "more_train.bin").symlink_to("nowhere")
    else:
        (own / "more_train.bin").mkdir()
    with pytest.raises(DataError, match=said):
        corpus.given(own, 5000)


def test_what_others_leave_in_a_corpus_is_no_part_of_it(site):
    found = corpus.ready(SMALL)
    (found.folder / ".ipynb_checkpoints").mkdir()
    (found.folder / ".DS_Store").write_text("x")
    assert corpus._known(found.made) == found


def test_the_command_says_the_digest_or_what_is_wrong(site, own, capsys, monkeypatch):
    monkeypatch.chdir(own.parent)
    assert corpus.main(["--data", own.name, "--vocab", "5000"]) == 0
    capsys.readouterr()
    assert corpus.main(["--data", str(own), "--vocab", "5000"]) == 0
    assert "5000 tokens to train on, 5000 held out\n" in (said := capsys.readouterr().out) and "corpus " in said
    monkeypatch.setattr(corpus, "EVERY", 1e-3)
    assert corpus.main(["--vocab", "300"]) == 0
    assert " bytes a token" in (said := capsys.readouterr().out) and "\n0 s\n" in said
    for few in ("256", "0"):
        assert corpus.main(["--vocab", few]) == 1
        assert f"error: vocab: {few}" in capsys.readouterr().err


def test_a_process_waits_for_another_that_makes_one(site):
    corpus.PLACE.mkdir()
    with ThreadPoolExecutor() as pool:
        with files.locked(corpus.PLACE):
            made = pool.submit(corpus.chosen, "", "packages", SMALL.vocab)
            with pytest.raises(TimeoutError):
                made.result(0.2)
        first = made.result()
        assert corpus._known(first.made) == first
        with files.locked(corpus.PLACE):  # what lies there is looked up while others make one
            assert corpus.chosen("", "packages", SMALL.vocab) == first
