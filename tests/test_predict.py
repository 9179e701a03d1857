import datetime as dt
import json
import re
import shutil
from pathlib import Path

import pytest

from blockshock_lib import manifest, params, plan, predict, records, worker, workers
from blockshock_lib.engine.phases import PHASES
from blockshock_lib.layers.case_costs import CaseCosts
from blockshock_lib.methods import METHODS
from blockshock_lib.predict import costs, duration, earlier, memory

REFERENCE = manifest.ROOT / "outputs" / "reference"


@pytest.fixture(scope="module")
def cpu():
    return manifest.read(REFERENCE / "phase1-cpu")["machine"]


@pytest.fixture(scope="module")
def h200():
    return manifest.read(REFERENCE / "phase1-cuda")["machine"]


def asked(phase="phase1", hardware="cpu", **settings):
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return params.load(phase, dotted, choose={"hardware": hardware})


@pytest.mark.parametrize("name", ["phase1-cpu", "phase1-cuda"])
def test_costs_and_floors_are_those_that_the_engine_recorded(name, tmp_path):
    m = manifest.read(REFERENCE / name)
    table = predict.plan(params.Params.model_validate(m["params"]), m["machine"], tmp_path)
    checked = 0
    for row in table[table["unsupported"].eq("")].itertuples():
        record = records.read(REFERENCE / name / "records" / f"{row.case}-0.json")
        found = {r["metric"]: r["value"] for r in record["rows"] if r["method"] == row.method and r["status"] == "ok"}
        assert (row.bytes_read, row.bytes_written, row.bytes_sent, row.flops) == tuple(
            found[key] for key in ("bytes_read", "bytes_written", "bytes_sent", "flops")
        )
        assert row.weight_bytes == found["weight_bytes_formula"]
        own = {r["metric"]: r["value"] for r in record["rows"] if r["method"] == "ceiling"}
        case = plan.Case.from_dict(record["case"])
        least = predict.floor(costs.pieces(case, row.method), costs.roofline.Ceilings(**own))
        # A forward that cut its batch may hide a part of the shorter one; a plan does not know what will be chosen.
        in_turn = found["floor_compute"] + found.get("floor_reduce", 0)
        assert least.whole == pytest.approx(in_turn, rel=1e-12) and found["floor_forward"] <= in_turn * (1 + 1e-12)
        checked += 1
    assert checked == {"phase1-cpu": 36, "phase1-cuda": 140}[name]


def test_the_small_batch_product_is_judged_by_its_own_line_of_the_card(h200):
    (case,) = plan.expand(asked(hardware="cuda", sweep__n=[4096], sweep__b=[16], product="small"))
    card = h200 | {"unsupported": {"small-batch product": "no compiler"}}
    assert costs.cannot(case, "block_shock", card) == "no compiler"
    assert costs.cannot(case, "block_shock_torch", card) == costs.cannot(case, "row_parallel", card) == ""


def test_the_floor_is_the_longer_of_bytes_and_arithmetic_and_the_link_after_it():
    work = costs.Cost(flops=2e12, read=3e9, written=1e9, sent=1e8, weights=0, peak=0)
    found = predict.floor({"forward": work}, costs.roofline.Ceilings(1000, 100, 10))
    assert found[:4] == pytest.approx((4.0, 20.0, 10.0, 30.0))
    assert found.bound == "arithmetic"
    assert predict.floor({"forward": work._replace(sent=1e9)}, costs.roofline.Ceilings(1000, 100, 10)).bound == "link"
    assert (
        predict.floor({"forward": work._replace(flops=1.0)}, costs.roofline.Ceilings(1000, 100, 100)).bound == "bytes"
    )


def test_the_floor_of_a_step_sums_its_pieces_and_hides_dxs_collective_behind_dw():
    ceilings = costs.roofline.Ceilings(1000, 100, 10)
    moved = costs.Cost(flops=0, read=1e9, written=0, sent=0, weights=0, peak=0)  # 1 ms
    counted = moved._replace(flops=5e11, read=0)  # 5 ms
    work = {"forward": counted, "dx": counted._replace(sent=3e7), "dw": moved, "optimizer": moved, "refresh": moved}
    found = predict.floor(work, ceilings)
    assert found[:4] == pytest.approx((3, 10, 2, 15)) and found.bound == "arithmetic"
    assert predict.floor(work | {"dw": counted}, ceilings)[2:4] == pytest.approx((0, 15 + 2))


