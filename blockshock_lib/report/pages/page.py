"""One self-contained HTML page beside an executed notebook: opens offline, code folded, light and dark, inert."""

from __future__ import annotations

from pathlib import Path

import nbformat
from bs4 import Tag
from markupsafe import Markup
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from blockshock_lib import manifest, records
from blockshock_lib.errors import RecordError, first_line
from blockshock_lib.report.pages import sanitise, style, terminal, web

_WIDGET = "application/vnd.jupyter.widget-view+json"
_PICTURES = ("image/png", "image/jpeg", "image/gif")

_PAGE = """
<header>
<div class="bar"><span>Block-Shock</span><span class="tools">
<button type="button" id="code" hidden>Show all code</button>
<button type="button" id="theme" hidden>Theme</button>
</span></div>
<h1>{{ title }}</h1>
{% if verdict %}
<div class="verdict {{ tone }}">
<p>{% if state %}<span class="state {{ tone }}">{{ state }}</span> · {% endif %}{{ verdict[0] }}</p>
{% if verdict[1:] %}<ul>{% for part in verdict[1:] %}<li>{{ part }}</li>{% endfor %}</ul>{% endif %}
<p class="muted">{{ about }}</p>
</div>
{% endif %}
{% if contents %}
<nav aria-labelledby="contents"><h2 id="contents">Contents</h2><ol>
{% for name, text in contents %}<li><a href="#{{ name }}">{{ text }}</a></li>
{% endfor %}
</ol></nav>
{% endif %}
</header>
<main id="main">
{% for cell in cells %}
{{ cell }}
{% endfor %}
</main>
"""

_CODE = """
<div class="cell">
{% if lines %}
<details class="code"><summary>Code of {{ name }}<span class="muted"> · {{ lines }}</span></summary>
<pre tabindex="0"><code>{{ code }}</code></pre></details>
{% endif %}
{% for output in outputs %}<div class="output">{{ output }}</div>
{% endfor %}
</div>
"""

_SAID = '<p class="label {{ kind }}">{{ label }}</p><pre class="said {{ kind }}" tabindex="0">{{ text }}</pre>'


def write_html(notebook_path: str | Path) -> Path:
    """Write `<notebook>.html` beside the notebook and return its path; an older page is replaced whole, never in part.

    Images are embedded and nothing is fetched from a network; nothing in an output or in Markdown can act (sanitise).
    Widget views, which need a live kernel, are left out; error outputs are shown as they are. The verdict at the top is
    that of the manifest beside the notebook, if there is one. Formulas are not typeset: notebooks use plain text.

    Raises:
        FileNotFoundError: no such notebook.
        nbformat.reader.NotJSONError: the file is no notebook.
        RecordError: the page could not be written.
    """
    source = Path(notebook_path)
    notebook = nbformat.read(source, as_version=4)
    outline = _Outline()
    cells = [_cell(cell, name, outline, source.parent) for cell, name in _numbered(notebook.cells)]
    title = outline.title or source.stem
    body = web.render(_PAGE, title=title, contents=outline.contents, cells=cells, **_verdict(source.parent))
    target = source.with_suffix(".html")
    page = web.document(title, body, style=style.STYLE, script=style.SCRIPT)
    records.write_atomic(target, page)
    return target


class _Outline:
    """The headings of a page, in order: one title, then no level skipped."""

    def __init__(self) -> None:
        self.title, self.contents = "", []
        self._level = 1

    def take(self, tag: Tag) -> None:
        """Takes the first first-level heading out of the text, and gives the others their level and a name."""
        text, level = " ".join(tag.get_text().split()), int(tag.name[1])
        if not text or (level == 1 and not self.title):
            self.title = self.title or text
            tag.decompose()
            return
        self._level = min(max(level, 2), self._level + 1)
        tag.name = f"h{self._level}"
        if self._level == 2:
            tag["id"] = f"part-{len(self.contents)}"
            self.contents.append((tag["id"], text))


