import subprocess
import sys

import pytest

from blockshock_lib import machine, manifest, records, share, workbook
from blockshock_lib.__main__ import main
from tests.runs import TINY, written

TINY_FLAGS = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}".replace("'", ""))]


@pytest.fixture
def asked(monkeypatch):
    """What `run` asks of the workbook, in place of running it."""
    calls = []

    def execute(phase, **keywords):
        calls.append((phase, keywords))
        return workbook.Outcome("completed", "phase0: PASS", workbook.ROOT / "n.ipynb", workbook.ROOT / "n.html", True)

    monkeypatch.setattr(workbook, "execute", execute)
    return calls


def command(*args):
    line = [sys.executable, "-m", "blockshock_lib", *map(str, args)]
    return subprocess.run(line, cwd=workbook.ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--help"], ["run", "tune", "report", "compare", "share", "list", "newest first", "figure"]),
        (["run", "--help"], ["phase0", "phase1", "--hardware", "--set", "--resume", "--dry-run", "--out"]),
        (["run", "--help"], ["sweep.n=[4096,8192]"]),
        (["tune", "--help"], ["--phase", "--n", "--k", "--b", "--dtype"]),
        (["compare", "--help"], ["--allow", "hardware,dtype,dirty", "--figure"]),
        (["list", "--help"], ["--out"]),
    ],
)
def test_help_names_every_verb_and_flag(capsys, args, words):
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr().out
    assert ended.value.code == 0 and all(word in said for word in words)


def test_flags_and_set_become_what_is_asked_for(asked, tmp_path):
    flags = ["--set", "sweep.n=[128, 256]", "--set", "bias=false", "--set", "product=reference", "--mask", "random"]
    flags += ["--hardware", "cpu", "--sweep", "dtypes", "--out", str(tmp_path)]
    assert main(["run", "phase1", *flags]) == 0
    settings = {"sweep.n": [128, 256], "bias": False, "product": "reference"}
    settings |= {"layers.mask": "random", "layers.sweep": "dtypes"}
    assert asked == [("phase1", {"hardware": "cpu", "settings": settings, "resume": "", "out": tmp_path})]


@pytest.mark.parametrize("flags, folder", [(["--resume"], "latest"), (["--resume", "outputs/x"], "outputs/x")])
def test_resume_goes_on_with_the_latest_run_or_the_named_one(asked, flags, folder):
    assert main(["run", "phase1", *flags]) == 0
    assert asked[0][1]["resume"] == folder


@pytest.mark.parametrize(
    "status, ok, code",
    [("completed", True, 0), ("completed", False, 1), ("failed", False, 1), ("interrupted", False, 130)],
)
def test_the_exit_status_says_how_the_run_ended(monkeypatch, status, ok, code):
    outcome = workbook.Outcome(status, "phase0: ...", workbook.ROOT / "n.ipynb", None, ok)
    monkeypatch.setattr(workbook, "execute", lambda *_, **__: outcome)
    assert main(["run", "phase0"]) == code