@pytest.mark.parametrize("phase, whole", [("phase2", "floor_pass"), ("phase3", "floor_step")])
@pytest.mark.parametrize("hardware, mask", [("cuda", "checkerboard"), ("cuda-4", "random"), ("cuda-1", "random")])
def test_the_floors_of_backward_and_training_are_those_that_the_engine_records(phase, whole, hardware, mask):
    ceilings = costs.roofline.Ceilings(4300, 720, 300)
    for case in plan.expand(asked(phase, hardware, layers__mask=mask)):
        for name in (name for name in case.methods if case.mask.periodic or not METHODS[name].periodic_only):
            engine = costs.roofline.phase_floors(CaseCosts(case), name, PHASES[phase], ceilings)
            assert predict.floor(costs.pieces(case, name), ceilings).whole == pytest.approx(engine[whole], rel=1e-12)


def test_ceilings_come_from_the_newest_run_of_the_machine_else_from_the_shipped_one(cpu, h200, tmp_path):
    shipped = predict.known_ceilings("cpu", "bf16", machine="another computer", out=tmp_path)
    assert shipped.source == newest_shipped() and "of another machine" in shipped.note
    for day, rate in (("2026-11-21", 1.5), ("2026-11-22", 2.5), ("2026-11-20", 3.5)):
        copy_of("phase1-cpu", tmp_path / day, started=f"{day}T10:00:00+00:00", ceiling=rate)
    newest = predict.known_ceilings("cpu", "bf16", machine=cpu["title"], out=tmp_path)
    assert newest.source == str(tmp_path / "2026-11-22") and newest.note == "" and newest.ceilings.gemm_rate == 2.5
    assert "measured in bf16, not fp32" in predict.known_ceilings("cpu", "fp32", machine=cpu["title"]).note
    assert "between 2 ranks, not 8" in predict.known_ceilings("cuda", "bf16", machine=h200["title"], ranks=8).note


@pytest.mark.parametrize(
    "change", [{"status": "failed"}, {"redrawn_from": "elsewhere"}, {"phase": "phase0"}, {"received": {"zip": "x"}}]
)
def test_a_run_that_did_not_measure_to_its_end_gives_no_ceilings(change, cpu, tmp_path):
    copy_of("phase1-cpu", tmp_path / "a", started="2026-11-23T10:00:00+00:00", ceiling=9, **change)
    known = predict.known_ceilings("cpu", "bf16", machine=cpu["title"], out=tmp_path)
    assert known.source == newest_shipped()


def newest_shipped():
    """The shipped CPU run that measured ceilings last."""
    folders = [folder for folder in REFERENCE.glob("phase[1-9]-cpu")]
    return manifest.shown(max(folders, key=lambda folder: manifest.read(folder)["started"]))


def copy_of(name, folder, *, ceiling, **facts):
    """A copy of a shipped run with one record whose GEMM ceiling is altered, and its digest with it."""
    (folder / "records").mkdir(parents=True)
    shutil.copy(REFERENCE / name / manifest.FILE, folder)
    manifest.note(folder, **facts)
    source = sorted((REFERENCE / name / "records").glob("*.json"))[0]
    document = json.loads(source.read_text())
    for row in document["rows"]:
        if row["metric"] == "gemm_rate":
            row["value"] = float(ceiling)
    document.pop("digest")
    document["digest"] = records._digest(document)
    (folder / "records" / source.name).write_bytes(records._encode(document))


def test_a_damaged_run_does_not_stop_a_prediction(cpu, tmp_path):
    for name, text in {"a": "{", "b": "[]", "c": '{"run": 1}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.FILE).write_text(text)
    assert earlier.runs("cpu", machine=cpu["title"], out=tmp_path)


def peak(ctx, case, effective):
    worker.measure(ctx, case, effective, 0)
    # Not getrusage: its peak is the parent's where that was larger when it started this process.
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) * 1024


def test_memory_needed_is_above_the_measured_peak_and_not_far_above(cpu):
    effective = asked("phase0", layers__mask="random", layers__workload="activation", sweep__n=[2048], sweep__b=[512])
    (case,) = plan.expand(effective)
    rows = predict.plan(effective, cpu)
    measured = sum(workers.call(peak, case, effective, processes=2, seconds=120))
    assert measured <= rows["memory_bytes"].iloc[0] <= 2.5 * measured


