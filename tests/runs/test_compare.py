"""`compare` on copies of the committed runs: one thing is changed in a copy, and that thing is what it must say."""

from pathlib import Path

import pytest

from blockshock_lib.__main__ import main
from blockshock_lib.errors import CompareError, RecordError
from blockshock_lib.files import ROOT
from blockshock_lib.runs import manifest, record, reference
from blockshock_lib.runs.compare import compare
from tests.small_runs import copied

REFERENCE = ROOT / "outputs" / "reference"
CPU, CUDA = REFERENCE / "phase1-cpu", REFERENCE / "phase1-cuda"


def alter(folder: Path, change) -> Path:
    """`change` done to every record of a copy, each whole again afterwards."""
    for path in folder.glob("records/*.json"):
        document = record.read(path)
        change(document)
        path.write_bytes(record.encode(document))
    return folder


def rows_of(document, method, metric):
    return [row for row in document["rows"] if row["method"] == method and row["metric"] == metric]


@pytest.fixture
def old(tmp_path):
    """Two cases of the GPU run, five groups."""
    return copied(CUDA, tmp_path / "day" / "old", 2)


@pytest.fixture
def new(tmp_path):
    return copied(CUDA, tmp_path / "day" / "new", 2)


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
    said = capsys.readouterr().out
    assert "no regression in 150" in said and len(said.splitlines()) < 8 and "not listed without --all: 72 same" in said
    assert main(["compare", str(CPU), str(CPU), "--all"]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) > 150 and "time of plain calls" in said and "kernel time" not in said


def test_a_method_slowed_by_10_percent_is_found_and_the_command_fails(old, new, capsys):
    found = compare(old, alter(new, slower(1.1)))
    assert set(found.regressions["method"]) == {"B1 row-parallel"} and set(found.regressions["what"]) == {"kernel time"}
    assert not found.ok and "1.10x [" in found.regressions["b / a"].iloc[0]
    assert f"compare {old} with {new}: " in found.line() and "first kernel time of B1 row-parallel at" in found.line()
    assert main(["compare", str(old), str(new)]) == 1
    assert "regression" in capsys.readouterr().out
    assert main(["compare", str(new), str(old)]) == 0, "the other way round it is an improvement"


def test_a_damaged_record_is_left_out_and_counted_and_weight_that_grew_by_a_hair_is_found(old, new):
    path = sorted(alter(new, slower(1.002, "block_shock", "weight_bytes")).glob("records/*.json"))[0]
    path.write_bytes(path.read_bytes()[:-40])
    found = compare(old, new)
    assert "b: 1 records damaged or missing" in found.line() and set(found.rows["groups_b"].tolist()) >= {4, 5}
    assert set(found.regressions["what"]) == {"weight"} and set(found.regressions["method"]) == {"Block-Shock"}
    for path in new.glob("records/*.json"):
        path.unlink()
    with pytest.raises(CompareError, match="no whole record"):
        compare(old, new)


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
        (lambda card: card["gpus"][0].update(memory_bytes=1), "NVIDIA H200 (1 B"),
        (lambda card: card["gpus"][0].update(name="NVIDIA H100"), "1x NVIDIA H100"),
        (lambda card: card["links"][0].update(kind="PCIe"), "links: a 1x NV18, b 1x PCIe"),
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


def test_other_libraries_drivers_and_parameters_and_an_early_end_are_allowed_and_told(old, new):
    on_card(new, lambda card: card.update(driver="999") or card["libraries"].update(torch="2.99"))
    inputs = manifest.read(new)["params"]
    inputs["timing"]["samples"], inputs["bias"] = 99, True
    manifest.note(new, params=inputs, status="interrupted")
    line = compare(old, new).line()
    assert "timing.samples 12 → 99" in line and "bias False → True" in line
    assert "b is a run that ended interrupted" in line
    assert "torch 2.11.0+cu130 → 2.99" in line and "driver 580.159.04 → 999" in line and "numpy" not in line


def made_by(**facts):
    """A change of a record's code; a fact may be a function of the record."""

    def change(document):
        code = {name: fact(document) if callable(fact) else fact for name, fact in facts.items()}
        document["context"]["code"].update(code)

    return change


