"""`compare` on copies of the committed runs: one thing is changed in a copy, and that thing is what it must say."""

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from blockshock_lib import manifest, records
from blockshock_lib.__main__ import main
from blockshock_lib.comparison import compare
from blockshock_lib.errors import CompareError, RecordError
from blockshock_lib.manifest import ROOT

REFERENCE = ROOT / "outputs" / "reference"
CPU, CUDA = REFERENCE / "phase1-cpu", REFERENCE / "phase1-cuda"


def part(source: Path, target: Path, cases: int) -> Path:
    """A copy of the first cases of a run, of its manifest and records alone."""
    shutil.copytree(source / "records", target / "records")
    kept = sorted({path.name.split("-")[0] for path in target.glob("records/*.json")})[:cases]
    for path in target.glob("records/*.json"):
        if path.name.split("-")[0] not in kept:
            path.unlink()
    shutil.copy(source / manifest.FILE, target)
    manifest.note(target, cases=cases)
    return target


def alter(folder: Path, change) -> Path:
    """`change` done to every record of a copy, each whole again afterwards."""
    for path in folder.glob("records/*.json"):
        document = records.read(path)
        del document["digest"]
        change(document)
        path.write_bytes(records._encode(document | {"digest": records._digest(document)}))
    return folder


def rows_of(document, method, metric):
    return [row for row in document["rows"] if row["method"] == method and row["metric"] == metric]


@pytest.fixture
def old(tmp_path):
    """Two cases of the GPU run, five groups."""
    return part(CUDA, tmp_path / "old", 2)


@pytest.fixture
def new(tmp_path):
    return part(CUDA, tmp_path / "new", 2)


def slower(factor, method="row_parallel", metric="forward_kernel"):
    def change(document):
        for row in rows_of(document, method, metric):
            row["value"] *= factor

    return change


def test_a_run_against_itself_has_no_regression_and_ratios_of_1(capsys):
    found = compare(CUDA, "phase1-cuda")
    assert found.ok and found.regressions.empty and len(found.rows) == 20 * 7 * 5
    assert found.rows["ratio"].dropna().to_numpy() == pytest.approx(1)
    assert "no regression in 700" in found.line() and "hold at 99% together" in found.caption()
    assert main(["compare", str(CPU), str(CPU)]) == 0
    assert "no regression in 150" in capsys.readouterr().out


def test_a_method_slowed_by_10_percent_is_found_and_the_command_fails(old, new, capsys):
    found = compare(old, alter(new, slower(1.1)))
    assert set(found.regressions["method"]) == {"B1 row-parallel"} and set(found.regressions["what"]) == {"kernel time"}
    assert not found.ok and "1.10x [" in found.regressions["b / a"].iloc[0]
    assert f"compare {old} with {new}: " in found.line() and "first kernel time of B1 row-parallel at" in found.line()
    assert main(["compare", str(old), str(new)]) == 1
    assert "regression" in capsys.readouterr().out
    assert main(["compare", str(new), str(old)]) == 0, "the other way round it is an improvement"


def test_the_command_itself_exits_with_1(old, new):
    alter(new, slower(1.1))
    line = [sys.executable, "-m", "blockshock_lib", "compare", str(old), str(new)]
    ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1 and "B1 row-parallel" in ran.stdout and not ran.stderr


def test_a_failed_check_comes_before_everything_else(old, new):
    def fail(document):
        slower(2.0)(document)
        if document["group"] == 3:
            for row in rows_of(document, "dense", "check"):
                row.update(value=None, status="failed", reason="max error 3.1x the baseline's")

    found = compare(old, alter(new, fail))
    first = found.regressions.iloc[0]
    assert (first["what"], first["method"]) == ("check", "A dense") and len(found.regressions) > 2
    assert first["note"] == "passed → failed: max error 3.1x the baseline's"


def test_weight_that_grew_by_a_hair_is_found(old, new):
    found = compare(old, alter(new, slower(1.002, "block_shock", "weight_bytes")))
    assert set(found.regressions["what"]) == {"weight"} and set(found.regressions["method"]) == {"Block-Shock"}


