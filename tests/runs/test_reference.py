"""Several whole runs of one reference: how they are linked, and what may not be."""

import os
import shutil

import pytest

from blockshock_lib.__main__ import main
from blockshock_lib.errors import ParamsError, RecordError
from blockshock_lib.notebook import share, workbook
from blockshock_lib.report import verdicts
from blockshock_lib.runs import code, manifest, measure, reference, rules
from blockshock_lib.runs.open import open_run
from tests import small_runs
from tests.cases import row, write


def finished(run):
    """Records of passed checks and of a time each, and the end."""
    (case,) = run.cases
    rows = [row(method, metric, 1.0) for method in case.methods for metric in ("check", "forward_kernel")]
    write(run.folder, run=run.name, case=case, group=0, rows=rows, context=run.context)
    run.conclude()
    return run


@pytest.fixture
def first(tmp_path):
    return finished(open_run("phase0", hardware="cpu", settings=small_runs.TINY, out=tmp_path))


def again(first, **asked):
    return open_run("phase0", again=str(first.folder), out=first.folder.parents[1], **asked)


def test_a_command_goes_on_from_the_first_run_to_further_ones(first, monkeypatch):
    monkeypatch.setattr(workbook, "_finish", lambda run, **how: how["resume"])
    assert workbook.execute("phase0", again=str(first.folder), out=first.folder.parents[1]) != first.name


def test_a_further_run_has_the_parameters_of_the_first_and_is_linked_with_it_and_its_others(first):
    second = finished(again(first))
    third = finished(again(second))
    noted = [manifest.read(run.folder) for run in (first, second, third)]
    assert second.params == third.params == first.params and len({run.folder for run in (first, second, third)}) == 3
    assert {reference.name_of(one) for one in noted} == {noted[1]["reference"]} and "reference" not in noted[0]
    assert noted[1]["again"] == noted[2]["again"] == first.name
    for run, about in zip((first, second, third), noted, strict=True):
        wanted = {one.folder for one in (first, second, third)} - {run.folder}
        assert set(reference.others(run.folder, about)) == wanted
    assert noted[2]["weighed"] == sorted([first.name, second.name]) and "weighed" not in noted[0]
    checks = len(second.cases[0].methods)  # tables weigh all runs, and a run's own checks are its own
    assert set(third.frame["run"]) == {first.name, second.name, third.name} and set(third.own["run"]) == {third.name}
    assert f"checks: {checks} passed" in noted[2]["verdict"] and not third.lost()
    assert [" 3 runs: kernel times known within" in one["verdict"] for one in noted] == [False, False, True]
    drawn = open_run("phase0", redraw=str(first.folder), out=first.folder.parents[1])
    assert len(drawn.frame) == len(third.frame), "the first one drawn again weighs those that came later"


def test_copies_stopped_runs_and_runs_of_other_references_do_not_count(first):
    second = finished(again(first))
    shutil.copytree(first.folder, first.folder.with_name("copy"))
    stopped, other = again(first), small_runs.written(first.folder.parents[1])
    other.conclude()
    manifest.note(stopped.folder, status="interrupted")
    found = reference.others(second.folder, manifest.read(second.folder))
    assert len(found) == 1 and manifest.read(found[0])["run"] == first.name
    assert reference.others(other.folder, manifest.read(other.folder)) == []


def test_a_copy_that_lies_where_its_reference_is_not_says_how_many_runs_it_weighs(first, tmp_path_factory):
    _, third = finished(again(first)), finished(again(first))
    assert not any("weighs" in run.conclude() + run.sentence for run in (first, third))
    copy = shutil.copytree(third.folder, tmp_path_factory.mktemp("far") / "a" / "b")
    drawn = open_run("phase0", redraw=str(copy), out=first.folder.parents[1])
    said = "weighs 2 of the 3 runs of its reference: the others are not found, or not whole, from where it lies"
    assert f" · {said}" in drawn.conclude() and said in drawn.sentence, "it knows where the first one is"
    begun = finished(open_run("phase0", hardware="cpu", settings=small_runs.TINY, out=copy.parents[1], again="new"))
    assert not begun.alone(), "the first one, to which none was added"
    manifest.note(copy, again="", verdict="")
    assert "weighs 1 of the 2 runs" in open_run("phase0", redraw=str(copy), out=first.folder.parents[1]).sentence


