"""`compare` on copies of the committed runs: one thing is changed in a copy, and that thing is what it must say."""

from pathlib import Path

import pytest

from blockshock_lib.__main__ import main
from blockshock_lib.errors import CompareError, RecordError
from blockshock_lib.files import ROOT
from blockshock_lib.runs import manifest, record, reference
from blockshock_lib.runs.compare import compare
from blockshock_lib.runs.manifest import REFERENCE
from tests.cases import picked
from tests.small_runs import copied

CPU, CUDA = REFERENCE / "phase1-cpu", REFERENCE / "phase1-cuda-before"


def alter(folder: Path, change) -> Path:
    """`change` done to every record of a copy, each whole again afterwards."""
    for path in folder.glob("records/*.json"):
        document = record.read(path)
        change(document)
        path.write_bytes(record.encode(document))
    return folder


@pytest.fixture
def old(tmp_path):
    """Two cases of the GPU run, five groups."""
    return copied(CUDA, tmp_path / "day" / "old", 2)


@pytest.fixture
def new(tmp_path):
    return copied(CUDA, tmp_path / "day" / "new", 2)


def slower(factor, method="row_parallel", metric="forward_kernel"):
    def change(document):
        for row in picked(document["rows"], method, metric):
            row["value"] *= factor

    return change


def test_a_run_against_itself_has_no_regression_and_ratios_of_1(capsys):
    found = compare(CPU, CPU.relative_to(ROOT).as_posix())
    assert found.ok and found.regressions.empty and "hold at 99% together" in found.caption()
    assert len(found.rows) == 150 and found.rows["ratio"].dropna().to_numpy() == pytest.approx(1)
    assert main(["compare", str(CPU), str(CPU)]) == 0
    said = capsys.readouterr().out
    assert "no regression in 150" in said and len(said.splitlines()) < 8 and "not listed: 72 same" in said
    said = found.table.to_string()
    assert "time of plain calls" in said and "kernel time" not in said


def test_a_method_slowed_by_10_percent_is_found_and_the_command_fails(old, new):
    found = compare(old, alter(new, slower(1.1)))
    assert set(found.regressions["method"]) == {"B1 row-parallel"} and set(found.regressions["what"]) == {"kernel time"}
    assert not found.ok and "1.10x [" in found.regressions["b / a"].iloc[0]
    assert main(["compare", str(old), str(new)]) == 1
    assert main(["compare", str(new), str(old)]) == 0, "the other way round it is an improvement"


def test_records_that_are_damaged_or_missing_are_counted_and_a_case_that_lost_all_is_a_regression(old, new):
    paths = sorted(alter(new, slower(1.002, "block_shock", "weight_bytes")).glob("records/*.json"))
    paths[0].write_bytes(paths[0].read_bytes()[:-40])
    found = compare(old, new)
    assert "b: 1 records damaged or missing" in found.line() and set(found.rows["groups_b"].tolist()) >= {4, 5}
    assert set(found.regressions["what"]) == {"weight"} and set(found.regressions["method"]) == {"Block-Shock"}
    for path in paths[:5]:
        path.unlink()
    found = compare(old, new)
    assert found.regressions["note"].eq("passed → its record is missing").sum() == 7
    assert "b: 5 records damaged or missing" in found.line()
    manifest.note(new, cases=1)
    found = compare(old, new)
    assert len(found.regressions) == 1 and "only in a: 7 cells (A dense, B1 row-parallel," in found.line()
    for path in paths[5:]:
        path.unlink()
    with pytest.raises(CompareError, match="no whole record"):
        compare(old, new)


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
def test_each_part_of_the_hardware_counts_and_may_be_allowed(old, new, change, said, capsys):
    on_card(new, change)
    with pytest.raises(CompareError, match="allow hardware") as refused:
        compare(old, new)
    assert said in str(refused.value) and f"a = {old} and b = {new}" in str(refused.value)
    assert main(["compare", str(old), str(new)]) == 2 and said in capsys.readouterr().err
    found = compare(old, new, allow=("hardware",))
    assert found.ok and said in found.line() and "allowed all the same, hardware: " in found.line()


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

    def change(document):
        DIRTY(document)
        document["case"].update(dtype="fp16")
        document["context"]["machine"] = "0" * 12 if document["group"] else "1" * 12

    alter(new, change)
    said = "allow hardware,dtype,dirty.*the records of b come from several machines"
    with pytest.raises(CompareError, match=said):
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


def linked(old, folder, factor):
    """A further run of the reference of `old`, on another machine of its kind; every time takes `factor` as long."""
    alter(copied(CUDA, folder, 2), lambda document: document.update(run=folder.name))
    alter(folder, lambda document: document["context"].update(machine=folder.name))
    alter(folder, slower(factor, "block_shock", "forward_kernel"))
    facts = {"run": folder.name, "reference": reference.name_of(manifest.read(old)), "again": str(old)}
    manifest.note(folder, **facts)
    return folder


@pytest.mark.long
def test_a_run_is_judged_by_all_the_runs_of_a_reference_but_itself_and_a_slower_one_fails_the_command(old, capsys):
    others = [linked(old, old.parent / name, factor) for name, factor in (("second", 1.03), ("third", 0.97))]
    found = compare(old, linked(old, old.parent / "rerun", 1.02))
    times = found.rows[found.rows["unit"].eq("ms")]
    assert found.ok and set(times["groups_a"]) == {15} and set(times["groups_b"]) == {5}
    assert "3 runs of a foretold 24 of b's 24 speeds over B1" in found.line()
    assert "predict a further run of a's reference" in found.caption() and "is in no interval" not in found.caption()
    assert "2 runs of a" not in compare(others[0], others[0]).line(), "a run is not judged by itself and others"
    slow = linked(old, old.parent / "slow", 1.3)
    assert main(["compare", str(old), str(slow)]) == 1
    said = capsys.readouterr().out
    assert f"compare {old} with {slow}: " in said and "first kernel time of Block-Shock at" in said
    assert "1.29x [" in said


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.name for path in REFERENCE.glob("*-cpu")))
def test_a_shipped_run_beside_itself_is_the_same_of_whatever_study(name):
    found = compare(REFERENCE / name, REFERENCE / name)
    assert found.ok and len(found.rows) and not len(found.found.only) and found.text()
