import shutil
from functools import partial

import pytest

from blockshock_lib import files, studies
from blockshock_lib.notebook import findings, sources
from blockshock_lib.notebook.sources import COUNTS, LINKED, weigh
from blockshock_lib.runs import manifest, record, reference
from blockshock_lib.runs.manifest import REFERENCE
from blockshock_lib.studies.linear import STUDY
from tests import small_runs
from tests.report import frames

CPU = REFERENCE / "phase1-cpu"
CARD = manifest.read(CPU)["machine"] | {"title": "1x G", "gpus": [{"name": "G", "power_limit_w": 700.0}], "driver": "0"}


def copied(tmp_path, name="run", cases=None, **facts):
    return small_runs.copied(CPU, tmp_path / name, cases, **facts)


def rename(folder, run):
    """The records' own name of their run, as a second run has another."""
    for path in (folder / "records").glob("*.json"):
        path.write_bytes(record.encode(record.read(path) | {"run": run}))
    manifest.note(folder, files=manifest.digests(folder))
    return folder


def uses(*places):
    return {source.folder.name: source.use for source in weigh(places, STUDY)}


@pytest.mark.parametrize(
    "other",
    [{"driver": "1"}, {"cpu": {"model": "other", "cores": 2}}, {"gpus": [{"name": "G", "power_limit_w": 350.0}]}, {}],
)
def test_hosts_with_the_same_gpus_but_other_cards_or_settings_are_not_put_together(tmp_path, other):
    copied(tmp_path, "here", machine=CARD)
    asked = manifest.read(CPU)["params"] | {"dtype": "bf16" if other else "fp16"}
    copied(tmp_path, "there", machine=CARD | other, params=asked)
    assert uses(tmp_path) == {"here": COUNTS, "there": COUNTS}


def test_the_newest_of_equal_runs_counts_alone_and_a_smaller_newer_one_displaces_none(tmp_path):
    for day, (name, cases) in enumerate({"old": None, "new": None, "small": 1}.items(), start=1):
        rename(copied(tmp_path, name, cases, started=f"2026-01-0{day}T00:00:00+00:00", run=name), name)
    left_out = f"left out: {tmp_path / 'new'} counts"
    assert uses(tmp_path) == {"new": COUNTS, "old": left_out, "small": left_out}


def test_the_runs_of_a_reference_are_put_together_whichever_machine_of_the_kind_they_ran_on(tmp_path):
    rename(copied(tmp_path, "first", machine=CARD, run="first"), "first")
    linked = {"reference": reference.name_of(manifest.read(tmp_path / "first")), "again": "first"}
    zipped = {"received": {"zip": "x.zip"}}
    for name, more in {"linked": linked, "strange": {}, "zip": linked | zipped, "other zip": zipped}.items():
        rename(copied(tmp_path, name, machine=CARD | {"driver": "1"}, run=name, **more), name)
    found = findings.Findings(None, "all", tmp_path, STUDY)
    found.sources = weigh((tmp_path,), STUDY)
    used = {source.folder.name: source.use for source in found.sources if source.counts}
    assert used == {"first": COUNTS, "linked": LINKED, "strange": COUNTS, "zip": LINKED}
    assert sorted(frame["run"].nunique() for frame in found.frames.values()) == [1, 3]


def test_a_run_of_cases_that_the_reference_lacks_counts_with_it(tmp_path):
    first = rename(copied(tmp_path, "first", 1, machine=CARD, run="first"), "first")
    linked = {"reference": reference.name_of(manifest.read(first)), "again": "first"}
    asked = manifest.read(CPU)["params"]
    other = {"machine": CARD | {"driver": "1"}, "params": asked | {"limits": {"start_seconds": 1, "case_seconds": 2}}}
    for name, facts in {"more": linked, "same": linked, "other code": linked | {"code": {"sources": "other"}}}.items():
        copied(tmp_path, name, run=name, **other | facts)
        for path in [*(first / "records").glob("*.json")] if name != "same" else ():
            (tmp_path / name / "records" / path.name).unlink()
        rename(tmp_path / name, name)
    found = weigh((tmp_path,), STUDY)
    assert {one.folder.name: one.use for one in found if one.counts} == {"first": COUNTS, "more": COUNTS}
    assert len({one.setting for one in found if one.counts}) == 1