def test_memory_of_training_is_above_the_measured_peak_and_not_far_above(cpu):
    few = dict(methods=["row_parallel", "block_shock", "block_shock_recompress"], optimizers=["adamw"], loss_steps=0)
    quick = dict(timing__samples=1, timing__warmup=1, profile="none")
    effective = asked("phase3", sweep__n=[2048], sweep__b=[64], **few, **quick)
    (case,) = plan.expand(effective)
    rows = predict.plan(effective, cpu)
    measured = sum(workers.call(peak, case, effective, processes=2, seconds=240))
    assert measured <= rows["memory_bytes"].iloc[0] <= 2.5 * measured


def test_a_step_holds_what_the_methods_formulas_say_and_adamws_state_costs_more(h200):
    table = predict.plan(asked("phase3", "cuda", sweep__n=[40960]), h200)
    for row in table.itertuples():
        case = next(one for one in plan.expand(asked("phase3", "cuda")) if one.id == row.case)
        assert row.step_bytes == CaseCosts(case).training_bytes(row.method).peak and row.work == "step"
    by = table.groupby("optimizer")
    sgd, adamw = (by.get_group(name).set_index("method")["step_bytes"] for name in ("sgd", "adamw"))
    entries = 40960**2 / 2
    assert (adamw - sgd)[["row_parallel", "block_shock"]].tolist() == [2 * 2 * entries] * 2
    assert by["memory_bytes"].first()["adamw"] > by["memory_bytes"].first()["sgd"]
    assert predict.plan(asked("phase2", "cuda"), h200)["step_bytes"].isna().all()


def test_the_shipped_training_runs_are_expected_to_fit(h200):
    assert predict.does_not_fit(asked("phase3", "cuda"), h200) == []
    (first, *_) = predict.does_not_fit(asked("phase3", "cuda", sweep__n=[65536]), h200)
    assert "65536x65536 B=4096 bf16 checkerboard gaussian sgd needs up to" in first


def test_a_dry_run_of_training_says_with_what_it_trains_and_what_a_step_holds(cpu):
    text = predict.dry_run(asked("phase3"), cpu)
    for said in ("SGD (learning rate 0.5), AdamW (learning rate 0.001)", "loss over 200 steps", "step holds", "AdamW"):
        assert said in text
    assert "Training" not in predict.dry_run(asked("phase2"), cpu)


def test_more_steps_of_the_loss_curve_and_more_optimizers_take_longer(cpu, tmp_path):
    def seconds(**settings):
        return duration.estimate(asked("phase3", **settings), cpu, {"bf16": None}, tmp_path).seconds

    assert (
        seconds(loss_steps=2000) > seconds() > seconds(optimizers=["sgd"]) > seconds(optimizers=["sgd"], loss_steps=0)
    )


def test_memory_holds_the_drawing_of_the_weight_and_the_truth_of_every_process(cpu):
    def needs(n, batch, **settings):
        effective = asked("phase0", layers__workload="gaussian", sweep__n=[n], sweep__b=[batch], **settings)
        return predict.plan(effective, cpu)["memory_bytes"].iloc[0] - 2 * memory.PROCESS["cpu"]

    alone = dict(methods=["row_parallel"])
    assert needs(16384, 16, **alone) > 2 * 8 * 16384**2  # drawn and scaled in float32
    assert needs(4096, 16, **alone) > 2 * (2 + 8) * 4096**2  # bf16, and 4096 rows in float64
    assert needs(4096, 16384) - needs(4096, 16) > 2 * 16 * 4096 * 16000


def test_a_case_that_cannot_fit_has_its_sentence_and_the_others_have_none(cpu, h200, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 3 * 2**30)
    effective = asked(sweep__n=[256, 16384], sweep__b=[16])
    (sentence,) = predict.does_not_fit(effective, cpu)
    assert sentence.startswith("16384x16384 B=16 bf16 checkerboard gaussian needs up to ")
    assert "2 processes" in sentence and "3 GiB free" in sentence
    sentences = predict.does_not_fit(asked(hardware="cuda", sweep__n=[40960, 131072], sweep__b=[16]), h200)
    assert len(sentences) == 1 and "131072x131072" in sentences[0] and "140.4 GiB" in sentences[0]
    assert not predict.does_not_fit(asked("phase1", "cuda"), h200)  # the shipped run did fit


