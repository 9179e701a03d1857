"""A study is one file: the toy goes all the way, and nothing of the house was changed for it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blockshock_lib import params, studies
from blockshock_lib.__main__ import main
from blockshock_lib.files import ROOT
from blockshock_lib.notebook import explore, share, workbook
from blockshock_lib.runs import machine, manifest, measure, records
from blockshock_lib.runs.compare import compare
from blockshock_lib.runs.dry_run import dry_run
from tests.faults.workers import CONTEXT
from tests.processes import wait_for
from tests.small_runs import copied
from tests.studies import toy

NAMED = "toy=tests.studies.toy:STUDY"
QUICK = {"timing.samples": 2, "timing.warmup": 1, "timing.min_sample_ms": 0.1}


@pytest.fixture(autouse=True, scope="module")
def named():
    """The toy is in the table of studies, here and in every process that is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKSHOCK_STUDIES", NAMED)
        yield


def asked(phase="sort_time", hardware="cpu", **settings):
    return params.load(studies.load("toy"), phase, QUICK | settings, choose={"hardware": hardware})


def run(folder, **settings):
    """The records of the toy's cases on two ranks."""
    effective = asked(**settings)
    measure.run(effective, toy.expand(effective), Path(folder), study=toy.STUDY, run_name="toy", context=CONTEXT)
    return records.load(folder, strict=True)


@pytest.mark.long
def test_a_rank_that_may_be_lost_is_and_the_case_goes_on(tmp_path):
    found = run(tmp_path, n=[64], orders=["mortal"], methods=["whole", "shared"])
    assert found[found.metric.eq("lead") & found.method.eq("shared")].value.tolist() == [1, -2, 3, -4]
    assert set(found[found.metric.eq("check")].status) == {"ok"}
    assert set(found[found.metric.eq("sort_kernel")].method) == {"whole", "shared", "twin"}
    assert found[found.metric.eq("lost")]["rank"].tolist() == [1]


@pytest.mark.long
@pytest.mark.parametrize("emulated", [False, True])
def test_a_method_that_ends_its_process_fails_alone_and_fresh_workers_measure_the_others(emulated, tmp_path):
    orders, last = ["fatal check", "fatal call"], 0 if emulated else 1
    how = {"methods": ["whole", "careless", "shared"], "hardware.emulated": emulated}
    found = run(tmp_path, n=[64], orders=orders, **how)
    for order in orders:
        rows = found[found.order.eq(order)].set_index("metric")
        (failed,) = rows[rows.status.eq("failed")].itertuples()
        assert (failed.Index, failed.method, failed.detail) == ("check", "careless", f"logs/rank{last}.log"), order
        ended = f"rank {last}: Exit: the process ended with exit code 3 without an answer"
        assert failed.reason == f"{ended}; the case was begun anew without it"
        assert set(rows.loc["sort_kernel", "method"]) == {"whole", "shared", "twin"}
        steps = 2 + (order == "fatal call")  # of methods that came so far
        assert rows.loc["lead", "value"].tolist() == [1, -2, 3, -4] * steps, "what was said is kept, and not repeated"


@pytest.mark.long
def test_a_run_killed_in_a_case_loses_at_most_the_step_that_it_was_in(tmp_path):
    """Kept rows have the pace of the first run, later ones that of the second: no case's id holds it."""
    settings = dict(n=[64], methods=["whole"], steps=8)
    code = f"from tests.studies import test_any_study as t; t.run({str(tmp_path)!r}, step_seconds=600, **{settings!r})"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BLOCKSHOCK_STUDIES": NAMED}
    process = subprocess.Popen([sys.executable, "-c", f"if __name__ == '__main__': {code}"], env=environment)

    def lines():
        return [line for path in tmp_path.glob("records/*.part") for line in path.read_text().splitlines()]

    assert wait_for(lambda: len(lines()) >= 4, 60), "no row was kept"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    values = run(tmp_path, pace=10.0, **settings).query("metric == 'lead'").sort_values("repeat").value.tolist()
    steps = [(-1) ** step * (step + 1) for step in range(8)]
    assert values == steps[:3] + [10 * one for one in steps[3:]]


KERNEL = {"name": "python3", "language": "python", "display_name": "Python 3"}
GIVEN = ("settings", "run_dir", "redraw", "resume", "hardware")
CELLS = (
    'hardware = "auto"\nsettings = {}\nrun_dir = ""\nredraw = ""\nresume = ""',
    f"""from blockshock_lib.notebook.workbook import open_run
run = open_run("toy/sort_time", {", ".join(f"{name}={name}" for name in GIVEN)})""",
    *("run.measure(progress=False);", "run.answer()", 'run.table("sorts")', 'run.figure("lead");'),
)


@pytest.mark.long
def test_a_notebook_of_it_makes_a_page_and_the_run_is_listed_compared_and_explored(
    outputs, tmp_path, monkeypatch, capsys
):
    import nbformat.v4 as nb

    cells = [nb.new_code_cell(source) for source in CELLS]
    cells[0].metadata["tags"] = ["parameters"]
    notebook = tmp_path / "toy_sort_time.ipynb"
    notebook.write_text(json.dumps(nb.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})))
    phase = dataclasses.replace(toy.STUDY.phases["sort_time"], notebook=str(notebook))
    monkeypatch.setitem(toy.STUDY.phases, "sort_time", phase)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    settings = QUICK | {"n": [64, 96]}
    text = dry_run(toy.STUDY, asked(n=[64]), machine.probe(), outputs)
    assert "64 numbers, random" in text or "1 case" in text
    done = workbook.execute("toy/sort_time", hardware="cpu", settings=settings, out=outputs)
    assert done.ok and done.status == "completed", done
    assert "2 cases were sorted" in done.verdict and "supported" in done.verdict, done.verdict
    page, said = done.html.read_text(), "Not answered here (no claim about speed: CPU)."
    assert "shared" in page and said in page and said in share.write_index(outputs).read_text()
    assert "T1: the shared sort is right" in page and "T2: sharing the sort is faster" in page and "Checks 6/6" in page
    folder = done.notebook.parent
    assert "toy" in share.write_index(outputs).read_text()
    assert compare(folder, folder, allow="dirty").ok
    assert "<img" in explore.figure(folder, "lead")

    folder = copied(folder, outputs / "half", cases=1, status="interrupted")
    assert main(["run", "toy/sort_time", "--resume", str(folder), "--out", str(outputs)]) == 0
    assert f"{folder.name}: records that stand: 1; to measure: 1 missing\n" in capsys.readouterr().out
    noted = manifest.read(folder)
    (once,) = noted["resumed"]
    assert (noted["status"], once["finished"], once["again"]) == ("completed", 1, {"missing": 1})
    assert records.load(folder, strict=True)["case"].nunique() == 2
