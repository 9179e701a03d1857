"""What is not byte for byte as it was written is never taken for whole, and costs the run nothing else.

A record cut or with a bit flipped: test_fuzz.py.
"""

import random

import pytest

from blockshock_lib.errors import RecordError
from blockshock_lib.runs import manifest, records
from tests.cases import METHODS, case, row, write
from tests.faults.workers import CONTEXT


@pytest.fixture
def run(tmp_path):
    """Three records of one run: paths in the order of their names."""
    rows = [row(method, "forward_kernel", 0.25 + n, repeat=n) for method in METHODS for n in range(3)]
    rows += [row(method, "check", 1.0) for method in METHODS]
    for group in range(3):
        write(tmp_path, run="outputs/r", case=case(), group=group, rows=rows, context=CONTEXT)
    return sorted((tmp_path / "records").iterdir())


def cut(data, draw):
    return data[: draw.randrange(len(data))]


def flip(data, draw):
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


IN_ITS_PLACE = {
    "empty file": lambda path, data: path.touch(),
    "folder": lambda path, data: path.mkdir(),
    "link to nothing": lambda path, data: path.symlink_to(path.parent / "nothing"),
    "another record": lambda path, data: path.write_bytes(data.replace(b'"group":1', b'"group":2')),
}


@pytest.mark.parametrize("what", IN_ITS_PLACE)
def test_what_stands_in_the_place_of_a_record_is_named_and_the_rest_loads(what, run, tmp_path):
    path = run[1]
    data = path.read_bytes()
    path.unlink()
    IN_ITS_PLACE[what](path, data)
    with pytest.warns(UserWarning, match=path.name):
        frame = records.load(tmp_path)
    assert frame.attrs["damaged"] == [path.name] and set(frame.group) == {0, 2}


def test_table_cut_at_any_byte_or_bit_flipped_never_reaches_its_reader(run, tmp_path, monkeypatch):
    """pyarrow can end the process on a flipped bit: the seal is checked before it sees one."""
    noted = dict(run="r", phase="phase0", status="completed", params={}, machine={"title": "t"}, started="2026")
    manifest.note(tmp_path, **noted)
    path, draw = records.pack(tmp_path), random.Random(0)
    data, whole = path.read_bytes(), records.load(tmp_path, strict=True)
    monkeypatch.setattr(records, "_decode", lambda *_: pytest.fail("a damaged table was opened"))
    for count in range(400):
        path.write_bytes((cut if count < 200 else flip)(data, draw))
        with pytest.raises(RecordError, match=rf"{path.name} is damaged: its content does not match its digest"):
            records.load(tmp_path, strict=True)
    with pytest.warns(UserWarning, match=path.name):
        assert records.load(tmp_path).empty
    monkeypatch.undo()
    path.write_bytes(data)
    assert records.load(tmp_path, strict=True).equals(whole)
