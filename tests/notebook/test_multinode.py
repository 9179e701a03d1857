"""The machine card of several nodes, and two torchrun nodes that make one run."""

import json
import os
import subprocess
import sys

import pytest

from blockshock_lib.errors import ParamsError
from blockshock_lib.files import ROOT
from blockshock_lib.runs import machine, manifest, records
from tests.processes import flags
from tests.ranks.test_torchrun import meeting
from tests.small_runs import TINY


def told(node=0, gpu=True, code="c", **changes):
    gpus = [{"index": 0, "name": "NVIDIA H200", "memory_bytes": 1, "capability": "9.0", "power_limit_w": 700.0}]
    title, driver = ("1x NVIDIA H200", "580") if gpu else ("CPU, 2 cores: X", "")
    card = {"title": title, "gpus": gpus if gpu else [], "links": [], "driver": driver, "unsupported": {}}
    card |= {"cpu": {"model": "X", "cores": 2}, "libraries": {"torch": "2.13"}} | changes
    return {"node": str(node), "card": card, "code": code, "gpu": gpus[0] if gpu else None}


def test_the_card_of_several_nodes_counts_them_and_has_a_fingerprint_of_its_own():
    two = machine.joined([told(0), told(1)])
    assert two["title"] == "2 nodes of 1x NVIDIA H200"
    assert [(gpu["index"], gpu["node"]) for gpu in two["gpus"]] == [(0, 0), (1, 1)]
    cards = [machine.joined([told(node) for node in range(count)]) for count in (1, 2, 4)]
    assert len(set(map(machine.fingerprint, cards))) == 3
    assert machine.joined([told(), told()]) == told()["card"], "one machine is what it is without a launcher"
    unlike = machine.joined([told(0, gpu=False), told(1, gpu=False, title="CPU, 8 cores: Y"), told(2, gpu=False)])
    assert unlike["title"] == "2 nodes of CPU, 2 cores: X + 1 node of CPU, 8 cores: Y"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (told(1, code="d"), "rank 1 runs other code than rank 0"),
        (told(1, libraries={"torch": "2.11"}), "rank 1 has torch 2.11, rank 0 has 2.13"),
        (told(1, gpu=False), "rank 1 has no GPU"),
    ],
)
def test_what_the_nodes_must_agree_on(second, words):
    with pytest.raises(ParamsError, match=words):
        machine.joined([told(0), second])


@pytest.mark.long
def test_two_torchrun_nodes_make_one_run(outputs, tmp_path):
    command = ["-m", "blockshock_lib", "run", "phase0", "--out", str(outputs), *flags(TINY)]
    both = []
    for node in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        launcher += ["--nproc-per-node=1", *meeting(tmp_path), *command]
        pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        both.append(subprocess.Popen(launcher, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipe))
    try:
        said = [process.communicate(timeout=900)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    (folder,) = [path.parent for path in outputs.glob("*/*/manifest.json")]
    noted = manifest.read(folder)
    assert noted["status"] == "completed" and noted["params"]["hardware"]["world_size"] == 2
    assert noted["machine"]["title"].startswith("2 nodes of CPU") and noted["redrawn_from"] == ""
    frame = records.load(folder, strict=True)
    assert set(frame.world_size) == {2} and set(frame[frame.metric == "check"].status) <= {"ok", "unsupported"}
    (notebook,) = folder.glob("*.ipynb")
    text = json.dumps([cell.get("outputs") for cell in json.loads(notebook.read_text())["cells"]])
    assert "phase0: PASS" in text and "2 nodes of CPU" in text and notebook.with_suffix(".html").exists()
    assert "phase0: PASS" in said[0] and "PASS" not in said[1]
    # Drawing says "1 of 1": that nothing was done yet is said by measuring alone.
    assert "phase0: 0 of 1, " in said[0] and "phase0: " not in said[1], "rank 0 alone says how far it is"
    assert not list(tmp_path.glob("blockshock-*"))