def test_ctrl_c_is_one_word_and_130(monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(workbook, "execute", stopped)
    assert main(["run", "phase0"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_without_flags_the_hardware_is_found_and_runs_go_to_outputs(asked):
    main(["run", "phase0"])
    assert asked == [("phase0", {"hardware": "auto", "settings": {}, "resume": "", "out": workbook.OUTPUTS})]


def test_a_report_redraws_a_folder(asked, outputs):
    source = written(outputs)
    assert main(["report", str(source.folder), "--out", str(outputs)]) == 0
    assert asked == [("phase0", {"redraw": source.name, "out": outputs})]


def test_a_report_of_a_zip_unpacks_it_first(asked, outputs, tmp_path):
    source = written(outputs)
    source.conclude()
    packed = share.pack(source.folder, tmp_path / "from-a-colleague.zip")
    assert main(["report", str(packed), "--out", str(tmp_path)]) == 0
    ((phase, keywords),) = asked
    received = tmp_path / "received" / "from-a-colleague"
    assert phase == "phase0" and keywords["redraw"] == str(received)
    assert records.load(received).equals(records.load(source.folder))


def test_a_dry_run_prints_the_cases_and_starts_nothing(asked, tmp_path, capsys, nothing_starts):
    assert main(["run", "phase0", "--hardware", "cpu", "--dry-run", "--out", str(tmp_path), *TINY_FLAGS]) == 0
    assert "128x128" in capsys.readouterr().out and not asked and not list(tmp_path.iterdir())


def test_compare_prints_the_line_last_and_fails_on_a_regression(outputs, capsys):
    run, worse = written(outputs), written(outputs, failed="row_parallel")
    # The tree that is tested may hold changes that are not committed yet.
    assert main(["compare", str(run.folder), str(run.folder), "--allow", "dirty"]) == 0
    capsys.readouterr()
    assert main(["compare", str(run.folder), str(worse.folder), "--allow", "dirty"]) == 1
    assert "regression" in capsys.readouterr().out.splitlines()[-1]


def test_share_prints_where_the_index_or_the_zip_is(outputs, tmp_path, capsys):
    run = written(tmp_path)
    run.conclude()
    assert main(["share", "--out", str(tmp_path)]) == 0
    assert main(["share", str(run.folder), "--out", str(tmp_path)]) == 0
    index, packed = capsys.readouterr().out.splitlines()
    assert index == str(tmp_path / "index.html") and packed.endswith(".zip")


def test_the_last_line_has_the_verdict_and_both_paths(outputs):
    out = outputs / "line"
    ran = command("run", "phase0", "--hardware", "cpu", *TINY_FLAGS, "--out", out)
    (folder,) = (path.parent for path in out.rglob("manifest.json"))
    verdict, *places = ran.stdout.splitlines()[-1].rsplit(" · ", 2)
    assert ran.returncode == 0, ran.stderr
    assert verdict == manifest.read(folder)["verdict"] and verdict.startswith("phase0: PASS")
    assert [workbook.ROOT / place for place in places] == [
        folder / "phase0_correctness.ipynb",
        folder / "phase0_correctness.html",
    ]
    assert all((workbook.ROOT / place).is_file() for place in places)


def test_a_failed_check_ends_the_command_with_1(outputs, capsys):
    source = written(outputs, failed="row_parallel")
    assert main(["report", source.name, "--out", str(outputs)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("phase0: FAIL") and last.endswith(".html") and ".ipynb · " in last


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--set", "swep.n=[128]"], ["--set", "swep", "sweep"]),
        (["--set", "sweep.n=[100]"], ["--set", "sweep.n", "64"]),
        (["--set", "sweep.b=[0]"], ["--set", "sweep.b"]),
        (["--set", "seed=many"], ["--set", "seed", "many"]),
        (["--set", "nonsense"], ["nonsense"]),
        (["--hardware", "cpv"], ["cpv", "cpu"]),
        (["--hardware", "cuda-4"], ["no NVIDIA GPU is visible"]),
        (["--resume", "nowhere"], ["nowhere", "manifest"]),
        (["--resume", "--dry-run"], ["--dry-run", "--resume"]),
    ],
)
def test_a_refused_request_ends_with_2_and_one_sentence_and_starts_nothing(
    flags, words, tmp_path, capsys, monkeypatch, nothing_starts
):
    card = machine.probe() | {"gpus": [], "unsupported": {"cuda": "no NVIDIA GPU is visible"}}
    monkeypatch.setattr(machine, "probe", lambda: card)
    args = ["run", "phase0", *([] if {"--hardware", "--resume"} & set(flags) else ["--hardware", "cpu"]), *flags]
    assert main([*args, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    (sentence,) = said.err.splitlines()
    assert said.out == "" and sentence.startswith("error: ") and all(word in sentence for word in words)
    assert not list(tmp_path.iterdir())


def test_a_refusal_reaches_the_shell_without_a_traceback(tmp_path):
    ran = command("run", "phase0", "--hardware", "cpu", "--set", "swep.n=[128]", "--out", tmp_path)
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1)


@pytest.mark.parametrize("args", [[], ["run"], ["run", "phase9"], ["walk"]])
def test_an_unknown_verb_or_phase_ends_with_2(args, capsys, nothing_starts):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2 and "usage" in capsys.readouterr().err


def test_list_shows_each_run_and_its_status(outputs, capsys):
    out = outputs / "listed"
    runs = [written(out), written(out)]
    assert main(["list", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines[1::3]] == [run.name for run in reversed(runs)]
    assert all("phase0  running" in line for line in lines[::3]) and len(lines) == 6


def test_a_reader_that_has_had_enough_is_no_error():
    line = [sys.executable, "-m", "blockshock_lib", "list", "--out", "outputs/reference"]
    listed = subprocess.Popen(line, cwd=workbook.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    listed.stdout.close()
    assert listed.communicate(timeout=60)[1] == "" and listed.returncode == 0


def test_list_says_when_there_is_no_run(tmp_path, capsys):
    assert main(["list", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs under {tmp_path}\n"


def test_figure_draws_a_runs_speed_ratio(outputs, tmp_path):
    run = written(outputs)
    assert main(["figure", str(run.folder), str(tmp_path / "ratio.png")]) == 0
    assert (tmp_path / "ratio.png").read_bytes().startswith(b"\x89PNG")


def test_figure_of_a_folder_without_records_is_refused(tmp_path, capsys):
    assert main(["figure", str(tmp_path), str(tmp_path / "ratio.png")]) == 2
    assert "no records" in capsys.readouterr().err


def test_a_path_that_cannot_be_written_is_one_sentence(outputs, capsys):
    run = written(outputs)
    (run.folder / "nowhere").touch()
    assert main(["figure", str(run.folder), str(run.folder / "nowhere" / "ratio.png")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