def test_a_sentence_names_a_run_where_it_lies_also_one_whose_name_begins_another(first, tmp_path, monkeypatch):
    names = {"outputs/1/run": tmp_path / "a", "outputs/1/run-2": tmp_path / "b", "run": tmp_path, "": tmp_path}
    said = manifest.placed("run outputs/1/run-2 against outputs/1/run", names)
    assert said == f"run {tmp_path / 'b'} against {tmp_path / 'a'}" and manifest.placed("none", {}) == "none"
    moved = shutil.copytree(first.folder, tmp_path / "moved")
    monkeypatch.setattr(verdicts, "one_line", lambda *about, **how: f"drift of {first.name}")
    assert open_run("phase0", redraw=str(moved), out=tmp_path).conclude().startswith(f"drift of {moved}")


def test_a_run_that_still_goes_on_is_measured_beside_it_on_other_gpus(first):
    begun = open_run("phase0", hardware="cpu", settings=small_runs.TINY, out=first.folder.parents[1], again="new")
    with pytest.raises(RecordError, match="it goes on on this machine's devices"):
        again(begun)
    card = manifest.read(begun.folder)["machine"]
    gpu = {"name": "G", "power_limit_w": 700.0, "uuid_digest": "a"}
    manifest.note(begun.folder, machine=card | {"gpus": [gpu]})
    with pytest.raises(RecordError, match="it goes on on this machine's devices"):
        again(begun, card=card | {"gpus": [gpu]})
    beside = finished(again(begun, card=card | {"gpus": [gpu | {"uuid_digest": "b"}]}))
    assert beside.others() == [], "it is not completed"
    assert [path.name for path in finished(begun).others()] == [beside.folder.name]


def test_a_run_that_came_as_a_zip_counts_like_one_of_this_machine(first):
    second = finished(again(first))
    theirs = share.unpack(share.pack(second.folder), first.folder.parents[1] / "received" / "theirs")
    shutil.rmtree(second.folder)
    assert reference.others(first.folder, manifest.read(first.folder)) == [theirs]
    assert reference.others(theirs, manifest.read(theirs)) == [first.folder]
    drawn = open_run("phase0", redraw=str(first.folder), out=theirs.parent)
    assert set(drawn.frame["run"]) == {first.name, second.name}
    noted = manifest.read(theirs)
    other = {"machine": {"title": "x", "gpus": [3]}, "params": noted["params"] | {"seed": 9}, "code": {"sources": "x"}}
    for key, value in other.items():
        manifest.note(theirs, **noted | {key: value})
        assert reference.others(first.folder, manifest.read(first.folder)) == []


def test_a_stopped_run_that_other_code_goes_on_with_leaves_its_reference(first, monkeypatch):
    stopped, same = again(first), again(first)
    for run in (stopped, same):
        run._stop("interrupted", "planted")
    finished(open_run("phase0", resume=same.name))
    monkeypatch.setattr(code, "digest", lambda *_, **__: "0" * 12)
    with pytest.warns(UserWarning, match="leaves the reference of .*: it was measured by other code"):
        resumed = finished(open_run("phase0", resume=stopped.name))
    assert not {"reference", "again"} & manifest.read(resumed.folder).keys() and resumed.others() == []
    assert reference.others(first.folder, manifest.read(first.folder)) == [same.folder]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"status": "interrupted"}, "its status is interrupted"),
        ({"redrawn_from": "outputs/x"}, "it only redraws another"),
        ({"code": {"sources": "other"}}, "it was measured by other code"),
    ],
)
def test_what_would_be_no_run_of_the_same_reference_is_refused(first, facts, said):
    manifest.note(first.folder, **facts)
    with pytest.raises(RecordError, match=f"cannot be measured once more: {said}"):
        again(first)
    for asked in ({"settings": {"seed": 3}}, {"hardware": "cpu"}, {"redraw": str(first.folder)}):
        with pytest.raises(ParamsError, match="measured once more as it was"):
            again(first, **asked)