def test_a_record_that_is_missing_or_damaged_in_the_newer_run_is_a_regression(old, new):
    lost = sorted(path for path in new.glob("records/*.json"))[0].name.split("-")[0]
    for path in new.glob(f"records/{lost}-*.json"):
        path.unlink()
    found = compare(old, new)
    assert len(found.regressions) == 7 and set(found.regressions["note"]) == {"passed → its record is missing"}
    assert "b: 5 records damaged or missing" in found.line()
    manifest.note(new, cases=1)
    found = compare(old, new)
    assert found.ok and "only in a: 7 cells (A dense, B1 row-parallel," in found.line()


def test_a_damaged_record_is_left_out_and_counted(old, new):
    path = sorted(new.glob("records/*.json"))[0]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(UserWarning, match="damaged"):
        found = compare(old, new)
    assert "b: 1 records damaged or missing" in found.line() and set(found.rows["groups_b"].tolist()) >= {4, 5}


def test_different_hardware_is_refused_with_both_sides_by_name(capsys):
    with pytest.raises(CompareError) as refused:
        compare(CPU, CUDA)
    said = str(refused.value)
    assert "a = outputs/reference/phase1-cpu and b = outputs/reference/phase1-cuda" in said
    assert "GPUs: a none, b 2x NVIDIA H200" in said and "allow hardware" in said and "\n" not in said
    assert main(["compare", str(CPU), str(CUDA)]) == 2 and "NVIDIA H200" in capsys.readouterr().err


def on_card(folder, change):
    card = manifest.read(folder)["machine"]
    change(card)
    manifest.note(folder, machine=card)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda card: card["gpus"][1].update(power_limit_w=350.0), "1x NVIDIA H200 (150754820096 B, limit 350.0 W)"),
        (lambda card: card["gpus"].pop(), "b 1x NVIDIA H200"),
        (lambda card: card["gpus"][0].update(memory_bytes=1), "NVIDIA H200 (1 B"),
        (lambda card: card["gpus"][0].update(name="NVIDIA H100"), "1x NVIDIA H100"),
        (lambda card: card["links"][0].update(kind="PCIe"), "links: a 1x NV18, b 1x PCIe"),
        (lambda card: card["cpu"].update(model="other"), "b other, 32 cores"),
        (lambda card: card["cpu"].update(cores=16), "16 cores"),
    ],
)
def test_each_part_of_the_hardware_counts_and_may_be_allowed(old, new, change, said):
    on_card(new, change)
    with pytest.raises(CompareError, match="allow hardware") as refused:
        compare(old, new)
    assert said in str(refused.value)
    found = compare(old, new, allow=("hardware",))
    assert found.ok and said in found.line() and "allowed all the same, hardware: " in found.line()


def test_records_of_several_machines_in_one_run_are_refused(old, new):
    def change(document):
        document["context"]["machine"] = "0" * 12 if document["group"] else "1" * 12

    with pytest.raises(CompareError, match="the records of b come from several machines"):
        compare(old, alter(new, change))


def test_other_libraries_and_drivers_are_allowed_and_told(old, new):
    on_card(new, lambda card: card.update(driver="999") or card["libraries"].update(torch="2.99"))
    line = compare(old, new).line()
    assert "torch 2.11.0+cu130 → 2.99" in line and "driver 580.159.04 → 999" in line and "numpy" not in line


def test_other_parameters_of_measuring_are_told(old, new):
    inputs = manifest.read(new)["params"]
    inputs["timing"]["samples"], inputs["bias"] = 99, True
    manifest.note(new, params=inputs)
    line = compare(old, new).line()
    assert "timing.samples 12 → 99" in line and "bias False → True" in line


def dirty_record(document):
    document["context"]["code"]["dirty"] = True


def stale_record(document):
    document["context"]["code"]["imported"] = "0" * 12


