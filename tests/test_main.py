import shlex
import sys
from unittest import mock

import pytest

from blockshock_lib import files, load
from blockshock_lib.__main__ import main
from blockshock_lib.errors import RecordError
from blockshock_lib.notebook import share, workbook
from blockshock_lib.runs import machine, records
from tests.small_runs import written


@pytest.fixture
def asked(monkeypatch):
    """What `run` asks of the workbook, in place of running it."""
    calls = []

    def execute(phase, **keywords):
        calls.append((phase, keywords))
        places = (files.ROOT / "n.ipynb", files.ROOT / "n.html")
        return workbook.Outcome(
            "completed", "p: PASS · H1 refuted: why", *places, True, "Never.", (("H1", "H1: it pays."),)
        )

    monkeypatch.setattr(workbook, "execute", execute)
    return calls


def test_flags_and_set_become_what_is_asked_for_and_a_run_says_its_verdict_a_fact_a_line(asked, tmp_path, capsys):
    flags = ["--set", "sweep.n=[128, 256]", "--set", "bias=false", "--set", "product=reference", "--mask", "random"]
    flags += ["--hardware", "cpu", "--sweep", "dtypes", "--out", str(tmp_path)]
    assert main(["run", "phase1", *flags]) == 0
    settings = {"sweep.n": [128, 256], "bias": False, "product": "reference"}
    settings |= {"layers.mask": "random", "layers.sweep": "dtypes"}
    how = {"hardware": "cpu", "settings": settings, "said": "--set", "resume": "", "again": "", "out": tmp_path}
    assert asked == [("phase1", how)]
    places = [f"notebook {files.ROOT}/n.ipynb", f"page     file://{files.ROOT}/n.html"]
    assert capsys.readouterr().out.splitlines() == ["Never.", "p: PASS", "H1: it pays: refuted: why", *places]


@pytest.mark.parametrize(
    "status, ok, code",
    [("completed", True, 0), ("completed", False, 1), ("failed", False, 1), ("interrupted", False, 130), ("", 0, 130)],
)
def test_the_exit_status_says_how_the_run_ended_and_ctrl_c_is_one_word(monkeypatch, capsys, status, ok, code):
    outcome = workbook.Outcome(status, "phase0: ...", files.ROOT / "outputs" / "a b" / "n.ipynb", None, ok)
    monkeypatch.setattr(workbook, "execute", mock.Mock(side_effect=[outcome] * 2 if status else KeyboardInterrupt))
    monkeypatch.chdir(files.ROOT)
    assert main(["run", "phase0"]) == code
    said = capsys.readouterr()
    assert status or said.err.splitlines()[-1] == "interrupted"
    anew = f"go on    {shlex.quote(sys.executable)} -m blockshock_lib run phase0 --resume 'outputs/a b'"
    assert (anew.replace(f"{files.ROOT}/", "") in said.out.splitlines()) is (status in ("failed", "interrupted"))
    assert main(["report", "outputs/reference/phase0-cpu"]) == code and "go on " not in capsys.readouterr().out


def test_a_study_runs_its_phases_in_a_row_as_far_as_all_goes_well(asked, monkeypatch):
    assert main(["run", "gpt"]) == 0
    assert [phase for phase, _ in asked] == [f"gpt/gpt_{name}" for name in ("correctness", "training", "latency")]
    failed = mock.Mock(return_value=workbook.Outcome("completed", "x: FAIL", files.ROOT / "n.ipynb", None, False))
    monkeypatch.setattr(workbook, "execute", failed)
    assert main(["run", "gpt"]) == 1 and failed.call_count == 1


