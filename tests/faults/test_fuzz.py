"""Whatever stands in a file or behind --set: it is taken for what it is, or refused in one of our own sentences.

Seeded, so an input fails on every machine or on none. A few hundred in the quick tests, 8,000 in the long one.
"""

import contextlib
import copy
import json
import random
import shutil
import warnings

import pytest

from blockshock_lib import checkpoint as user_checkpoint
from blockshock_lib import params
from blockshock_lib.errors import BlockShockError, CheckpointError, ParamsError, RecordError, ShareError
from blockshock_lib.layers import checkpoint
from blockshock_lib.notebook import share, workbook
from blockshock_lib.params.load import parse
from blockshock_lib.runs import compare, manifest, record, records
from blockshock_lib.studies.linear import STUDY
from tests import training
from tests.cases import METHODS, case, row, write
from tests.faults import hostile
from tests.faults.workers import CONTEXT
from tests.small_runs import cut, flip

SLOW = 20  # one in so many inputs goes the whole way
DEEP = json.loads("[" * 300 + "]" * 300)
JUNK = [None, True, -1, 0, 1e308, 10**30, 1 << 63, 0.5, float("nan")]
WORDS = ["", "x", "\x00", "\ud800", "a\nb", "../x", "é" * 300, "2030-13-45T99:99", "!!python/object:x", "<b>"]
JUNK += [*WORDS, [], {}, [[]], {"x": 1}, [1, "a"], {"": None}, DEEP, ["../../x"]]


def places(tree, path=()):
    """Every place of a tree of JSON, the root left out."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from places(tree[key], (*path, key))


def spoilt(tree, draw):
    """A copy in which one to three values are something else, gone, or called otherwise."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        *way, key = draw.choice(list(places(tree)))
        at = tree
        for part in way:
            at = at[part]
        how = draw.randrange(8)
        if how == 0:
            del at[key]
        elif how == 1 and isinstance(at, dict):
            at[draw.choice(("x", "", "files", "\x00"))] = at.pop(key)
        else:
            at[key] = copy.deepcopy(draw.choice(JUNK))
    return tree


def bitten(data, draw):
    """The bytes cut, or some of them altered, moved or doubled."""
    if how := draw.randrange(4) % 3:
        at = draw.randrange(len(data))
        more = data[at : at + draw.randrange(1, 40)] + data[at:] if how == 1 else draw.randbytes(4) + data[at + 4 :]
        return data[:at] + more
    return draw.choice((cut, flip))(data, draw)


def of_params(tmp_path):
    base = (params.PARAMS / "linear" / "sweeps" / "phase1-cpu.yaml").read_bytes()
    keys = ["seed", "dtype", "mask", "sweep.n", "sweep.masks", "hardware", "limits.case_seconds", "layers.mask"]
    words = [*map(str, JUNK[:9]), *WORDS[:7], "[4096", "{a: 1, a: 2}", "&a [*a]", "1:30", "0o17", ".inf", "=", "- -"]
    words += ["? x", "'"]

    def one(draw):
        if draw.randrange(3) == 0:
            with contextlib.suppress(ParamsError):
                parse(bitten(base, draw), "fuzz")
            return
        text = f"{draw.choice([*keys, 'x.y', ''])}={draw.choice(words)}{draw.choice(('', '', ']', ': x'))}"
        with contextlib.suppress(ParamsError):
            given = dict([params.parse_override(text)])
            given |= {draw.choice(keys): draw.choice(JUNK)} if draw.randrange(2) else {}
            taken = params.load(STUDY, "phase1", given, choose={"hardware": "cpu"})
            # What was taken can be written, read again, expanded, and waited for.
            assert type(taken).model_validate_json(taken.model_dump_json()) == taken and STUDY.expand(taken)
            assert max(taken.limits.case_seconds, taken.limits.start_seconds) * 1000 < 1 << 31

    return one


def of_records(tmp_path):
    rows = [row(method, "forward_kernel", 0.25 + n, repeat=n) for method in METHODS[:3] for n in range(3)]
    rows += [row(method, "check", 1.0) for method in METHODS[:3]]
    for group in range(2):
        write(tmp_path, run="outputs/r", case=case(), group=group, rows=rows, context=CONTEXT)
    path, _ = sorted((tmp_path / "records").iterdir())
    data = path.read_bytes()
    whole, rest = record.read(path), records.load(tmp_path).query("group == 1").reset_index(drop=True)

    def one(draw):
        signed = draw.randrange(2)
        try:
            path.write_bytes(record.encode(spoilt(whole, draw)) if signed else bitten(data, draw))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            return  # no such record can be written
        altered = path.read_bytes() != data
        try:
            frame = records.load(tmp_path)
        except RecordError:  # of a newer schema
            assert altered
            return
        refused = frame.equals(rest)
        if altered and not signed:
            assert frame.attrs["damaged"] == [path.name] and refused, "altered bytes were taken"
        for name in ("correctness", "errors", "speed") if not refused and draw.randrange(SLOW) == 0 else ():
            STUDY.tables[name](frame)

    return one