def _verdict(folder: Path) -> dict[str, object]:
    """What the manifest in `folder` says of the run, for the head of the page; `verdict` is empty without one."""
    try:
        found = manifest.read(folder)
    except RecordError:
        return dict(verdict=[], tone="", state="", about="")
    line = str(found.get("verdict") or "")
    # The page of a run that goes well is made while its manifest still says that it is running.
    state = str(found["status"]) if found["status"] in ("failed", "interrupted") else ""
    card = found["machine"] if isinstance(found["machine"], dict) else {}
    about = [card.get("title", "unknown machine"), web.moment(found["started"])]
    if found.get("redrawn_from"):
        about.append(f"redrawn from {found['redrawn_from']}")
    return dict(
        verdict=line.split(" · ") if line else [],
        tone=web.tone(str(found["status"]), line),
        state=state,
        about=" · ".join(map(str, about)),
    )


def _numbered(cells: list[NotebookNode]) -> list[tuple[NotebookNode, str]]:
    # Code cells as the notebook counts them where it was executed, else in their order.
    named, count = [], 0
    for cell in cells:
        count += cell.cell_type == "code"
        named.append((cell, f"cell {cell.get('execution_count') or count}"))
    return named


def _cell(cell: NotebookNode, name: str, outline: _Outline, folder: Path) -> Markup:
    if cell.cell_type == "markdown":
        return web.render('<div class="cell prose">{{ text }}</div>', text=_markdown(cell, name, outline, folder))
    if cell.cell_type != "code":
        return web.render('<div class="cell"><pre class="said" tabindex="0">{{ text }}</pre></div>', text=cell.source)
    code = highlight(cell.source, PythonLexer(), HtmlFormatter(nowrap=True))
    count = len(cell.source.splitlines())
    lines = f"{count} line{'s' if count != 1 else ''}" if count else ""
    outputs = [shown for output in _joined(cell.outputs) if (shown := _output(output, name, outline, folder))]
    return web.render(_CODE, name=name, lines=lines, code=Markup(code), outputs=outputs)


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs, those without a live widget's, and what was written to one stream in one piece."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if _WIDGET in output.get("data", {}):
            continue
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _output(output: NotebookNode, name: str, outline: _Outline, folder: Path) -> Markup | None:
    if output.output_type == "stream":
        text = terminal.html(output.text)
        aside = output.name != "stdout"
        return _said(text, "aside" if aside else "", f"{output.name} of {name}" if aside else "") if text else None
    if output.output_type == "error":
        text = terminal.html("\n".join(output.traceback) or f"{output.ename}: {output.evalue}")
        return _said(text, "error", f"{name} failed with {output.ename}")
    data, about = output.data, output.get("metadata", {})
    if "text/html" in data:
        return sanitise.clean(data["text/html"], cell=name) or _plain(data)
    if "text/markdown" in data:
        return _rendered(data["text/markdown"], name, None, folder, {}) or _plain(data)
    for kind in _PICTURES:
        if kind in data:
            alt = about.get(kind, about)
            alt = alt.get("alt", "") if isinstance(alt, dict) else ""
            image = web.render(
                '<img src="data:{{ kind }};base64,{{ data }}" alt="{{ alt }}">', kind=kind, data=data[kind], alt=alt
            )
            return sanitise.clean(image, cell=name)
    return _plain(data)


def _plain(data: dict) -> Markup | None:
    text = terminal.html(str(data.get("text/plain", "")))
    return web.render('<pre tabindex="0">{{ text }}</pre>', text=text) if text else None


def _said(text: Markup, kind: str, label: str) -> Markup:
    return web.render(
        _SAID if label else '<pre class="said" tabindex="0">{{ text }}</pre>', text=text, kind=kind, label=label
    )


def _markdown(cell: NotebookNode, name: str, outline: _Outline, folder: Path) -> Markup:
    return _rendered(cell.source, name, outline, folder, cell.get("attachments", {}))


def _rendered(text: str, name: str, outline: _Outline | None, folder: Path, attachments: dict) -> Markup:
    """Markdown as HTML; pictures that lie in the notebook's own folder are embedded."""
    renderer = IPythonRenderer(
        escape=False, embed_images=True, exclude_anchor_links=True, path=str(folder), attachments=attachments
    )
    try:
        html = MarkdownWithMath(renderer=renderer).render(text)
    except Exception as error:  # an attachment that is not there, a picture that cannot be read, text nested too deep
        note = f"[this text could not be rendered: {first_line(error)}]"
        return web.render(
            '<p class="note">{{ note }}</p><pre class="said" tabindex="0">{{ text }}</pre>', note=note, text=text
        )
    return sanitise.clean(html, cell=name, heading=outline.take if outline is not None else None)
