"""Reading Chrome traces: real ones as they are, and files from strangers."""

import gzip
import json
import os
import struct
import tempfile

import numpy as np
import pytest
import torch

from blockshock_lib.comm.all_reduce import BACKENDS
from blockshock_lib.engine import profile
from blockshock_lib.errors import RecordError
from blockshock_lib.files import ROOT
from blockshock_lib.report import timeline
from blockshock_lib.studies.linear.axes import AXES
from tests.report import chrome

SHIPPED = sorted((ROOT / "outputs" / "reference").glob("*/traces/*.json.gz"))
RUNS = sorted({path.parent.parent for path in SHIPPED if path.parent.parent.name.startswith("phase")})


def perfetto(path):
    """What Perfetto needs of a file (its json_trace_tokenizer.cc), asked without the library's check."""
    found = json.loads(gzip.decompress(path.read_bytes()), parse_constant=pytest.fail)  # NaN and Infinity it refuses
    for event in found["traceEvents"]:
        assert event["ph"] in "XMisfBEbenCtPO" and (event["ph"] == "M" or np.isfinite(event["ts"]))
        assert not any(isinstance(value, list) for value in event.values())
    complete = [event for event in found["traceEvents"] if event["ph"] == "X"]
    for event in complete:
        assert np.isfinite(event["dur"]) and event["dur"] >= 0
        assert isinstance(event["name"], str) and {"pid", "tid"} <= event.keys()
    assert complete and timeline.document(path) == found
    return found


def test_a_fresh_trace_is_what_perfetto_opens_and_names_neither_its_host_nor_a_path(tmp_path):
    path = tmp_path / "traces" / "0123456789ab-dense-rank0.json.gz"
    profile.trace(torch.randn(64, 64).mm(torch.randn(64, 8)).relu, torch.device("cpu"), path)
    found = perfetto(path)
    assert "host_name" not in found and tempfile.gettempdir() not in json.dumps(found)


def test_every_shipped_trace_is_what_perfetto_opens_and_the_runs_are_traced_on_every_rank():
    assert {folder.name[5:] for folder in RUNS} >= {"1-cpu", "1-cuda", "2-cpu", "2-cuda", "3-cpu", "3-cuda-before"}
    for path in SHIPPED:
        perfetto(path)
    for folder in RUNS:
        work = timeline.read(folder, AXES)
        assert work.attrs["damaged"] == [] and work.empty == ("cpu" in folder.name)
        if len(work):
            assert work.groupby("method")["rank"].nunique().drop("dense").eq(2).all()
            assert work.groupby("method")["start_ms"].min().eq(0).all()


def read(folder, events):
    chrome.write(folder, events)
    return timeline.read(folder, AXES)


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
    work = read(tmp_path, events)
    assert list(work["name"]) == ["Memset (Device)", "gemm", "Memcpy DtoD (Device -> Device)"]
    assert set(work["kind"]) == {"compute"} and list(work["start_ms"]) == pytest.approx([0, 0.001, 0.011])
    assert list(work["duration_ms"]) == pytest.approx([0.001, 0.010, 0.002])


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>(...)", "communication"),
        *((f"all_reduce_{kernel}", "communication") for kernel in BACKENDS.values() if kernel),
        ("multimem_all_reduce_kernel", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("Memcpy DtoD (Device -> Device)", "compute"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "compute"),
        ("void at::native::reduce_kernel<512, 1>()", "compute"),
    ],
)
def test_what_a_kernel_does_is_told_by_its_name(tmp_path, name, kind):
    assert list(read(tmp_path, [chrome.event(name, 1, 2)])["kind"]) == [kind]


@pytest.mark.parametrize("shift", [0, 200, -200, 5_000_000])
@pytest.mark.parametrize("fewer", [0, 1])
def test_the_ranks_clocks_are_set_by_the_end_of_their_first_collective(tmp_path, shift, fewer):
    # Rank 1 begins 10 us later and multiplies faster; its clock shows `shift` us more, and it has `fewer` calls.
    chrome.write(tmp_path, chrome.calls(1000, 90, 10))
    chrome.write(tmp_path, chrome.calls(1010 + shift, 80, 10, 3 - fewer), rank=1)
    work = timeline.read(tmp_path, AXES)
    assert list(1e3 * work.groupby("rank")["start_ms"].min()) == pytest.approx([0, 10])


def pack(text):
    return gzip.compress(text if isinstance(text, bytes) else text.encode())


GOOD = json.dumps({"traceEvents": [chrome.event("gemm", 1.5, 2)]})
BAD = {
    "empty": b"",
    "no gzip": b"{}",
    "cut": pack(GOOD)[:-9],
    "flipped": pack(GOOD)[:20] + b"\xff" + pack(GOOD)[21:],
    "wrong length": pack(GOOD)[:-4] + struct.pack("<I", 7),
    "no UTF-8": pack(b'{"traceEvents": "\xff\xfe"}'),
    "deep": pack("[" * 200_000),
    "NaN": pack(GOOD.replace("1.5", "NaN")),
    "Infinity beside": pack(GOOD.replace('"ph"', '"args": {"x": -Infinity}, "ph"')),
    "huge": pack(GOOD.replace("1.5", "9" * 400)),
    "negative": pack(GOOD.replace('"dur": 2', '"dur": -2')),
    "no duration": pack(GOOD.replace('"dur"', '"dura"')),
    "no name": pack(GOOD.replace('"gemm"', "3")),
    "no pid": pack(GOOD.replace('"pid": 0, ', "")),
    "list tid": pack(GOOD.replace('"tid": 7', '"tid": [7]')),
    "no events": pack('{"traceEvents": {}}'),
    "event is text": pack('{"traceEvents": ["X"]}'),
    "event without phase": pack('{"traceEvents": [{}]}'),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_or_hostile_trace_is_one_clear_sentence(tmp_path, kind):
    chrome.write(tmp_path, [chrome.event("gemm", 1, 2)], method="dense")
    path = chrome.write(tmp_path, [])
    path.write_bytes(pack(GOOD))
    assert timeline.document(path)["traceEvents"][0]["ts"] == 1.5, "but for its fault it would be good"
    path.write_bytes(BAD[kind])
    with pytest.raises(RecordError) as refused:
        timeline.document(path)
    said = str(refused.value)
    assert path.name in said and "\n" not in said and len(said) < 250 and str(tmp_path) not in said
    with pytest.warns(UserWarning, match=path.name):
        work = timeline.read(tmp_path, AXES)
    assert work.attrs["damaged"] == [path.name] and set(work["method"]) == {"dense"}, "the good one is still there"


def test_a_gzip_bomb_is_not_unpacked_and_no_other_file_in_the_folder_is_opened(tmp_path):
    path = chrome.write(tmp_path, [])
    path.write_bytes(gzip.compress(b" " * (timeline.MOST_BYTES + 2**20), 1))
    with pytest.raises(RecordError, match="holds more than 64 MiB and is not read"):
        timeline.document(path)
    chrome.write(tmp_path, [chrome.event("gemm", 1, 2)])
    (path.parent / "notes.json.gz").write_bytes(b"x")
    (path.parent / "0123456789ab-dense-rankX.json.gz").write_bytes(b"x")
    os.mkfifo(path.parent / "0123456789ab-dense-rank2.json.gz")
    work = timeline.read(tmp_path, AXES)
    assert set(work["method"]) == {"block_shock"} and work.attrs["damaged"] == []