def test_a_term_that_the_2_4_library_multiplies_wrongly_is_told_beforehand(h200):
    methods = ["row_parallel", "block_shock"]
    text = predict.dry_run(asked(hardware="cuda", methods=methods, sweep__n=[65664], sweep__b=[16]), h200)
    assert "cannot run: a weight of 65664x65664 has more than 2^32 entries" in " ".join(text.split())
    for hardware, n in (("cuda", 65536), ("cuda-4", 65792)):
        table = predict.plan(asked(hardware=hardware, methods=methods, sweep__n=[n], sweep__b=[16]), h200)
        assert set(table["unsupported"]) == {""}


def test_an_estimate_is_scaled_by_the_run_it_names(cpu, tmp_path):
    effective = asked("phase1")
    own = duration.estimate(effective, cpu, {"bf16": None}, tmp_path)
    shipped = manifest.read(REFERENCE / "phase1-cpu")
    started, ended = (dt.datetime.fromisoformat(shipped[key]) for key in ("started", "ended"))
    taken = (ended - started).total_seconds() + duration.COMMAND_SECONDS  # its own, for it is the same plan
    assert own.seconds == pytest.approx(taken) and "outputs/reference/phase1-cpu, this machine" in own.why
    assert own.low < own.seconds < own.high
    copy_of(
        "phase1-cpu",
        tmp_path / "slow",
        ceiling=1,
        started="2026-11-23T10:00:00+00:00",
        ended="2026-11-23T10:01:40+00:00",
    )
    slow = duration.estimate(effective, cpu, {"bf16": None}, tmp_path)
    assert slow.seconds == pytest.approx(100 + duration.COMMAND_SECONDS)
    more = asked("phase1", timing__groups=4)
    assert duration.estimate(more, cpu, {"bf16": None}, tmp_path).seconds > 1.7 * 100
    elsewhere = duration.estimate(effective, cpu | {"title": "x"}, {"bf16": None}, tmp_path)
    assert elsewhere.high / elsewhere.low > own.high / own.low


DRY = [
    ("phase0", "cpu"),
    ("phase1", "cpu"),
    ("phase1", "cuda"),
    ("phase2", "cuda"),
    ("phase3", "cpu"),
    ("phase3", "cuda"),
]


@pytest.mark.parametrize("phase, hardware", DRY)
def test_a_dry_run_tells_every_case_starts_no_process_and_makes_no_folder(
    phase, hardware, cpu, h200, tmp_path, nothing_starts
):
    effective = asked(phase, hardware)
    text = predict.dry_run(effective, h200 if hardware == "cuda" else cpu, tmp_path)
    assert not list(tmp_path.iterdir())
    assert max(map(len, text.splitlines())) <= 120
    for case in plan.expand(effective):
        lines = [line for line in text.splitlines() if f"{case.out_features}x{case.in_features} " in line]
        assert any(f" {case.batch} " in line and case.dtype in line for line in lines)
        assert case.mask.name in text and case.workload.name in text
    assert f"{len(plan.expand(effective)) * effective.timing.groups} records" in text
    for said in ("params/: base.yaml", f"sweeps/{phase}-{hardware}.yaml", "estimate", "outputs/reference", "fits"):
        assert said in text
    assert all(predict.words.labels.label(name) in text for name in effective.methods)


def test_a_dry_run_says_what_would_be_refused_and_lists_the_cases_all_the_same(cpu):
    text = predict.dry_run(asked("phase1", "cuda-4"), cpu)
    assert "would be refused here: hardware.device" in text and "40960x40960" in text


def test_all_sizes_of_a_dry_run_with_an_emulated_and_a_single_method_are_told(h200):
    card = h200 | {"unsupported": {"cslt": "this build of torch has no cuSPARSELt"}}
    text = predict.dry_run(asked("phase0", "cuda-1", methods=["block_shock"], sweep__n=[512]), card)
    assert "in one process" in text and "none" in text and "cannot run: this build of torch has no cuSPARSELt" in text


def test_a_run_for_gpus_is_planned_whole_on_a_machine_without_one_and_said_to_be_refused(cpu):
    text = predict.dry_run(asked(hardware="cuda", sweep__n=[4096]), cpu)
    assert "would be refused here" in text and " 7/7 " in text and "cannot run" not in text
    assert re.search(r"Block-Shock +18 MiB", text)
    assert re.search(r" GiB +\? +checkerboard", text) and "what this machine has for it is not known" in text
