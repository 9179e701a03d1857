"""Reading Chrome traces: real ones as they are, and files from strangers."""

import gzip
import json
import os
import socket
import struct
import tempfile

import numpy as np
import pytest
import torch

from blockshock_lib.comm.all_reduce import BACKENDS
from blockshock_lib.engine import profile
from blockshock_lib.errors import RecordError
from blockshock_lib.manifest import ROOT
from blockshock_lib.report.timeline import traces
from tests.report.timeline import chrome

SHIPPED = sorted((ROOT / "outputs" / "reference").glob("*/traces/*.json.gz"))
RUNS = sorted({path.parent.parent for path in SHIPPED})


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A trace made here and now, by what makes them in a run."""
    folder = tmp_path_factory.mktemp("run")
    weight, x = torch.randn(64, 64), torch.randn(8, 64)
    path = folder / "traces" / "0123456789ab-dense-rank0.json.gz"
    profile.trace(lambda: torch.nn.functional.linear(x, weight).relu(), torch.device("cpu"), path)
    return path


def spoken(path):
    """The file as strict JSON: NaN and Infinity, which Perfetto refuses, raise."""

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    return json.loads(gzip.decompress(path.read_bytes()), parse_constant=refuse)


def perfetto(found):
    """What Perfetto's JSON importer needs of a file (its json_trace_tokenizer.cc), asked without the library's check.

    Every event but metadata has a time; no event has a list for a value beside its arguments; X events have a duration.
    """
    assert isinstance(found, dict) and isinstance(found["traceEvents"], list) and found["traceEvents"]
    for event in found["traceEvents"]:
        assert event["ph"] == "M" or np.isfinite(event["ts"])
        assert not any(isinstance(value, list) for value in event.values())
    complete = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert complete
    for event in complete:
        assert np.isfinite([event["ts"], event["dur"]]).all() and event["dur"] >= 0
        assert isinstance(event["name"], str) and {"pid", "tid"} <= event.keys()
    assert {event["ph"] for event in found["traceEvents"]} <= set("XMisfBEbenCtPO")
    return complete


def test_a_fresh_trace_names_neither_its_host_nor_a_path(fresh):
    found = spoken(fresh)
    assert "traceName" not in found and found["traceEvents"]
    assert found.get("host_name", "") != socket.gethostname() and tempfile.gettempdir() not in json.dumps(found)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.parent.name}/{path.name}")
def test_every_shipped_trace_is_what_perfetto_opens(path):
    perfetto(spoken(path))
    assert traces.document(path)["traceEvents"]


def test_a_fresh_trace_is_what_perfetto_opens(fresh):
    assert len(perfetto(spoken(fresh))) > 3 and traces.faults(spoken(fresh)) == ""


def test_a_fresh_trace_of_a_cpu_is_compute_alone_and_adds_up(fresh):
    work = traces.read(fresh.parent.parent, strict=True)
    assert set(work["kind"]) == {"compute"} and set(work["device"]) == {"cpu"} and set(work["method"]) == {"dense"}
    assert {"aten::relu", "aten::addmm"} & set(work["name"]) or "aten::mm" in set(work["name"])
    ends = work["start_ms"] + work["duration_ms"]
    assert (work["start_ms"].to_numpy()[1:] >= ends.to_numpy()[:-1] - 1e-6).all(), "one thread does one thing at a time"
    tops = [
        e
        for e in spoken(fresh)["traceEvents"]
        if e.get("cat") == "cpu_op" and e["name"] in ("aten::linear", "aten::relu")
    ]
    assert work["duration_ms"].sum() == pytest.approx(sum(e["dur"] for e in tops) / 1e3, rel=1e-3)


def test_the_shipped_runs_are_traced_on_every_rank_with_one_clock():
    assert {folder.name for folder in RUNS} == {f"phase{n}-{kind}" for n in (1, 2, 3) for kind in ("cpu", "cuda")}
    for folder in RUNS:
        work = traces.read(folder, strict=True)
        assert work.groupby("method")["rank"].nunique().drop("dense").eq(2).all()
        assert set(work.attrs["clock"].values()) == {"shared", "one rank"} and work.attrs["damaged"] == []
        assert set(work["device"]) == {"cuda" if "cuda" in folder.name else "cpu"}
        assert work.groupby("method")["start_ms"].min().eq(0).all()


def test_kernels_copies_and_memsets_of_a_gpu_are_its_work_and_nothing_else_is(tmp_path):
    events = [
        chrome.event("gemm", 100, 10),
        chrome.event("Memset (Device)", 99, 1, cat="gpu_memset"),
        chrome.event("Memcpy DtoD (Device -> Device)", 110, 2, cat="gpu_memcpy"),
        chrome.event("aten::mm", 50, 5, cat="cpu_op"),
        chrome.event("cudaLaunchKernel", 60, 5, cat="cuda_runtime"),
        chrome.event("nccl:all_reduce", 115, 5, cat="gpu_user_annotation"),
        {"ph": "M", "name": "process_name", "pid": 0, "args": {}},
    ]
    work = traces.read(chrome.write(tmp_path, events).parent)
    assert list(work["name"]) == ["Memset (Device)", "gemm", "Memcpy DtoD (Device -> Device)"]
    assert set(work["kind"]) == {"compute"} and list(work["start_ms"]) == pytest.approx([0, 0.001, 0.011])
    assert list(work["duration_ms"]) == pytest.approx([0.001, 0.010, 0.002])


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclSymkDevKernel_AllGather_LL", "communication"),
        ("void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>(...)", "communication"),
        ("one_shot", "communication"),
        *((f"all_reduce_{backend.kernel}", "communication") for backend in BACKENDS.values() if backend.shares),
        ("multimem_all_reduce_kernel", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("Memcpy DtoD (Device -> Device)", "compute"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "compute"),
        ("void at::native::reduce_kernel<512, 1>()", "compute"),
    ],
)
def test_what_a_kernel_does_is_told_by_its_name(tmp_path, name, kind):
    chrome.write(tmp_path, [chrome.event(name, 1, 2)])
    assert list(traces.read(tmp_path)["kind"]) == [kind]


def test_on_a_cpu_an_operator_has_only_the_time_outside_those_it_calls(tmp_path):
    events = [
        chrome.op("aten::linear", 0, 100),
        chrome.op("aten::mm", 20, 60),
        chrome.op("aten::empty", 30, 10),
        chrome.op("aten::relu", 120, 10),
        chrome.op("python", 0, 500, cat="python_function"),
    ]
    work = traces.read(chrome.write(tmp_path, events).parent)
    got = [(row.name, round(1e3 * row.start_ms), round(1e3 * row.duration_ms)) for row in work.itertuples(index=False)]
    assert got == [
        ("aten::linear", 0, 20),
        ("aten::mm", 20, 10),
        ("aten::empty", 30, 10),
        ("aten::mm", 40, 40),
        ("aten::linear", 80, 20),
        ("aten::relu", 120, 10),
    ]


def test_a_collective_of_a_cpu_is_one_stretch_with_all_that_runs_inside_it(tmp_path):
    events = [
        chrome.op("c10d::allreduce_", 10, 5),
        chrome.op("aten::copy_", 11, 2),
        chrome.gloo(20, 50),
        chrome.op("aten::add_", 30, 10, tid=2),
        chrome.op("my range", 0, 100, cat="user_annotation"),
        chrome.op("aten::mm", 40, 20),
    ]
    work = traces.read(chrome.write(tmp_path, events).parent).set_index("name")
    assert work["kind"].to_dict() == {
        "c10d::allreduce_": "communication",
        "gloo:all_reduce": "communication",
        "aten::mm": "compute",
    }
    assert work.loc["gloo:all_reduce", "duration_ms"] == pytest.approx(0.05)


def two_ranks(folder, shift=0.0, bases=(chrome.BASE, chrome.BASE), hosts=("", "")):
    """Both ranks meet in all-reduces that end together; rank 1's clock shows `shift` us more than it should."""
    for rank, (base, host) in enumerate(zip(bases, hosts, strict=True)):
        start, compute = (1000, 90) if rank == 0 else (1010 + shift, 80)
        events = [
            event
            for call in range(3)
            for event in (
                chrome.event("gemm", start + 100 * call, compute),
                chrome.event("ncclDevKernel_AllReduce", start + compute + 100 * call, 10),
            )
        ]
        chrome.write(folder, events, rank=rank, base=base, host_name=host)
    return traces.read(folder)