def test_a_report_of_a_zip_unpacks_it_first(asked, outputs, tmp_path):
    source = written(outputs)
    source.conclude()
    packed = share.pack(source.folder, tmp_path / "from-a-colleague.zip")
    assert main(["report", str(packed), "--out", str(tmp_path)]) == 0
    ((phase, keywords),) = asked
    received = tmp_path / "received" / "from-a-colleague"
    assert phase == "phase0" and keywords["redraw"] == str(received)
    assert records.load(received).equals(records.load(source.folder))


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "said"),
    [({"failed": "row_parallel"}, "phase0: FAIL"), ({"groups": 2}, "phase0: INCOMPLETE 1 of 2")],
)
def test_a_failed_check_or_a_lost_record_of_a_redrawn_folder_ends_the_command_with_1(outputs, capsys, fault, said):
    source = written(outputs, **fault)
    assert main(["report", str(source.folder), "--out", str(outputs)]) == 1
    _, first, *_, notebook, page = capsys.readouterr().out.splitlines()
    assert first == said and notebook.endswith(".ipynb") and page.endswith(".html")


def test_a_flag_is_never_guessed_and_the_help_has_defaults_and_an_example(capsys):
    assert main(["run", "phase0", "--method", "headline"]) == main(["list", "--stdy", "gpt"]) == main(["lst"]) == 2
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    said = capsys.readouterr()
    assert "run takes no --method; allowed: --out, " in said.err and "; did you mean '--methods'?" in said.err
    assert "list takes no --stdy; allowed: --out, --study, --phase, --json; did you mean '--study'?" in said.err
    assert "unknown command 'lst'; allowed: run, tune, " in said.err and "; did you mean 'list'?" in said.err
    assert said.out.count("(default:") >= 6 and "example: python -m blockshock_lib run phase1" in said.out


def test_a_misspelt_folder_is_answered_with_the_nearest_run(capsys, monkeypatch, tmp_path):
    assert main(["report", "outputs/reference/phase1_cpu"]) == 2
    assert "mean outputs/reference/phase1-cpu?; all runs: python -m blockshock_lib list" in capsys.readouterr().err
    assert main(["report", "outputs/reference"]) == 2, "a folder of runs is none"
    assert "; did you mean outputs/reference/phase3-cuda" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match=f"did you mean {files.ROOT}/outputs/reference/phase1-cpu"):
        load("outputs/reference/phase1-cpu")


def test_an_installation_without_the_workbook_or_without_a_clone_is_told_what_it_lacks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("blockshock_lib.__main__.ROOT", tmp_path)
    assert main(["findings"]) == 2
    assert "error: findings needs params/ and notebooks/: call it in a clone" in capsys.readouterr().err
    monkeypatch.setattr("blockshock_lib.__main__._list", mock.Mock(side_effect=ModuleNotFoundError(name="pandas")))
    assert main(["list"]) == 2
    assert "error: pandas is missing: pip install 'blockshock-lib[workbook]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--set", "nonsense"], ["nonsense"]),
        (["--hardware", "cuda-4"], ["no NVIDIA GPU is visible"]),
        (["--resume", "nowhere"], ["nowhere", "manifest"]),
        (["--resume", "--dry-run"], ["--dry-run", "--resume"]),
        (["--of", "outputs/reference/phase0-cuda", "--dry-run"], ["--dry-run", "--of"]),
        (["--again", "2", "--dry-run"], ["--dry-run", "--again"]),
        (["--out", f"{__file__}/below"], ["tests/test_main.py is a file: name a folder"]),
    ],
)
def test_a_refused_request_ends_with_2_and_one_sentence_and_starts_nothing(
    flags, words, tmp_path, capsys, monkeypatch, nothing_starts
):
    card = machine.probe() | {"gpus": [], "unsupported": {"cuda": "no NVIDIA GPU is visible"}}
    monkeypatch.setattr(machine, "probe", lambda: card)
    hardware = [] if {"--hardware", "--resume"} & set(flags) else ["--hardware", "cpu"]
    assert main(["run", "phase0", "--out", str(tmp_path), *hardware, *flags]) == 2
    said = capsys.readouterr()
    *_, sentence = said.err.splitlines()
    assert len([line for line in said.err.splitlines() if not line.startswith("run phase0: ")]) == 1
    assert said.out == "" and sentence.startswith("error: ") and all(word in sentence for word in words)
    assert not list(tmp_path.iterdir())
