import pytest

from blockshock_lib.report import answer, late, verdicts
from blockshock_lib.studies.linear import STUDY
from blockshock_lib.studies.linear.axes import AXES
from tests.report import frames

SIZES = (4096, 8192)
ALL = [(n, batch) for n in SIZES for batch in (16, 256)]
SMALL = dict(ns=SIZES, bs=(16, 256), methods=("row_parallel", "masked_dense", "block_shock"), repeats=6)


def faster(*cells, by=4.0):
    return frames.make(**SMALL, speedup={("block_shock", n, batch): by for n, batch in cells})


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([], "Never here: slower than tensor parallelism (B1) in all 4 cases, by "),
        (ALL, "Always here: faster than tensor parallelism (B1) in all 4 cases, by "),
        ([(4096, 16)], "Sometimes faster here than tensor parallelism (B1): of 4 cases 1 faster, by "),
    ],
)
def test_the_answer_counts_the_cases_that_the_intervals_decide(cells, said):
    frame = faster(*cells)
    text = answer.sentence(frame, STUDY.answers["phase1"])
    assert text.startswith(said) and text.endswith("%.") and "H1" not in text
    shares = [abs(1 - ratio) for ratio in verdicts.ratio(frame, AXES, "row_parallel", "block_shock")["ratio"]]
    if not 0 < len(cells) < 4:
        assert f"by {100 * min(shares):.0f} to {100 * max(shares):.0f}%." in text


def test_an_undecided_case_is_no_loss_and_a_cpus_time_no_answer():
    frame = frames.make(**SMALL | dict(bs=(16,)), noise=0.2, speedup={("block_shock", 4096, 16): 1.67})
    text, cpu = answer.speed(frame, AXES), answer.speed(frames.make((256,), (16,), device="cpu"), AXES)
    assert text.startswith("Never surely faster here than B1 row-parallel: of 2 cases 1 slower, by ")
    assert "1 undecided" in text and cpu == "Not answered here (no claim about speed: CPU)."


def test_cases_without_times_of_both_are_said_and_times_of_calls_are_named():
    frame = faster()
    small = frame["out_features"].eq(4096) if "out_features" in frame else frame["n"].eq(4096)
    for method in ("block_shock", "row_parallel"):
        text = answer.speed(frame[~(small & frame["method"].eq(method))], AXES)
        assert "slower than B1 row-parallel in all 2 cases, by " in text
        assert text.endswith(" 2 more cases hold no valid times of both.")
    calls = answer.speed(frame[frame["metric"].ne("forward_kernel")], AXES)
    assert calls.endswith("%. By calls: kernels alone have no time.") and "calls" not in answer.speed(frame, AXES)


def test_what_failed_comes_first_what_is_missing_last_and_nothing_is_said_without_a_check():
    frame = faster()
    failed = frames.fail(frame, "block_shock", n=4096)
    assert answer.failure(failed.assign(reason="why"), AXES) == "first failure: Block-Shock, why"
    assert answer.failure(frame, AXES) == ""
    failed = answer.sentence(failed, STUDY.answers["phase1"], " · 4 of 35 records missing")
    assert failed.startswith("6 of 36 checks failed. Never here: slower than ")
    assert failed.endswith("%. 2 more cases hold no valid times of both. 4 of 35 records missing.")
    page = answer.html(
        "", frame, {"phase1": (lambda _: verdicts.Verdict("<b>", "<i>", 1, 1, 1, "refuted", "<u>", frame),)}
    )
    assert "</b> &lt;b&gt; " in page and "<details><summary>rule</summary>&lt;i&gt;</details>" in page
    none = answer.sentence(frame[frame["metric"].ne("check")], STUDY.answers["phase1"])
    assert none == "Not answered: no check passed."


def test_a_notebook_begins_with_the_sentence_and_checks_are_coloured_apart_from_hypotheses():
    frame = faster()
    page = answer.html("Never < here", frame, STUDY.hypotheses, "<img>")
    places = [page.index(part) for part in ("Never &lt; here", "<img>", "Checks 36/36", "H1: Block-Shock")]
    assert places == sorted(places)
    assert 'chip good"' in page and '<b class="claim refuted">refuted</b> H1: ' in page
    assert 'chip bad"' in answer.html("", frames.fail(frame, "block_shock", n=4096), {})


def test_what_is_asked_once_is_asked_anew_of_another_frame(monkeypatch):
    asked = []
    monkeypatch.setattr(verdicts, "phases", lambda frame: asked.append(frame) or len(asked))
    rule, table = (late("report.verdicts:phases", once=once) for once in (True, False))
    one, other = (frames.make(ns=(4096,), bs=(16,)) for _ in range(2))
    assert [rule(frame) for frame in (one, one, other, other, one)] == [1, 1, 2, 2, 3]
    assert [table(one), table(one)] == [4, 5]
