"""Odd values of parameters are data, wherever they go."""

import json

import pytest

from blockshock_lib import params
from blockshock_lib.__main__ import main
from blockshock_lib.runs import manifest, record, records
from tests.cases import case, row, write

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
@pytest.mark.parametrize("key", ["mask", "workload", "hardware.name", "layers.sweep", "phase"])
def test_an_odd_value_is_refused_as_the_data_it_is_and_nothing_is_written(key, value, tmp_path, capsys, nothing_starts):
    given = f"{key}={json.dumps(value)}"
    # YAML 1.2 takes a JSON text as it is.
    assert params.parse_override(given) == (key, value)
    out = tmp_path / "out"
    assert main(["run", "phase0", "--hardware", "cpu", "--set", given, "--out", str(out)]) == 2
    said = capsys.readouterr()
    word = "--sweep" if key == "layers.sweep" else f"--set: {key}"
    assert not said.out and f"\nerror: {word}: " in f"\n{said.err}" and repr(value)[:60] in said.err
    assert not list(tmp_path.iterdir())


def test_odd_values_come_back_from_a_record_and_a_manifest(tmp_path):
    whole, facts = "".join(ODD), {value: [value] for value in ODD}
    rows = [row("dense", "check", float("nan"), status="failed", reason=value, detail=value) for value in ODD]
    context = {"code": {"commit": whole}, "machine": whole, "libraries": facts, "emulated": True}
    found = record.read(write(tmp_path, run=whole, case=case(), group=0, rows=rows, context=context))
    assert (found["run"], found["context"]) == (whole, context)
    assert [(one["reason"], one["detail"]) for one in found["rows"]] == [(value, value) for value in ODD]
    frame = records.load(tmp_path, strict=True)
    assert set(frame["run"]) == {whole} and list(frame["reason"]) == ODD
    manifest.note(tmp_path, **facts)
    assert json.loads((tmp_path / manifest.FILE).read_text()) == facts
