import io
import json
import os
import sys
from types import SimpleNamespace

import pytest

from blockshock_lib.__main__ import main
from blockshock_lib.notebook import terminal, workbook
from blockshock_lib.runs import manifest
from tests.processes import python, wait_for
from tests.small_runs import written


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The seconds on the clock of what is said at once, which stands still unless the test moves it."""
    seconds = [1000.0]
    monkeypatch.setattr(terminal, "FIRST", 0.0)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def says(stream, line):
    """Waits until it was said, by a thread that looks every 0.1 s."""
    assert wait_for(lambda: line in stream.getvalue()), stream.getvalue()


def test_without_a_terminal_a_plain_line_comes_at_once_and_again_and_names_the_case(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    done = [2]
    with terminal.working("run phase1"):
        says(said, "run phase1: 0 s\n")
        with terminal.working("phase1", lambda: (done[0], 12, "512x512 B=16")):
            says(said, "phase1: 2 of 12, 512x512 B=16, 0 s\n")  # what was done before is no speed
            for done[0], seconds, left in ((2.9, 8, ""), (3, 16, ", about 144 s left"), (3, 24, ", about 216 s left")):
                clock[0] += terminal.EVERY  # of less than a tenth none can tell how long
                says(said, f"phase1: {done[0]} of 12, 512x512 B=16, {seconds} s{left}\n")
        terminal.note("making the page")
        clock[0] += terminal.EVERY
        says(said, "run phase1: making the page, 32 s\n")
    assert said.getvalue().startswith("run phase1: 0 s\n")


def test_on_a_terminal_each_line_takes_the_place_of_the_last_and_all_is_clean_in_the_end(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", said := Terminal())
    with terminal.working("findings"):
        terminal.note("notebook, cell 7")
        says(said, "findings: notebook, cell 7, 0 s\r")
        clock[0] += 1
        with terminal.working("phase1", lambda: (3, 12, "512x512 B=16")):
            says(said, "phase1: 3 of 12, 512x512 B=16, 1 s\r")
    *shown, last = said.getvalue().split("\r\033[K")
    assert "\n" not in "".join(shown) and last == ""


def test_a_look_that_fails_ends_no_work(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with terminal.working("phase1", lambda: open("/nowhere/at/all")):
        says(said, "phase1: 0 s\n")


def test_what_a_bar_shows_of_a_run_is_its_records_and_the_case_in_hand(outputs, monkeypatch):
    run = written(outputs)
    (case,) = run.cases
    look = workbook._measured(run)
    (run.folder / "records" / f"{case.id}-0.part").write_text("")
    assert look() == (1, 1, ""), "of a lost worker both are there"
    (run.folder / "records" / f"{case.id}-0.json").unlink()
    assert look() == (1, 1, case.label)
    (run.folder / "records" / f"{case.id}-0.part").unlink()
    assert look() == (1, 1, ""), "packed at the end: what was done stays done"
    run = written(outputs)
    run.resumes = True  # a record that is measured again is not done
    assert workbook._measured(run)() == (1, 1, "")
    monkeypatch.setattr(run, "unfinished", lambda: {(case.id, 0): "of other code"})
    look = workbook._measured(run)
    assert look() == (0, 1, "")
    os.utime(run.folder / "records" / f"{case.id}-0.json", (1, 1))  # written anew
    assert look() == (1, 1, "")


@pytest.mark.parametrize(
    ("stream", "no_color", "red"), [(Terminal, "", True), (Terminal, "1", False), (io.StringIO, "", False)]
)
def test_pass_and_fail_have_colour_on_a_terminal_alone(monkeypatch, stream, no_color, red):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", stream())
    text = "phase0: FAIL\nfinished"
    assert terminal.coloured(text) == ("phase0: \033[31mFAIL\033[0m\nfinished" if red else text)


def test_a_list_is_a_table_with_filters_or_json(outputs, capsys):
    out = outputs / "listed"
    for day, phase in enumerate(("phase0", "phase1", "phase1"), start=1):
        card = {"title": "CPU, 2 cores: " + 40 * "x"}
        noted = dict(run="r", study="linear", phase=phase, status="completed", params={}, machine=card)
        noted |= dict(started=f"2030-01-0{day}T10:20:30+00:00", verdict=f"{phase}: FAIL · why")
        manifest.note(out / f"d{day}", **noted)

    def said(*flags):
        assert main(["list", "--out", str(out), *flags]) == 0
        return capsys.readouterr().out

    head, *rows = said().splitlines()
    assert head.split() == ["started", "study", "phase", "status", "verdict", "machine", "folder"]
    assert [row.split()[-1].rpartition("/")[2] for row in rows] == ["d3", "d2", "d1"]
    assert rows[0].startswith("2030-01-03 10:20  linear  phase1  completed  FAIL     CPU, 2 cores: xxx")
    assert {row.index("FAIL") for row in rows} == {head.index("verdict")} and max(map(len, rows)) < 160
    assert len(said("--phase", "phase1").splitlines()) == 3 and len(said("-n", "1").splitlines()) == 2
    assert said("--study", "other").startswith("no such runs under ")
    assert "; phases there: " in said("--phase", "phas1")
    (newest,) = json.loads(said("--phase", "phase0", "--json"))
    assert newest["verdict"] == "phase0: FAIL · why" and newest["folder"] == str(out / "d1")
    assert main(["list", "-n", "0"]) == 2 and "list -n: 0" in capsys.readouterr().err


def test_a_command_says_a_warning_as_one_sentence(tmp_path):
    manifest.note(tmp_path / "bad", run="r")
    said = python("-m", "blockshock_lib", "list", "--out", tmp_path).stderr
    assert f"\nwarning: left out: {tmp_path / 'bad'} holds no readable manifest.json: it lacks " in f"\n{said}"
    assert ".py:" not in said


# Neither pandas nor torch is loaded before the first line was written: an import waits for it, some time.
HELD = """
import sys, time
from blockshock_lib.__main__ import main
from blockshock_lib.notebook import terminal
told, put = [], terminal._put
terminal._put = lambda text: told.append(text) or put(text)
class Held:
    def find_spec(self, name, *_):
        for _ in range(60000) if name in ("pandas", "torch") else ():
            if told:
                return
            time.sleep(0.01)
        assert told or name not in ("pandas", "torch"), f"{name} comes before the first line"
sys.meta_path.insert(0, Held())
"""


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["list"], {"torch", "pandas", "matplotlib"}),
        (["run", "phase1", "--dry-run", "--hardware", "cpu"], {"seaborn", "matplotlib.pyplot", "papermill"}),
    ],
)
def test_a_command_says_a_line_before_it_loads_what_takes_seconds_and_loads_no_more_than_it_needs(words, absent):
    assert terminal.FIRST < 1
    ran = python("-c", f"{HELD}\nassert main({words}) == 0\nprint(*sys.modules)")
    assert ran.returncode == 0, ran.stderr
    assert not absent & set(ran.stdout.splitlines()[-1].split())