DIRTY = made_by(dirty=True)
CODE = {
    "had uncommitted changes": DIRTY,
    "edited after its import": made_by(imported="0" * 12),
    "holds records made by 2 versions of the code": made_by(sources=lambda one: str(min(one["group"], 1)) * 12),
}


@pytest.mark.parametrize("said", CODE)
@pytest.mark.parametrize("side", ["a", "b"])
def test_code_that_nobody_can_name_is_refused_on_either_side(old, new, side, said):
    bad = alter(old if side == "a" else new, CODE[said])
    with pytest.raises(CompareError, match="allow dirty") as refused:
        compare(old, new)
    assert said in str(refused.value) and f"dirty: {bad}" in str(refused.value)
    assert said in compare(old, new, allow=["dirty"]).line()


def test_runs_of_two_phases_are_told_so_before_anything_else(old, new):
    on_card(new, lambda card: card["cpu"].update(cores=16))
    alter(new, lambda document: (document.update(phase="phase2"), document["case"].update(phase="phase2")))
    with pytest.raises(CompareError, match=r"share no case: they are of phase1 and phase2$"):
        compare(old, new)


def test_everything_that_is_refused_is_said_at_once(old, new):
    on_card(new, lambda card: card["cpu"].update(cores=16))
    alter(new, lambda document: (DIRTY(document), document["case"].update(dtype="fp16")))
    with pytest.raises(CompareError, match="allow hardware,dtype,dirty"):
        compare(old, new)
    with pytest.raises(CompareError, match="allow dirty"):
        compare(old, new, allow=("hardware", "dtype"))
    with pytest.raises(CompareError, match="'speed'; allowed: hardware, dtype, dirty"):
        compare(old, new, allow=["speed"])
    assert compare(old, new, allow=("hardware", "dtype", "dirty")).ok


@pytest.mark.parametrize(
    "facts", [{"params": []}, {"params": {"timing": 3}}, {"machine": "x"}, {"machine": {"gpus": ["x"]}}]
)
def test_a_manifest_that_is_not_in_order_is_refused(old, new, facts):
    manifest.note(new, **facts)
    with pytest.raises(RecordError, match="holds no readable manifest"):
        compare(old, new)


def test_in_a_notebook_it_is_a_table_and_hostile_text_stays_text(old, new):
    def change(document):
        for row in rows_of(document, "dense", "check"):
            row.update(value=None, status="failed", reason="<img src=x onerror=alert(1)>")

    on_card(new, lambda card: card["libraries"].update(torch="<script>alert(1)</script>"))
    page = compare(old, alter(new, change))._repr_html_()
    assert "passed → failed: &lt;img src=x onerror" in page and "no change shown" in page
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;alert(1)" in page


def linked(old, folder, factor):
    """A further run of the reference of `old`, on another machine of its kind; every time takes `factor` as long."""
    alter(copied(CUDA, folder, 2), lambda document: document.update(run=folder.name))
    alter(folder, lambda document: document["context"].update(machine=folder.name))
    alter(folder, slower(factor, "block_shock", "forward_kernel"))
    facts = {"run": folder.name, "reference": reference.name_of(manifest.read(old)), "again": str(old)}
    manifest.note(folder, **facts)
    return folder


def test_a_run_is_judged_by_all_the_runs_of_a_reference_but_itself(old):
    others = [linked(old, old.parent / name, factor) for name, factor in (("second", 1.03), ("third", 0.97))]
    found = compare(old, linked(old, old.parent / "rerun", 1.02))
    times = found.rows[found.rows["unit"].eq("ms")]
    assert found.ok and set(times["groups_a"]) == {15} and set(times["groups_b"]) == {5}
    assert "3 runs of a foretold 24 of b's 24 speeds over B1" in found.line()
    assert "predict a further run of a's reference" in found.caption() and "is in no interval" not in found.caption()
    assert not compare(old, linked(old, old.parent / "slow", 1.3)).ok
    assert "2 runs of a" not in compare(others[0], others[0]).line(), "a run is not judged by itself and others"