def fresh_record(document):
    document["context"]["code"] |= {"imported": document["context"]["code"]["sources"], "dirty": False}


def mixed_records(document):
    document["context"]["code"]["sources"] = "0" * 12 if document["group"] else "1" * 12


@pytest.mark.parametrize(
    "change, said",
    [
        (dirty_record, "had uncommitted changes"),
        (stale_record, "edited after its import"),
        (mixed_records, "holds records made by 2 versions of the code"),
    ],
)
@pytest.mark.parametrize("side", ["a", "b"])
def test_code_that_nobody_can_name_is_refused_on_either_side(old, new, side, change, said):
    bad = alter(old if side == "a" else new, change)
    with pytest.raises(CompareError, match="allow dirty") as refused:
        compare(old, new)
    assert said in str(refused.value) and f"dirty: {bad}" in str(refused.value)
    assert said in compare(old, new, allow=["dirty"]).line()


def test_a_manifest_with_uncommitted_changes_is_refused(old, new):
    manifest.note(new, code={"commit": "0" * 40, "dirty": True, "sources": "0" * 12})
    with pytest.raises(CompareError, match="uncommitted changes"):
        compare(old, new)


def test_clean_code_is_not_refused_and_code_outside_git_is_told(old, new):
    assert "a and b ran outside git" in compare(old, new).line()
    assert "outside git" not in compare(alter(old, fresh_record), alter(new, fresh_record)).line()


def test_another_commit_is_what_is_compared_and_is_told(old, new):
    def change(document):
        document["context"]["code"] |= {"commit": "f" * 40, "sources": "0" * 12, "imported": "0" * 12}

    code = records.read(next((old / "records").glob("*.json")))["context"]["code"]
    was = f"{code['commit'][:7]}/{code['sources']}"
    assert f"code {was} → fffffff/000000000000" in compare(old, alter(new, change)).line()


def test_another_dtype_is_refused_and_paired_where_told(old, new):
    alter(new, lambda document: document["case"].update(dtype="fp16"))
    with pytest.raises(CompareError, match="allow dtype") as refused:
        compare(old, new)
    assert "2 cases are bf16 in a and fp16 in b" in str(refused.value)
    found = compare(old, new, allow="dtype")
    assert set(found.rows["dtype"]) == {"bf16 → fp16"} and len(found.rows) == 2 * 7 * 5


def test_emulated_ranks_are_other_hardware(old, new):
    alter(new, lambda document: document["case"].update(emulated=True))
    with pytest.raises(CompareError, match="allow hardware"):
        compare(old, new)
    found = compare(old, new, allow=["hardware"])
    assert len(found.rows) == 2 * 7 * 5 and "emulated on one GPU" in found.line()


def test_everything_that_is_refused_is_said_at_once(old, new):
    on_card(new, lambda card: card["cpu"].update(cores=16))
    alter(new, lambda document: (dirty_record(document), document["case"].update(dtype="fp16")))
    with pytest.raises(CompareError, match="allow hardware,dtype,dirty"):
        compare(old, new)
    with pytest.raises(CompareError, match="allow dirty"):
        compare(old, new, allow=("hardware", "dtype"))
    assert compare(old, new, allow=("hardware", "dtype", "dirty")).ok


def test_one_may_allow_only_what_there_is(old):
    with pytest.raises(CompareError, match="'speed'; allowed: hardware, dtype, dirty"):
        compare(old, old, allow=["speed"])


def test_runs_of_different_phases_share_no_case():
    with pytest.raises(CompareError, match=r"share no case: phase0, .* in a, phase1, .* in b"):
        compare(REFERENCE / "phase0-cuda", CUDA)


def test_one_group_makes_no_claim(old, new):
    for path in new.glob("records/*-[1-9].json"):
        path.unlink()
    inputs = manifest.read(new)["params"]
    inputs["timing"]["groups"] = 1
    manifest.note(new, params=inputs)
    found = compare(old, alter(new, slower(3.0)))
    assert found.ok and "28 times without an interval (one group), so without a claim" in found.line()