def first(work, rank):
    return 1e3 * work.loc[work["rank"].eq(rank), "start_ms"].min()


def test_ranks_share_a_clock_where_their_collectives_agree(tmp_path):
    work = two_ranks(tmp_path)
    assert set(work.attrs["clock"].values()) == {"shared"}
    assert [first(work, rank) for rank in (0, 1)] == pytest.approx([0, 10])


def test_another_base_is_taken_into_account(tmp_path):
    work = two_ranks(tmp_path, shift=-5e6, bases=(chrome.BASE, chrome.BASE + 5_000_000_000))
    assert set(work.attrs["clock"].values()) == {"shared"} and first(work, 1) == pytest.approx(10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bases": (chrome.BASE, None)},
        {"bases": (chrome.BASE, "17")},
        {"bases": (chrome.BASE, -1)},
        {"hosts": ("one", "other")},
        {"shift": 200.0},
        {"shift": -200.0},
    ],
    ids=str,
)
def test_without_a_valid_common_clock_each_rank_counts_from_its_own_first_work(tmp_path, wrong):
    work = two_ranks(tmp_path, **wrong)
    assert set(work.attrs["clock"].values()) == {"own"} and first(work, 0) == first(work, 1) == 0


def test_ranks_with_different_numbers_of_collectives_share_no_clock(tmp_path):
    chrome.write(tmp_path, chrome.calls(1000, 90, 10, count=3))
    chrome.write(tmp_path, chrome.calls(1000, 90, 10, count=2), rank=1)
    assert set(traces.read(tmp_path).attrs["clock"].values()) == {"own"}