def test_another_kind_of_machine_or_library_is_refused_and_another_gpu_of_the_kind_is_not():
    gpu = {"name": "G", "power_limit_w": 700.0, "uuid_digest": "a"}
    card = {"gpus": [gpu, gpu], "cpu": {"model": "m"}, "libraries": {"torch": "2"}}
    about, made = {"machine": card, "code": {"sources": "s"}}, {"sources": "s"}
    assert reference.differs(about, made, card | {"gpus": [gpu | {"uuid_digest": "b"}] * 2}) == ""
    said = reference.differs(about, made, card | {"gpus": [gpu | {"name": "H"}] * 2})
    assert said.startswith("it was measured on 2x G")
    assert "another torch" in reference.differs(about, made, card | {"libraries": {"torch": "3"}})


def test_each_run_of_a_reference_the_first_one_too_searches_its_kernels_in_a_place_of_its_own(first, monkeypatch):
    seen, out = [], first.folder.parents[1]
    monkeypatch.setattr(measure, "run", lambda *_, **__: seen.append(os.environ["BLOCKSHOCK_CACHE"]))
    monkeypatch.setenv("BLOCKSHOCK_CACHE", "the project's")
    begun = open_run("phase0", hardware="cpu", settings=small_runs.TINY, out=out, again="new")
    for run in (small_runs.written(out), again(first), again(first), begun):
        run.measure(progress=False)
    assert seen[0] == "the project's" and len(set(seen)) == 4
    assert os.environ["BLOCKSHOCK_CACHE"] == "the project's"
    further = again(finished(begun))
    assert manifest.read(further.folder)["reference"] == manifest.read(begun.folder)["reference"]


def test_a_run_on_gpus_that_took_kept_choices_of_kernels_begins_no_reference(first):
    asked = manifest.read(first.folder)["params"]
    manifest.note(first.folder, params=asked | {"hardware": asked["hardware"] | {"device": "cuda", "emulated": True}})
    with pytest.raises(RecordError, match="kernels that were chosen before it; begin a new reference by --again"):
        again(first, card=first.card | {"gpus": [{"name": "G"}] * 2, "unsupported": {}})


def test_the_command_measures_the_first_and_n_further_runs_or_those_of_a_folder(tmp_path, monkeypatch, capsys):
    asked = []

    def execute(phase, **how):
        asked.append({name: how[name] for name in ("again", "settings") if how.get(name)})
        return workbook.Outcome("completed", "PASS", tmp_path / f"{len(asked)}" / "x.ipynb", None, len(asked) != 5)

    monkeypatch.setattr(workbook, "execute", execute)
    assert main(["run", "phase0", "--again", "2", "--set", "seed=4"]) == 0
    assert asked == [{"again": "new", "settings": {"seed": 4}}, *({"again": str(tmp_path / n)} for n in "12")]
    assert main(["run", "phase0", "--of", "outputs/x"]) == 0 and asked[3:] == [{"again": "outputs/x"}]
    assert main(["run", "phase0", "--again", "3"]) == 1 and len(asked) == 5, "a run that failed is not repeated"


def test_again_is_refused_where_it_cannot_be_with_what_to_do(monkeypatch, capsys):
    def refused(*words):
        assert main(["run", "phase0", *words]) == 2
        return capsys.readouterr().err

    assert "--again: -1; allowed: a whole number from 1" in refused("--again", "-1")
    for words in (["--again", "1", "--resume"], ["--of", "x", "--resume"]):
        assert "measure runs of their own: leave --resume out" in refused(*words)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    for words in (["--again", "1"], ["--of", "x"]):
        said = refused(*words)
        assert "torchrun" in said and "on one machine" in said and "as zips (make share)" in said


def test_the_manifest_keeps_the_rules_and_a_redraw_by_other_ones_says_so_and_what_they_changed(first):
    facts = manifest.read(first.folder)
    assert facts["rules"] == rules.of(first.study, "phase0") and facts["verdicts"] == {}

    def drawn(**facts):
        manifest.note(first.folder, **facts)
        run = open_run("phase0", redraw=str(first.folder), out=first.folder.parents[1])
        return run.conclude(), manifest.read(run.folder).get("verdicts")

    line, kept = drawn()
    assert "other rules" not in line and kept == {}
    line, kept = drawn(rules=facts["rules"] | {"digest": "before"})
    assert line.endswith("judged by other rules than stood before the data, with the same verdicts") and kept is None
    assert drawn(verdicts={"H1": "refuted"})[0].endswith("before the data, which said H1 refuted")
    assert drawn(verdicts=None)[0].endswith("before the data")
