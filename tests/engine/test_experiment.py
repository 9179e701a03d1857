"""What the engine does for any study, shown by the toy: sorting."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine import experiment, memory, profile
from blockshock_lib.engine.timing import LeadIn, Timer
from blockshock_lib.errors import UnsupportedError
from tests.cases import picked
from tests.studies import toy

CPU = torch.device("cpu")
TIMING = dict(warmup=1, min_sample_ms=0, lead_in_s=0, lead_in_most_s=0)


def run(world_size=1, phase="sort_time", traces=None, emit=None, done=(), **changes):
    """The rows of a case of the toy; with several ranks, as threads."""
    fields = dict(phase=phase, methods=("whole", "shared"), dtype="fp32", device="cpu", seed=0, n=64)
    fields |= dict(order="random", world_size=world_size, emulated=world_size > 1)
    timing, needed = SimpleNamespace(**TIMING, samples=changes.pop("samples", 3)), changes.pop("sort_bytes", 0)
    params = SimpleNamespace(timing=timing, steps=4, step_seconds=0, sort_bytes=needed, pace=1.0)
    place = dict(device=CPU, group=Group(), repeat=changes.pop("repeat", 0))
    problem = toy.Sorting(toy.Case(**fields | changes), params, **place)
    return experiment.measure(problem, params, toy.STUDY, traces, emit, done)


def test_a_phase_without_times_checks_and_weighs():
    rows = run(phase="sort_check")
    for method in ("whole", "shared"):
        assert [row["value"] for row in picked(rows, method, "check")] == [1]
        assert [row["value"] for row in picked(rows, method, "number_bytes")] == [64 * 4]
        assert picked(rows, method, "peak_bytes")[0]["reason"] == "the CPU's allocator keeps no peak"
    assert not [row for row in rows if row["unit"] == "ms"]


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_world_size_keeps_every_sample_of_every_method(world_size):
    rows = run(world_size)
    for method in ("whole", "shared"):
        for metric in ("sort_call", "sort_kernel"):
            samples = picked(rows, method, metric)
            assert [row["repeat"] for row in samples] == [0, 1, 2] and all(row["value"] > 0 for row in samples)
        assert picked(rows, method, "floor_sort")[0]["value"] > 0
    assert all(picked(rows, "ceiling", name)[0]["value"] > 0 for name in ("gemm_rate", "copy_bandwidth"))


def test_a_wrong_method_is_refused_with_a_reason_and_has_no_time():
    rows = run(methods=("careless", "whole"), n=2048)
    (row,) = picked(rows, "careless", "check")
    assert row["status"] == "failed" and row["reason"].startswith("rank 0: the order: ")
    assert not picked(rows, "careless", "sort_kernel") and picked(rows, "whole", "sort_kernel")
    assert picked(run(methods=("careless",)), "careless", "check")[0]["value"] == 1


def test_a_sampled_check_says_how_many_of_how_many():
    rows = run(n=8192, phase="sort_check")
    for metric, value in (("entries_checked", 1024), ("entries_total", 8192)):
        assert [row["value"] for row in picked(rows, "shared", metric)] == [value]
    assert not picked(run(phase="sort_check"), "shared", "entries_checked")
    (row,) = picked(run(n=8192, methods=("careless",)), "careless", "check")
    assert row["status"] == "failed"


def test_traces_are_chrome_traces_and_their_top_kernels_become_rows(tmp_path):
    rows = run(traces=tmp_path, methods=("whole",))
    (path,) = tmp_path.glob("*whole-rank0.json.gz")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("sort" in row["detail"] and row["value"] > 0 for row in picked(rows, "whole", "kernel_time"))


def test_the_first_call_does_not_count_and_what_is_not_in_every_call_counts_whole():
    waited = [(30.0, 1000.0), (0.0, 12_000.0), (20.0, 2000.0)]  # in no order
    assert profile.ms_a_call(waited) == pytest.approx(1.5)
    twice = [(0, 9000.0), (1, 9000.0), (2, 1000.0), (3, 2000.0), (4, 1000.0), (5, 2000.0)]
    assert profile.ms_a_call(twice) == pytest.approx(3.0)
    assert profile.ms_a_call([(start, 3000.0) for start in range(4)]) == pytest.approx(4.0)


def test_where_not_all_fit_one_is_measured_at_a_time_and_the_first_one_between(monkeypatch):
    monkeypatch.setattr(memory, "free", lambda device: 250.0)
    order, right = [], experiment.Session.time

    def watched(self, runners):
        order.append([*runners])
        return right(self, runners)

    monkeypatch.setattr(experiment.Session, "time", watched)
    rows = run(methods=("whole", "shared", "careless"), sort_bytes=100)
    assert order == [["whole"], ["shared"], ["whole"], ["careless"], ["whole"], ["twin"]]
    (row,) = picked(rows, "machine", "one_at_a_time")
    assert row["value"] == 1 and row["detail"] == "whole repeated between: 400 B needed, 250 B free"
    assert [row["repeat"] for row in picked(rows, "whole", "sort_kernel")] == list(range(9))
    assert [row["repeat"] for row in picked(rows, "shared", "sort_kernel")] == [0, 1, 2]
    for metric in ("check", "floor_sort", "lead"):
        assert len(picked(rows, "whole", metric)) == (4 if metric == "lead" else 1)
    order.clear()
    assert not picked(run(sort_bytes=80), "machine", "one_at_a_time") and len(order) == 1


def test_the_baseline_is_built_checked_and_timed_once_more_as_its_twin():
    rows = run(2)
    for metric in ("sort_kernel", "sort_call"):
        assert [row["repeat"] for row in picked(rows, "twin", metric)] == [0, 1, 2]
    assert picked(rows, "twin", "check")[0]["value"] == 1
    kept = {row["metric"] for row in rows if row["method"] == "twin"}
    assert kept <= {"check", "sort_kernel", "sort_call", "turn", "lead_in"} | {one for one in kept if "error" in one}
    assert not {"twin"} & {row["method"] for row in run(phase="sort_check") + run(methods=("shared",))}


def test_the_place_of_each_method_in_the_first_turn_is_a_row_and_goes_on_from_group_to_group():
    def places(repeat):
        rows = run(repeat=repeat)
        return {name: picked(rows, name, "turn")[0]["value"] for name in ("whole", "shared", "twin")}

    assert places(0) == {"whole": 0, "shared": 1, "twin": 2} == places(3)  # each group has four turns
    assert places(1) == {"whole": 2, "shared": 0, "twin": 1}


def test_what_a_method_draws_is_a_row_of_each_rank_that_works_and_its_energy_their_sum(monkeypatch):
    drawn = ((300.0, 1500.0, 0.2), (0.0, 0.0, 0.0), (320.0, 1400.0, 0.3))
    found = LeadIn(0.7, "power levelled", drawn)
    monkeypatch.setattr(Timer, "lead_in", lambda *_: found)
    rows = run(samples=4)
    values = {m: [(row["rank"], row["value"]) for row in picked(rows, "whole", m)] for m in ("power", "sm_clock")}
    assert values == {"power": [(0, 300), (2, 320)] * 4, "sm_clock": [(0, 1500), (2, 1400)] * 4}
    energy = picked(rows, "whole", "energy")
    assert [(row["value"], row["repeat"], row["detail"]) for row in energy] == [
        (0.5, i, "sort_kernel") for i in range(4)
    ]
    assert picked(rows, "whole", "lead_in")[0]["detail"] == "sort_kernel: power levelled"


def test_samples_are_sent_as_they_come_and_a_case_that_was_cut_off_goes_on_behind_those_that_were_kept():
    sent = []
    whole = run(2, emit=sent.append, phase="sort_check")
    assert [one["value"] for one in picked(whole, "shared", "lead")] == [1, -2, 3, -4], "some are below zero"
    assert [row for rows in sent for row in rows] == [row for row in whole if row["metric"] == "lead"]
    kept = [row | {"value": 7.0} for row in whole if row["metric"] == "lead"][:6]  # of the first method all, then half
    sent.clear()
    again = run(2, phase="sort_check", emit=sent.append, done=kept)
    assert [row["value"] for row in again if row["metric"] == "lead"] == [7.0] * 6 + [3, -4] and len(sent) == 2
    assert [row for row in again if row["metric"] != "lead"] == [row for row in whole if row["metric"] != "lead"]


def test_a_method_is_named_once_a_turn_and_never_between_its_samples(monkeypatch):
    seen = []
    monkeypatch.setattr(toy.Sorting, "begins", lambda problem, method: seen.append(method[:1]))
    monkeypatch.setattr(Timer, "sample", lambda timer, work: seen.append(".") or 1.0)
    run(samples=6)
    turns = (
        "w..s..t..",
        "w....s....t....",
        "s....t....w....",
        "t....w....s....",
    )  # the warm-up, then turns of two works
    assert "".join(seen).endswith("".join(turns) + "wst"), "at last what was timed is checked again"


ERRORS = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), "oom"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 21474836480 bytes."), "oom"),
    (UnsupportedError("needs a kernel that is not here"), "unsupported"),
]


@pytest.mark.parametrize("error, status", ERRORS)
@pytest.mark.parametrize("stage", ["build", "prepare", "tune", "tuned"])
def test_a_method_that_one_rank_cannot_make_keeps_the_bytes_it_asked_for_and_the_others_are_timed(
    monkeypatch, error, status, stage
):
    def fail(self, *method):
        alone = getattr(self, "problem", self).group.rank == 1
        if alone and "shared" in (*method, getattr(self, "method", "")):
            raise error
        return right(self, *method)

    owner = {"tune": toy.Sorter, "tuned": experiment.Session}.get(stage, toy.Sorting)
    right = getattr(owner, stage)
    monkeypatch.setattr(owner, stage, fail)
    if stage == "tuned":  # a further copy, after the check
        monkeypatch.setattr(experiment, "copies_past_cache", lambda *_: 3)
    rows = run(2)
    *_, row = picked(rows, "shared", "check")
    assert row["status"] == status and str(error) in row["reason"] and row["reason"].startswith("rank 1: ")
    assert not picked(rows, "shared", "sort_call") and picked(rows, "whole", "sort_call")


def test_an_unexpected_error_is_not_swallowed(monkeypatch):
    def fail(*_):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(toy.Sorting, "build", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run()


def test_a_timed_output_that_goes_wrong_gives_no_number(monkeypatch):
    calls, right = [], toy.Sorter.sort

    def decays(self):
        calls.append(1)
        return right(self) if len(calls) <= 4 else right(self).flip(0)

    monkeypatch.setattr(toy.Sorter, "sort", decays)
    rows = run(methods=("whole",))
    assert [row["status"] for row in picked(rows, "whole", "check")] == ["ok", "failed"]
    assert not picked(rows, "whole", "sort_kernel")