def test_a_run_without_traces_gives_no_rows(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        work = traces.read(folder)
        assert work.empty and list(work.columns) == traces.COLUMNS and work.attrs == {"clock": {}, "damaged": []}


def pack(text):
    return gzip.compress(text if isinstance(text, bytes) else text.encode())


GOOD = json.dumps({"traceEvents": [chrome.event("gemm", 1.5, 2)]})
BAD = {
    "empty": b"",
    "no gzip": b"{}",
    "cut": pack(GOOD)[:-9],
    "flipped": pack(GOOD)[:20] + b"\xff" + pack(GOOD)[21:],
    "wrong length": pack(GOOD)[:-4] + struct.pack("<I", 7),
    "no JSON": pack(GOOD[:-3]),
    "no UTF-8": pack(b'{"traceEvents": "\xff\xfe"}'),
    "deep": pack("[" * 200_000),
    "many digits": pack('{"traceEvents": [' + "9" * 5000 + "]}"),
    "NaN": pack(GOOD.replace("1.5", "NaN")),
    "NaN beside": pack(GOOD.replace('"ph"', '"args": {"x": NaN}, "ph"')),
    "Infinity": pack(GOOD.replace("1.5", "-Infinity")),
    "1e999": pack(GOOD.replace("1.5", "1e999")),
    "huge": pack(GOOD.replace("1.5", "9" * 400)),
    "text time": pack(GOOD.replace("1.5", '"1.5"')),
    "true time": pack(GOOD.replace("1.5", "true")),
    "negative": pack(GOOD.replace('"dur": 2', '"dur": -2')),
    "no duration": pack(GOOD.replace('"dur"', '"dura"')),
    "no name": pack(GOOD.replace('"gemm"', "3")),
    "no pid": pack(GOOD.replace('"pid": 0, ', "")),
    "list tid": pack(GOOD.replace('"tid": 7', '"tid": [7]')),
    "list": pack("[]"),
    "no events": pack('{"traceEvents": {}}'),
    "event is text": pack('{"traceEvents": ["X"]}'),
    "event without phase": pack('{"traceEvents": [{}]}'),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_or_hostile_trace_is_one_clear_sentence(tmp_path, kind):
    good = chrome.write(tmp_path, [chrome.event("gemm", 1, 2)], method="dense")
    path = chrome.write(tmp_path, [])
    path.write_bytes(BAD[kind])
    with pytest.raises(RecordError) as refused:
        traces.document(path)
    said = str(refused.value)
    assert path.name in said and "\n" not in said and len(said) < 250 and str(tmp_path) not in said
    with pytest.warns(UserWarning, match=path.name):
        work = traces.read(tmp_path)
    assert work.attrs["damaged"] == [path.name] and set(work["method"]) == {"dense"}, f"{good.name} is still there"
    with pytest.raises(RecordError):
        traces.read(tmp_path, strict=True)


def test_the_good_trace_of_these_tests_is_good(tmp_path):
    path = chrome.write(tmp_path, [])
    path.write_bytes(pack(GOOD))
    assert traces.document(path)["traceEvents"][0]["ts"] == 1.5


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    path = chrome.write(tmp_path, [])
    path.write_bytes(gzip.compress(b" " * (traces.MOST_BYTES + 2**20), 1))
    assert path.stat().st_size < 2**20
    with pytest.raises(RecordError, match="holds more than 64 MiB and is not read"):
        traces.document(path)


def test_no_other_file_in_the_folder_is_opened(tmp_path):
    place = chrome.write(tmp_path, [chrome.event("gemm", 1, 2)]).parent
    (place / "notes.json.gz").write_bytes(b"x")
    (place / "0123456789ab-dense-rank0.json").write_text("x")
    (place / "0123456789ab-dense-rankX.json.gz").write_bytes(b"x")
    (place / "0123456789ab-dense-rank1.json.gz").mkdir()
    os.mkfifo(place / "0123456789ab-dense-rank2.json.gz")
    assert set(traces.read(tmp_path, strict=True)["method"]) == {"block_shock"}


def test_a_method_that_nobody_knows_is_shown_all_the_same(tmp_path):
    for method in ("machine", "my_new_method"):
        chrome.write(tmp_path, [chrome.event("gemm", 1, 2)], method=method)
    assert list(traces.read(tmp_path)["method"]) == ["my_new_method", "machine"]
