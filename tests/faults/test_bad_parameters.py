"""Bad files of parameters start nothing; odd values are data, wherever they go."""

import json
import shutil

import nbformat
import pytest

from blockshock_lib import manifest, params, records, workbook
from blockshock_lib.__main__ import main
from blockshock_lib.errors import ParamsError
from tests.cases import case
from tests.params.bad_files import BAD_FILES, put
from tests.runs import TINY


def test_there_are_40_bad_files():
    assert len(BAD_FILES) == 40


@pytest.mark.parametrize("claim", BAD_FILES)
def test_40_bad_parameter_files(claim, tmp_path, nothing_starts):
    bad, out = BAD_FILES[claim], tmp_path / "out"
    root = shutil.copytree(params.PARAMS, tmp_path / "params")
    put(root, bad.files)
    settings = {f"layers.{kind}": name for kind, name in bad.choose.items()} | dict(bad.overrides)
    with pytest.raises(ParamsError) as caught:
        workbook.execute(bad.phase, hardware="cpu", settings=settings, out=out, root=root)
    (first, *_) = str(caught.value).splitlines()
    assert first.startswith(f"{bad.opens} ") and bad.says in first
    (file,) = bad.files
    assert f"params/{file}: " in first and not out.exists()


ODD = [
    "it's",
    'say "so"',
    "'''",
    '"""\nimport os\n"""',
    "two\nlines\r\n",
    "{braces} {0} {{}} %s %(x)s ${HOME} $HOME `id` $(id)",
    "../../outside",
    "/tmp/outside",
    "back\\slash \\n \\' \\",
    "- yes: [no, {a: b}] # : &a *a !!x",
    "é \u2028 \x85 \x7f",
    "<script>alert(1)</script>",
]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("key", ["mask.name", "workload.name", "hardware.name", "layers.mask", "layers.sweep", "phase"])
def test_an_odd_value_is_refused_as_the_data_it_is_and_nothing_is_written(key, value, tmp_path, capsys, nothing_starts):
    given = f"{key}={json.dumps(value)}"
    # YAML 1.2 takes a JSON text as it is.
    assert params.parse_override(given) == (key, value)
    out = tmp_path / "out"
    assert main(["run", "phase0", "--hardware", "cpu", "--set", given, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith(f"error: --set: {key}: ") and repr(value)[:60] in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_an_odd_value_of_the_parameters_cell_is_the_same_value_for_the_kernel(value):
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    given = {"hardware": value, "settings": {value: [value, {"n": value}]}, "run_dir": value, "redraw": value}
    notebook = load_notebook_node(str(workbook.ROOT / "notebooks" / workbook.NOTEBOOKS["phase0"]))
    cells = parameterize_notebook(notebook, given, kernel_name="python3", language="python").cells
    (injected,) = (cell for cell in cells if "injected-parameters" in cell.metadata.get("tags", []))
    found = {}
    exec(injected.source, found)
    assert {key: found[key] for key in given} == given


def test_odd_values_come_back_from_a_record_and_a_manifest(tmp_path):
    for number, value in enumerate(ODD):
        rows = [records.row("dense", "check", float("nan"), status="failed", reason=value, detail=value)]
        context = {"code": {"commit": value}, "machine": value, "libraries": {value: value}, "emulated": True}
        path = records.write(tmp_path, run=value, case=case(seed=number), group=0, rows=rows, context=context)
        record = records.read(path)
        assert (record["run"], record["context"]) == (value, context)
        assert (record["rows"][0]["reason"], record["rows"][0]["detail"]) == (value, value)
        manifest.note(tmp_path, **{f"fact {number}": value, value: [value]})
    frame = records.load(tmp_path, strict=True)
    assert set(frame["run"]) == set(frame["reason"]) == set(ODD)
    noted = json.loads((tmp_path / manifest.FILE).read_text())
    assert noted == {f"fact {n}": value for n, value in enumerate(ODD)} | {value: [value] for value in ODD}


def test_parameter_values_with_quotes_newlines_braces_and_dots(tmp_path):
    """The one parameter that may hold anything is a folder: a whole run in one, from the command to the page."""
    (tmp_path / "x").mkdir()
    odd = 'it\'s "so"\n{braces} {0} %s ${HOME} $(id) \\n # é'
    out = tmp_path / "x" / ".." / odd
    done = workbook.execute("phase0", hardware="cpu", settings=TINY, out=out)
    assert done.ok, done.verdict
    folder = done.notebook.parent
    assert folder.parent.parent == out and done.html.exists()
    name = manifest.shown(folder)
    assert odd in name and manifest.read(folder)["run"] == name
    assert set(records.load(folder, strict=True)["run"]) == {name}
    (cell,) = (
        cell
        for cell in nbformat.read(done.notebook, as_version=4).cells
        if "injected-parameters" in cell.metadata.get("tags", [])
    )
    found = {}
    exec(cell.source, found)
    assert (found["run_dir"], found["settings"]) == (name, TINY)
    assert {path.resolve() for path in tmp_path.rglob("*") if path.is_file()} == {
        path.resolve() for path in folder.rglob("*") if path.is_file()
    }
    assert not list((workbook.ROOT / "notebooks").rglob("*braces*"))


# What only training takes, asked for where it cannot be: (what is given, what is said of it)
NO_TRAINING = [
    ("phase3", ["dw=periodic", "layers.mask=random"], "dw: 'periodic', but mask random is not periodic"),
    ("phase3", ["dw=exchange", "layers.hardware=cuda-1"], "dw: 'exchange' swaps entries between ranks"),
    ("phase3", ["dw=half"], "dw: "),
    ("phase3", ["optimizers=[adam]"], "optimizers"),
    ("phase3", ["optimizers=[sgd,sgd]"], "optimizers: 'sgd' is listed twice"),
    ("phase3", ["optimizers=[]"], "optimizers: nothing to train with"),
    ("phase3", ["learning_rates.adamw=0"], "learning_rates.adamw: "),
    ("phase3", ["learning_rates.adamw=.nan"], "learning_rates.adamw: "),
    ("phase3", ["learning_rates.sdg=0.1"], "learning_rates.sdg: "),
    ("phase3", ["loss_steps=-1"], "loss_steps: "),
    ("phase1", ["optimizers=[sgd]"], "optimizers: phase1 trains no weight"),
    ("phase2", ["dw=full"], "dw: phase2 trains no weight"),
    ("phase0", ["loss_steps=200"], "loss_steps: phase0 trains no weight"),
]


@pytest.mark.parametrize("phase, given, said", NO_TRAINING, ids=lambda value: str(value)[:40])
def test_a_training_that_cannot_be_is_refused_in_a_line_and_nothing_is_written(
    phase, given, said, tmp_path, capsys, nothing_starts
):
    words = [word for text in given for word in ("--set", text)]
    assert main(["run", phase, "--hardware", "cpu", *words, "--out", str(tmp_path / "out")]) == 2
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and said in first
    assert not list(tmp_path.iterdir())
