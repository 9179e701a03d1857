import json
import math
import warnings

import pandas as pd
import pytest

from blockshock_lib import records
from blockshock_lib.errors import RecordError
from tests.faults.workers import CONTEXT, Case

ROWS = [
    records.row("row_parallel", "forward_kernel", 0.5, repeat=0),
    records.row("row_parallel", "forward_kernel", 0.25, repeat=1),
    records.row("block_shock", "check", math.nan, status="unsupported", reason="no 2:4 product here: é \ud800"),
]


def written(folder, name="a", group=0, rows=ROWS, **case):
    return records.write(folder, run="r1", case=Case(name, **case), group=group, rows=rows, context=CONTEXT)


def test_a_record_comes_back_as_it_was_written(tmp_path):
    path = written(tmp_path)
    assert path == tmp_path / "records" / "00000000000a-0.json"
    record = records.read(path)
    assert [one["value"] for one in record["rows"]] == [0.5, 0.25, None]
    assert record["rows"][2]["reason"] == ROWS[2]["reason"]
    assert record["case"] == json.loads(json.dumps(Case("a").as_dict()))
    assert record["context"] == CONTEXT
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


def test_the_frame_has_one_row_a_measurement_with_its_case(tmp_path):
    written(tmp_path, "a", 0)
    written(tmp_path, "b", 1, in_features=128, out_features=512)
    frame = records.load(tmp_path)
    assert list(frame.columns) == [*records.CASE_COLUMNS, *records.ROW_COLUMNS]
    assert len(frame) == 6
    square, wide = frame[frame.case == "00000000000a"], frame[frame.case == "00000000000b"]
    assert set(square.n) == {128} and wide.n.isna().all() and set(wide["shape"]) == {"512x128"}
    assert set(square.group) == {0} and set(wide.group) == {1}
    assert set(frame["mask"]) == {"checkerboard"} and set(frame.workload) == {"gaussian"} and set(frame.run) == {"r1"}
    assert frame[frame.status == "ok"].value.notna().all() and frame[frame.status != "ok"].value.isna().all()
    assert frame.attrs["damaged"] == []


def test_a_record_from_before_training_has_no_optimizer(tmp_path):
    written(tmp_path)
    assert set(records.load(tmp_path).optimizer) == {""}


def test_only_a_floor_may_be_a_time_of_zero(tmp_path):
    assert all(m.startswith("floor_") for m in records.MAY_BE_ZERO_MS)
    records.validate([records.row("row_parallel", "floor_refresh", 0.0)])
    for metric in (
        "step_kernel",
        "step_call",
        "compress_kernel",
        "refresh_kernel",
        "dx_kernel",
        "pass_call",
        "floor_reduce_dx",
        "host_us",
        "product_by_kernel",
    ):
        with pytest.raises(RecordError, match="time of zero"):
            records.validate([records.row("row_parallel", metric, 0.0)])


def test_a_run_without_records_gives_an_empty_frame_with_all_columns(tmp_path):
    frame = records.load(tmp_path)
    assert frame.empty and list(frame.columns) == [*records.CASE_COLUMNS, *records.ROW_COLUMNS]
    with pytest.raises(RecordError, match="no folder"):
        records.load(tmp_path / "missing")


def test_a_folder_named_twice_is_read_once(tmp_path):
    written(tmp_path)
    assert len(records.load(tmp_path, tmp_path / "records")) == len(ROWS)


def test_the_same_content_in_other_bytes_is_not_what_was_written(tmp_path):
    # A cut record and a flipped bit: tests/faults/test_damaged_records.py.
    path = written(tmp_path)
    data = path.read_bytes()
    others = [data + b"\n", json.dumps(json.loads(data)).encode(), data.replace(b'"repeat":0', b'"repeat":00', 1)]
    others += [data.replace(b'{"case"', b'{"phase":"phase1",\n"case"', 1), b"[" * 100_000, b"null", b""]
    for bad in others:
        assert bad != data
        path.write_bytes(bad)
        with pytest.raises(RecordError, match=path.name):
            records.read(path)
    path.write_bytes(data)
    records.read(path)


def test_a_damaged_record_is_named_and_the_rest_of_the_run_loads(tmp_path):
    whole, cut = written(tmp_path, "a"), written(tmp_path, "b")
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.warns(UserWarning, match=cut.name):
        frame = records.load(tmp_path)
    assert set(frame.case) == {whole.name[:12]} and frame.attrs["damaged"] == [cut.name]
    with pytest.raises(RecordError, match=cut.name):
        records.load(tmp_path, strict=True)


def test_a_record_of_another_schema_says_so(tmp_path):
    path = written(tmp_path)
    path.write_text(path.read_text().replace('"schema":1', '"schema":2'))
    with pytest.raises(RecordError, match="schema 2 is unknown"):
        records.read(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value": 0.0}, "time of zero"),
        ({"value": math.nan}, "no finite value"),
        ({"value": math.inf}, "no finite value"),
        ({"value": None}, "no finite value"),
        ({"value": -1.0}, "no finite value"),
        ({"metric": "floor_reduce", "value": 0.0}, "time of zero"),
        ({"metric": "speed"}, "unknown metric"),
        ({"unit": "s"}, "should be 'ms'"),
        ({"status": "fine"}, "none of"),
        ({"status": "failed", "value": math.nan}, "without a reason"),
        ({"status": "failed", "reason": "why"}, "can have no value"),
        ({"repeat": -1}, "repeat"),
        ({"rank": 1.0}, "rank"),
        ({"detail": None}, "are text"),
        ({"extra": 1}, "exactly the keys"),
    ],
)
def test_a_row_that_breaks_the_schema_is_refused(tmp_path, change, says):
    with pytest.raises(RecordError, match=says):
        written(tmp_path, rows=[ROWS[0], ROWS[0] | change])
    assert not list(tmp_path.rglob("*"))


def test_only_a_floor_may_be_zero_and_only_yes_or_no_is_a_bool(tmp_path):
    records.validate([records.row("dense", "floor_compute", 0.0), records.row("dense", "check", 1)])
    with pytest.raises(RecordError, match="neither 0 nor 1"):
        records.validate([records.row("dense", "check", 0.5)])
    for nothing in ([], None):
        with pytest.raises(RecordError, match="no rows"):
            records.validate(nothing)


def test_a_context_that_is_incomplete_or_no_json_is_refused(tmp_path):
    for context in ({"code": {}}, CONTEXT | {"code": object()}, CONTEXT | {"machine": math.nan}):
        with pytest.raises(RecordError):
            records.write(tmp_path, run="r1", case=Case("a"), group=0, rows=ROWS, context=context)
    assert not list(tmp_path.rglob("*"))


def test_a_failed_replacement_leaves_the_old_record_and_no_temporary(tmp_path, monkeypatch):
    path = written(tmp_path)
    before = path.read_bytes()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(records.os, "replace", refuse)
    with pytest.raises(RecordError, match="Permission denied"):
        written(tmp_path, rows=ROWS[:1])
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_loading_warns_of_nothing_when_all_is_well(tmp_path):
    written(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(records.load(tmp_path), pd.DataFrame)
