"""A record that is not byte for byte what was written is never taken for whole, and costs the run nothing else."""

import random
import warnings

import pytest

from blockshock_lib import records
from blockshock_lib.errors import RecordError
from tests.cases import METHODS, case
from tests.faults.workers import CONTEXT


@pytest.fixture
def run(tmp_path):
    """Three records of one run: paths in the order of their names."""
    rows = [records.row(method, "forward_kernel", 0.25 + n, repeat=n) for method in METHODS for n in range(3)]
    rows += [records.row(method, "check", 1.0) for method in METHODS]
    for group in range(3):
        records.write(tmp_path, run="outputs/r", case=case(), group=group, rows=rows, context=CONTEXT)
    return sorted((tmp_path / "records").iterdir())


def cut(data, draw):
    return data[: draw.randrange(len(data))]


def flip(data, draw):
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def test_record_cut_at_any_byte_or_bit_flipped(run, tmp_path):
    path, draw = run[1], random.Random(0)
    data, whole = path.read_bytes(), records.load(tmp_path)
    rest = whole[whole.group != 1].reset_index(drop=True)
    assert len(rest) == len(whole) * 2 // 3 > 0
    damaged = {data[:end]: "" for end in (0, 1, 2, len(data) - 2, len(data) - 1)}
    while len(damaged) < 1000:
        damaged[(cut if len(damaged) < 500 else flip)(data, draw)] = ""
    assert len(damaged) == 1000 and data not in damaged
    for bad in damaged:
        path.write_bytes(bad)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            frame = records.load(tmp_path)
        assert frame.attrs["damaged"] == [path.name], bad
        (warning,) = warned
        assert path.name in str(warning.message)
        assert frame.equals(rest)
        with pytest.raises(RecordError, match=path.name):
            records.read(path)
    path.write_bytes(data)
    assert records.load(tmp_path, strict=True).equals(whole)


@pytest.mark.parametrize("change", ["empty_file", "folder", "link_to_nothing", "another_record"])
def test_what_stands_in_the_place_of_a_record_is_named_and_the_rest_loads(change, run, tmp_path):
    path = run[1]
    data = path.read_bytes()
    path.unlink()
    if change == "empty_file":
        path.touch()
    elif change == "folder":
        path.mkdir()
    elif change == "link_to_nothing":
        path.symlink_to(tmp_path / "nothing")
    else:
        path.write_bytes(data.replace(b'"group":1', b'"group":2'))
    with pytest.warns(UserWarning, match=path.name):
        frame = records.load(tmp_path)
    assert frame.attrs["damaged"] == [path.name] and set(frame.group) == {0, 2}