def test_a_cpu_is_compared_without_a_claim_about_gpus():
    found = compare(CPU, CPU)
    assert "a CPU: no claim about GPUs" in found.line() and found.figure().alt.count("no claim about speed: CPU")


def test_a_run_is_found_by_folder_name_or_open_run(old, monkeypatch, tmp_path):
    for run in (old, str(old), types.SimpleNamespace(source=old)):
        assert compare(run, old).a == str(old)
    assert compare("outputs/reference/phase1-cpu", "reference/phase1-cpu").b == "outputs/reference/phase1-cpu"
    monkeypatch.chdir(tmp_path)
    assert compare("old", old).ok and compare("phase1-cpu", "outputs/reference/phase1-cpu").ok


def test_of_two_runs_of_one_name_each_is_found_by_its_place_and_neither_by_the_name(monkeypatch, tmp_path):
    monkeypatch.setattr("blockshock_lib.run.OUTPUTS", tmp_path / "outs")
    days = [part(CPU, tmp_path / "outs" / day / "same", 1) for day in ("monday", "tuesday")]
    found = compare("monday/same", "tuesday/same")
    assert [found.a, found.b] == [str(day) for day in days]
    with pytest.raises(CompareError, match=r"it is the name of .*monday/same, .*tuesday/same|tuesday/same, .*monday"):
        compare("same", days[0])


@pytest.mark.parametrize("name", ["no such run", "outputs", "/", ""])
def test_what_is_no_run_is_refused_by_name(name, old):
    with pytest.raises(CompareError, match="is no folder of a run"):
        compare(old, name)


def test_a_redrawn_run_is_compared_by_the_records_it_was_drawn_from(old, tmp_path):
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    (drawn / manifest.FILE).write_text(json.dumps(manifest.read(old) | {"redrawn_from": str(old)}))
    assert compare(drawn, old).a == str(old)


def test_a_run_that_did_not_finish_is_told(old, new):
    manifest.note(new, status="interrupted")
    assert "b is a run that ended interrupted" in compare(old, new).line()


@pytest.mark.parametrize(
    "facts",
    [
        {"params": []},
        {"params": {"timing": 3}},
        {"machine": "x"},
        {"machine": {"gpus": 3}},
        {"machine": {"gpus": ["x"]}},
        {"machine": {"cpu": []}},
    ],
)
def test_a_manifest_that_is_not_in_order_is_refused(old, new, facts):
    manifest.note(new, **facts)
    with pytest.raises(RecordError, match="holds no readable manifest"):
        compare(old, new)


def test_a_run_without_a_whole_record_is_refused(old, new):
    for path in new.glob("records/*.json"):
        path.unlink()
    with pytest.raises(CompareError, match="no whole record"):
        compare(old, new)


def test_in_a_notebook_it_is_a_table_and_a_figure_and_hostile_text_stays_text(old, new):
    def change(document):
        slower(1.3)(document)
        for row in rows_of(document, "dense", "check"):
            row.update(value=None, status="failed", reason="<img src=x onerror=alert(1)>")

    on_card(new, lambda card: card["libraries"].update(torch="<script>alert(1)</script>"))
    page = compare(old, alter(new, change))._repr_html_()
    assert page.count("<table") == 2 and "<details>" in page and '<img alt="b is worse than a' in page
    assert "<script" not in page and "<img src=x" not in page
    assert "&lt;script&gt;alert(1)" in page and "&lt;img src=x onerror" in page
    assert page.index("regression") < page.index("no change shown")


def test_for_a_terminal_the_regressions_stand_above_a_few_other_rows(old, new):
    found = compare(old, alter(new, slower(1.3)))
    text = found.text(most=3)
    bad = len(found.regressions)
    assert sum(line.lstrip().startswith("regression") for line in text.splitlines()) == bad > 0
    assert f"... and {70 - bad - 3} more rows" in text and text.endswith(found.line())