def test_a_parameter_that_shares_a_columns_name_is_no_setting():
    """`layers` are the files that parameters come from, and in the gpt study a column of what is timed."""
    asked = {"hardware": {"world_size": 4, "emulated": False}, "dtype": "bf16", "layers": {"sweep": "own"}}
    facts = {"machine": {"title": "4x G"}, "params": asked}
    assert sources._setting(facts, studies.load("gpt")) == "4x G, 4 ranks, bf16"


def of_cases(use, setting, *cases, name="", phase="phase1", lack=()):
    """A run of which no method could run the cases `lack`."""
    facts = {"reference": name or f"{use}{setting}{cases}", "phase": phase}
    rows = frames.make((256,)).iloc[: len(cases)].assign(case=cases, metric="check", status="ok", value=1.0)
    rows.loc[rows["case"].isin(lack), "status"] = "unsupported"
    return sources.Source(files.ROOT, facts, use, setting, rows)


@pytest.mark.parametrize(
    ("lack", "others", "kept"),
    [
        ((), [(3, 4), (2, 3)], [[1, 2, 3], [4]]),  # a training that another run has too leaves the run's others in
        ((2, 3), [(2, 4)], [[1, 3], [2, 4]]),  # a case that a run could not make is another's that could
    ],
)
def test_of_a_training_each_case_counts_once_of_a_run_that_could_make_it(lack, others, kept):
    run = partial(of_cases, phase="gpt_training")
    joined = [run(COUNTS, "a", 1, 2, 3, lack=lack), *(run("left out: x counts", "a", *cases) for cases in others)]
    sources.join(joined, studies.load("gpt"))
    assert [sorted(one.frame["case"]) for one in joined if one.counts] == kept
    assert all(one.counts or one.use.startswith("left out: cases of it count") for one in joined)


def test_phases_of_several_machines_are_joined_but_for_cases_that_a_larger_run_has():
    run = of_cases
    joined = [run(COUNTS, "a", 1, 2, 3), run(LINKED, "a", 1, 2), run(COUNTS, "b", 4, 5), run(COUNTS, "c", 3)]
    # A smaller run of the same machine, of other cases, then a further one of its reference, and two of neither.
    joined += [run("left out: x counts", "a", 6, 7, name="slow"), run("left out: x counts", "a", 7, 6, name="slow")]
    joined += [run("left out: x counts", "a", 2, 8), run("left out: x counts", "b", 6, 7)]
    sources.join(joined, STUDY)
    assert [one.use for one in joined[:3]] == [COUNTS, LINKED, COUNTS]
    assert {one.setting for one in joined} == {"a and of b"}
    assert [one.use for one in joined[4:6]] == [COUNTS, LINKED]
    assert joined[3].use == "left out: cases of it count as a measured them"
    assert not any(one.counts for one in joined[6:])


def noted(**facts):
    return lambda folder, record: manifest.note(folder, **facts)


def damage(folder, record):
    record.write_text(record.read_text().replace("8", "9", 1))


def write_anew(folder, record):
    known = manifest.read(folder)["files"]
    rename(folder, "other")
    manifest.note(folder, files=known)


def remove_all(folder, record):
    shutil.rmtree(folder / "records")
    (folder / "records").mkdir()
    manifest.note(folder, files={})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (noted(status="interrupted", reason="by the user"), "its status is interrupted: by the user"),
        (noted(status="running"), "its status is interrupted"),
        (noted(redrawn_from="outputs/x"), "it only redraws outputs/x"),
        (noted(received={"zip": "a.zip"}), "a colleague's"),
        (noted(phase="phase9"), "phase9 is no phase"),
        (noted(params={}), "does not say what was asked"),
        (noted(params=[]), "does not say what was asked"),
        (damage, "1 records are damaged, {record} first"),
        (lambda folder, record: record.unlink(), "{record} is missing"),
        (write_anew, "{record} is not as the run left it"),
        (remove_all, "it holds no records"),
        (lambda folder, record: (folder / manifest.FILE).write_text("{"), "holds no readable manifest.json"),
    ],
)
def test_a_run_that_cannot_count_is_left_out_and_says_why(tmp_path, fault, said):
    folder = copied(tmp_path)
    record = min((folder / "records").glob("*.json"))
    fault(folder, record)
    (use,) = uses(tmp_path).values()
    assert use.startswith("left out: ") and said.format(record=record.name) in use
