"""One self-contained HTML page beside an executed notebook."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from nbconvert import HTMLExporter

_WIDGET = "application/vnd.jupyter.widget-view+json"
# nbconvert's lab page without the four scripts that it loads from a CDN. Formulas are therefore not typeset: notebooks
# write them in plain text. The policy makes a browser refuse any fetch that an output may still ask for.
_TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; font-src data:; style-src 'unsafe-inline';
               script-src 'unsafe-inline'">
{% endblock html_head_js %}
{% block jupyter_widgets %}{% endblock jupyter_widgets %}
{% block html_head_js_mathjax %}{% endblock html_head_js_mathjax %}
{% block html_head_js_mermaidjs %}{% endblock html_head_js_mermaidjs %}
"""


def write_html(notebook_path: str | Path) -> Path:
    """Write `<notebook>.html` beside the notebook and return its path; an older page is replaced whole, never in part.

    Images are embedded and nothing is fetched from a network. Widget views, which need a live kernel, are left out;
    error outputs are shown as they are.

    Raises:
        FileNotFoundError: no such notebook.
        nbformat.reader.NotJSONError: the file is no notebook.
    """
    source = Path(notebook_path)
    notebook = nbformat.read(source, as_version=4)
    exporter = HTMLExporter(
        template_file="page.html.j2", extra_loaders=[DictLoader({"page.html.j2": _TEMPLATE})], embed_images=True
    )
    body, _ = exporter.from_notebook_node(
        _static(notebook), resources={"metadata": {"name": source.stem, "path": str(source.parent)}}
    )
    target = source.with_suffix(".html")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(body, encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _static(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without widget state and widget views: the text that stands in for a view is a dead one."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _WIDGET not in output.get("data", {})]
    return notebook
