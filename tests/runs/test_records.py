"""The records of a run: files while it lives, one sealed table once it is finished, the same frame from either."""

import json
import random

import pandas as pd
import pyarrow.parquet as parquet
import pytest

from blockshock_lib import files
from blockshock_lib.errors import RecordError
from blockshock_lib.runs import manifest, record, records
from tests.runs.test_record import written
from tests.small_runs import cut, flip

OWN = ["in_features", "out_features", "n", "shape", "batch", "mask", "workload", "optimizer"]


@pytest.fixture
def run(tmp_path):
    """A run of two cases: a square weight in group 0, a wide one in group 1."""
    written(tmp_path, "a", 0)
    written(tmp_path, "b", 1, in_features=128, out_features=512)
    noted = dict(run="r1", phase="phase1", status="completed", params={}, machine={"title": "t"}, started="2026")
    manifest.note(tmp_path, **noted, files={"records/a.json": "0", "n.ipynb": "1"})
    return tmp_path


def test_the_frame_has_one_row_a_measurement_with_its_case(run):
    frame = records.load(run)
    assert list(frame.columns) == [*record.RUN_COLUMNS, *OWN, *record.CASE_COLUMNS, *record.ROW_COLUMNS]
    assert len(frame) == 6 and frame.attrs["damaged"] == []
    square, wide = frame[frame.case == "00000000000a"], frame[frame.case == "00000000000b"]
    assert set(square.n) == {128} and wide.n.isna().all() and set(wide["shape"]) == {"512x128"}
    assert set(square.group) == {0} and set(wide.group) == {1} and set(frame.seconds) == {2.5}
    assert set(frame["mask"]) == {"checkerboard"} and set(frame.study) == {"linear"} and set(frame.run) == {"r1"}
    assert set(frame.optimizer) == {""}, "a case from before training"
    assert frame[frame.status == "ok"].value.notna().all() and frame[frame.status != "ok"].value.isna().all()


def test_a_run_without_records_gives_an_empty_frame_with_the_general_columns(tmp_path):
    with pytest.raises(RecordError, match="no folder of a run; all runs: python -m blockshock_lib list"):
        records.load(tmp_path)  # as outputs/ itself
    (tmp_path / "records").mkdir()
    frame = records.load(tmp_path)
    assert frame.empty and list(frame.columns) == [*record.RUN_COLUMNS, *record.CASE_COLUMNS, *record.ROW_COLUMNS]
    with pytest.raises(RecordError, match="no folder"):
        records.load(tmp_path / "missing")


def test_a_finished_run_is_one_sealed_table_of_the_same_rows(run):
    form = records.PARQUET
    frame = records.load(run)
    assert records.pack(run) == run / form and records.pack(run) is None
    assert sorted(path.name for path in run.iterdir()) == ["manifest.json", form]
    assert manifest.read(run)["files"] == {form: files.sha256(run / form), "n.ipynb": "1"}
    pd.testing.assert_frame_equal(records.load(run, strict=True), frame)
    assert records.any_in(run)
    assert list(pd.read_parquet(run / form).columns) == list(frame.columns), "without this library"


def test_a_run_that_was_stopped_between_table_and_files_or_whose_table_is_wrong_has_its_records(run, monkeypatch):
    frame, tables, (whole, _) = records.load(run), [], records.scan(run)
    with monkeypatch.context() as patch, pytest.raises(RecordError, match="they stand"):
        patch.setattr(records, "read_table", lambda *_: whole[:1])  # it does not read back equal
        records.pack(run)
    assert sorted(path.name for path in run.iterdir()) == ["manifest.json", "records"]
    (run / records.PARQUET).write_bytes(b"half a table")
    pd.testing.assert_frame_equal(records.load(run), frame)  # the manifest does not name it yet
    monkeypatch.setattr(type(run), "unlink", lambda path, **_: tables.append(path) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        records.pack(run)
    assert len(list((run / "records").iterdir())) == 2 and tables
    pd.testing.assert_frame_equal(records.load(run), frame)


def test_a_table_without_its_manifest_or_that_unpacks_to_too_much_is_not_opened(run, monkeypatch):
    packed = records.pack(run)
    with monkeypatch.context() as patch, pytest.raises(RecordError, match="unpacks to more than"):
        patch.setattr(records, "MAX_BYTES", 100)
        records.load(run, strict=True)
    (run / manifest.FILE).unlink()
    with pytest.raises(RecordError, match="it has no digest"):
        records.load(run, strict=True)
    manifest.note(run, files={packed.name: files.sha256(b"a stranger's")})
    with pytest.raises(RecordError, match="does not match its digest"):
        records.load(run, strict=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda about: about["records"][0].update(schema=3), "schema 3 is newer"),
        (lambda about: about["records"][0].update(rows=2), "rows that its records have"),
        (lambda about: about["records"][0].update(context=7), "damaged"),
        (lambda about: about["records"][0]["case"].clear(), "damaged"),
        (lambda about: about.clear(), "damaged"),
    ],
)
def test_a_sealed_table_of_no_records_is_refused(run, change, says):
    table = parquet.read_table(packed := records.pack(run))
    about = json.loads(table.schema.metadata[b"blockshock"])
    change(about)
    parquet.write_table(table.replace_schema_metadata({b"blockshock": json.dumps(about)}), packed)
    manifest.note(run, files={packed.name: files.sha256(packed)})
    with pytest.raises(RecordError, match=says):
        records.load(run, strict=True)


def test_records_of_a_newer_schema_are_never_skipped(run):
    path = run / "records" / "00000000000a-0.json"
    path.write_text(path.read_text().replace('"schema":2', '"schema":3'))
    with pytest.raises(RecordError, match="schema 3 is newer"):
        records.load(run)


IN_ITS_PLACE = {
    "empty file": lambda path, data: path.touch(),
    "folder": lambda path, data: path.mkdir(),
    "link to nothing": lambda path, data: path.symlink_to(path.parent / "nothing"),
    "another record": lambda path, data: path.write_bytes(data.replace(b'"group":1', b'"group":2')),
}


@pytest.mark.parametrize("what", IN_ITS_PLACE)
def test_what_stands_in_the_place_of_a_record_is_named_and_the_rest_loads(what, run):
    path = run / "records" / "00000000000b-1.json"
    data = path.read_bytes()
    path.unlink()
    IN_ITS_PLACE[what](path, data)
    with pytest.warns(UserWarning, match=path.name):
        frame = records.load(run)
    assert frame.attrs["damaged"] == [path.name] and set(frame.group) == {0}


def test_table_cut_at_any_byte_or_bit_flipped_never_reaches_its_reader(run, monkeypatch):
    """pyarrow can end the process on a flipped bit: the seal is checked before it sees one."""
    path, draw = records.pack(run), random.Random(0)
    data = path.read_bytes()
    monkeypatch.setattr(records, "_decode", lambda *_: pytest.fail("a damaged table was opened"))
    for count in range(400):
        path.write_bytes((cut if count < 200 else flip)(data, draw))
        with pytest.raises(RecordError, match=rf"{path.name} is damaged: its content does not match its digest"):
            records.load(run, strict=True)
    with pytest.warns(UserWarning, match=path.name):
        assert records.load(run).empty
