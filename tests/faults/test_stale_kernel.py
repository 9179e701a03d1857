"""A library that is edited after a kernel has imported it."""

import json
import shutil

import nbclient
import nbformat

from blockshock_lib import manifest, records, workbook
from tests.runs import TINY


def test_stale_kernel(tmp_path, monkeypatch):
    copy = tmp_path / "project"
    for name in ("blockshock_lib", "params"):
        shutil.copytree(workbook.ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(copy))
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path / "cache"))
    edit = f"open({str(copy / 'blockshock_lib' / 'plan.py')!r}, 'a').write('# edited\\n')"
    opened = f"run = workbook.open_run('phase0', hardware='cpu', settings={TINY!r})"
    sources = (
        f"from blockshock_lib import workbook\n{opened}",
        edit,
        opened,
        "run.measure(progress=False)",
        "print(len(run.finished()))",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    options = dict(timeout=120, resources={"metadata": {"path": str(copy)}}, extra_arguments=["--log-level=40"])
    nbclient.NotebookClient(notebook, **options).execute()
    said = [json.dumps(cell.outputs) for cell in notebook.cells]
    for place in (2, 3):
        assert "blockshock_lib/plan.py changed after" in said[place] and "restart the kernel" in said[place], said
    assert "changed after" not in said[0]
    assert '"text": "0\\n"' in said[4], "no resumed run keeps a stale record"

    fresh, stale = (manifest.read(path.parent)["code"] for path in sorted(copy.rglob(manifest.FILE)))
    assert fresh["imported"] == fresh["sources"], "opened before the edit"
    assert stale["imported"] == fresh["imported"] and stale["sources"] not in (fresh["sources"], "")
    (record,) = map(records.read, copy.rglob("records/*.json"))
    assert record["context"]["code"] == stale