def of_manifests(tmp_path):
    folder = hostile.small_run(tmp_path / "out" / "run")
    known = json.loads((folder / manifest.FILE).read_text())
    for key, value in known.items():  # long tables of figures need not be spoilt place by place
        known[key] = value[:2] if isinstance(value, list) else value

    def one(draw):
        text = (
            json.dumps(spoilt(known, draw)).encode() if draw.randrange(3) else bitten(json.dumps(known).encode(), draw)
        )
        (folder / manifest.FILE).write_bytes(b"[" * 100_000 if draw.randrange(50) == 0 else text)
        with contextlib.suppress(RecordError):
            manifest.figures(folder)
        list(manifest.every(tmp_path / "out"))
        if draw.randrange(SLOW):
            return
        share.write_index(tmp_path / "out")

        def opened(how):
            return workbook.open_run("phase1", **{how: str(folder)}, out=tmp_path / "opened")

        for reader in (share.pack, compare._read, lambda _: opened("redraw"), lambda _: opened("resume")):
            with contextlib.suppress(BlockShockError):
                reader(folder)

    return one


def of_zips(tmp_path):
    path = share.pack(hostile.small_run(tmp_path / "run"), tmp_path / "good.zip")
    data, inside = path.read_bytes(), hostile.contents(path)
    known = json.loads(inside[manifest.FILE])
    kept = {name: content for name, content in inside.items() if not name.endswith(("html", manifest.FILE))}

    def one(draw):
        if raw := draw.randrange(3):
            path.write_bytes(bitten(data, draw))
        else:
            with contextlib.suppress(AttributeError, KeyError, TypeError):  # the manifest has no files to sign
                path.write_bytes(hostile.zipped(inside | {manifest.FILE: json.dumps(spoilt(known, draw)).encode()}))
        with contextlib.suppress(ShareError):
            place = share.unpack(path, tmp_path / "received" / "run")
            assert manifest.read(place) and records.load(place) is not None
            if raw:  # bytes that say nothing, as a date
                assert all((place / name).read_bytes() == content for name, content in kept.items())
        shutil.rmtree(tmp_path / "received", ignore_errors=True)
        assert {one.name for one in tmp_path.iterdir()} == {"run", "good.zip"}, "something lies outside"

    return one


def of_checkpoints(tmp_path):
    model = training.mlp()
    optimizer = training.adamw(model)
    training.steps(model, optimizer, 1)
    user_checkpoint.save(tmp_path / "last", model, optimizer, step=3)
    held = {name: (tmp_path / "last" / name).read_bytes() for name in (checkpoint.SUMMARY, checkpoint.TENSORS)}
    summary = json.loads(held[checkpoint.SUMMARY])
    del summary["digest"]

    def one(draw):
        for name, data in held.items():
            (tmp_path / "last" / name).write_bytes(data)
        if signed := draw.randrange(2):
            (tmp_path / "last" / checkpoint.SUMMARY).write_bytes(checkpoint._encode(spoilt(summary, draw)))
        else:
            name = draw.choice(list(held))
            (tmp_path / "last" / name).write_bytes(bitten(held[name], draw))
        fresh = training.mlp(seed=9)
        before = {key: value.clone() for key, value in fresh.state_dict().items()}
        try:
            numbers = user_checkpoint.load(tmp_path / "last", fresh, own := training.adamw(fresh))
        except CheckpointError:
            assert all(value.equal(before[key]) for key, value in fresh.state_dict().items()), "refused, yet changed"
            return
        assert signed and isinstance(numbers, dict)
        training.steps(fresh, own, 1)  # settings that were taken are fit to train with
        assert all(value.isfinite().all() for value in fresh.state_dict().values())

    return one


KINDS = {"params": of_params, "records": of_records, "manifests": of_manifests, "zips": of_zips}
KINDS["checkpoints"] = of_checkpoints


def fuzz(kind, tmp_path, seeds):
    one = KINDS[kind](tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each damaged file has one
        for seed in seeds:
            try:
                one(random.Random(f"{kind} {seed}"))
            except Exception as error:
                raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_traceback_and_no_nonsense(kind, whole, tmp_path):
    fuzz(kind, tmp_path, range({"params": 3200, "zips": 800, "checkpoints": 800}.get(kind, 1600) if whole else 40))
