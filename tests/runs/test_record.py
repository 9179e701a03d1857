"""One record: what may stand in it, and that only what was written is ever read."""

import json
import math

import pytest

from blockshock_lib.errors import RecordError
from blockshock_lib.runs import record
from tests import cases
from tests.cases import row, validate
from tests.faults.workers import CONTEXT, faulty

ROWS = [
    row("row_parallel", "forward_kernel", 0.5, repeat=0),
    row("row_parallel", "forward_kernel", 0.25, repeat=1),
    row("block_shock", "check", math.nan, status="unsupported", reason="no 2:4 product here: é \ud800"),
]


def written(folder, name="a", group=0, rows=ROWS, **how):
    return cases.write(folder, run="r1", case=faulty(name, **how), group=group, rows=rows, context=CONTEXT, seconds=2.5)


def test_a_record_comes_back_as_it_was_written(tmp_path):
    path = written(tmp_path)
    assert path == tmp_path / "records" / "00000000000a-0.json"
    found = record.read(path)
    times, check = found["rows"][1:], found["rows"][0]
    assert [(one["value"], one["repeat"]) for one in times] == [(0.5, 0), (0.25, 1)]
    assert check["value"] is None and check["reason"] == "no 2:4 product here: é \\ud800", "a lone surrogate is no text"
    assert found["case"] == json.loads(json.dumps(faulty("a").as_dict())) and found["context"] == CONTEXT
    assert (found["study"], found["phase"], found["seconds"]) == ("linear", "phase1", 2.5)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name] and record.encode(found) == path.read_bytes()


def test_rows_of_one_quantity_whose_repeat_grows_are_one_series_of_arrays(tmp_path):
    losses = [row("block_shock", "loss", 1 / (step + 1), repeat=10 * step, detail="sgd") for step in range(1000)]
    twice = [row("dense", "loss", 1.0, repeat=3)] * 2
    path = written(tmp_path, rows=[losses[0], *twice, *losses[1:]])
    document = json.loads(path.read_text())
    (series,) = document["series"]
    assert len(series["value"]) == len(series["repeat"]) == 1000 and document["rows"] == twice
    assert record.read(path)["rows"] == twice + losses


def test_a_record_of_the_first_schema_is_of_the_linear_study_and_keeps_its_bytes(tmp_path):
    path = written(tmp_path)
    old = {key: value for key, value in record.read(path).items() if key not in ("study", "seconds")} | {"schema": 1}
    path.write_bytes(record.encode(old))
    assert "study" not in json.loads(path.read_text())
    found = record.read(path)
    assert (found["study"], found["seconds"]) == ("linear", None) and record.encode(found) == path.read_bytes()


def test_the_same_content_in_other_bytes_is_not_what_was_written(tmp_path):
    # A cut record and a flipped bit: tests/faults/test_fuzz.py.
    path = written(tmp_path)
    data = path.read_bytes()
    others = [data + b"\n", json.dumps(json.loads(data)).encode(), data.replace(b'"rank":-1', b'"rank":-01', 1)]
    others += [data.replace(b'{"case"', b'{"phase":"phase1",\n"case"', 1), b"[" * 100_000, b"null", b""]
    for bad in others:
        assert bad != data
        path.write_bytes(bad)
        with pytest.raises(RecordError, match=path.name):
            record.read(path)
    path.write_bytes(data)
    with pytest.raises(RecordError, match="of another case"):
        record.read(path.rename(path.with_name("00000000000b-0.json")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 3}, "schema 3 is newer than this version, which reads 1 and 2"),
        ({"schema": "2"}, "schema '2' is unknown"),
        ({"study": "gpt5"}, "of the study 'gpt5', which is not known here; known: linear"),
        ({"study": ["linear"]}, "not known here"),
        ({"series": [{"value": [1.0]}]}, "a series has exactly the keys"),
        ({"case": {}}, "damaged"),
        ({"context": {}}, "context has exactly"),
        ({"more": 1}, "exactly the keys"),
    ],
)
def test_a_document_that_is_no_record_says_what_is_wrong(tmp_path, change, says):
    path = written(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordError, match=says):
        record.read(path)


TIMES = ("forward_kernel", "step_kernel", "step_call", "compress_kernel", "floor_reduce", "floor_reduce_dx", "host_us")
BROKEN = {
    "time of zero": [row("dense", metric, 0.0) for metric in (*TIMES, "product_by_kernel")],
    "neither 0 nor 1": [row("dense", "check", 0.5)],
    "no finite value": [{"value": value} for value in (math.nan, math.inf, None, -1.0)],
    "unknown metric": [{"metric": "speed"}],
    "should be 'ms'": [{"unit": "s"}],
    "none of": [{"status": "fine"}],
    "without a reason": [{"status": "failed", "value": math.nan}],
    "can have no value": [{"status": "failed", "reason": "why"}],
    "repeat is a count": [{"repeat": -1}, {"rank": 1.0}],
    "are text": [{"detail": None}],
    "exactly the keys": [{"extra": 1}],
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_row_that_breaks_the_schema_is_refused(tmp_path, says):
    for change in BROKEN[says]:
        with pytest.raises(RecordError, match=says):
            written(tmp_path, rows=[ROWS[0], ROWS[0] | change])
    assert not list(tmp_path.rglob("*"))


def test_a_floor_of_arithmetic_may_be_zero_and_a_yes_a_whole_number_but_no_rows_are_no_record():
    validate([row("dense", "floor_compute", 0.0), row("dense", "check", 1), row("dense", "floor_refresh", 0.0)])
    for rows in ([], None):
        with pytest.raises(RecordError, match="no rows"):
            validate(rows)
