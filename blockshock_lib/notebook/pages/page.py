"""One self-contained HTML page beside an executed notebook: opens offline, code folded, light and dark, inert.

A page fetches nothing, and a browser runs no script of it but ours: its policy names ours by its digest.
"""

import base64
import datetime as dt
import hashlib
import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from urllib.parse import quote

import nbformat
from bs4 import BeautifulSoup, Tag
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from blockshock_lib import files
from blockshock_lib.errors import RecordError, first_line
from blockshock_lib.files import ROOT
from blockshock_lib.notebook.pages import sanitise
from blockshock_lib.runs import manifest, records
from blockshock_lib.runs.run import OUTPUTS

_HERE = Path(__file__).parent
_environment = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FileSystemLoader(_HERE)
)
_WIDGET = "application/vnd.jupyter.widget-view+json"
_PICTURES = ("image/png", "image/jpeg", "image/gif")
_PRE = Markup('<pre class="{kind}" tabindex="0">{text}</pre>')
_FACT = Markup("<li>{}</li>")
_LABEL = Markup('<p class="label {kind}">{label}</p>')
_IMAGE = Markup('<img src="data:{kind};base64,{data}" alt="{alt}">')


def write_html(notebook_path: str | Path) -> Path:
    """The path of `<notebook>.html`, written whole or not at all: without widgets, formulas not typeset; the verdict of
    the manifest beside it at the top where the notebook did not end well or does not begin with an answer.
    FileNotFoundError; nbformat.reader.NotJSONError: it is no notebook; RecordError: the page was not written.
    """
    source = Path(notebook_path)
    files.write_atomic(source.with_suffix(".html"), render(source))
    return source.with_suffix(".html")


def render(source: Path, alone: bool = False) -> str:
    """The page of a notebook, which links to the files beside it and, unless it is `alone`, to the other runs."""
    outline = _Outline()
    cells = [_cell(cell, outline, source.parent) for cell in nbformat.read(source, as_version=4).cells]
    answered = any('class="answer"' in output for cell in cells for output in cell["outputs"])
    given = dict(contents=outline.contents, cells=cells, links=_links(source, alone), **_verdict(source.parent))
    if answered and not given["state"]:
        given["verdict"] = []
    return document("page.html", outline.title or source.stem, **given)


def document(template: str, title: str, **values: object) -> str:
    """A whole HTML page from a template of this folder. Every value is escaped but one that is Markup already."""
    body = Markup(_environment.get_template(template).render(title=title, **values))
    texts = {"style": (_HERE / "style.css").read_text(), "script": (_HERE / "script.js").read_text()}
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
    for kind, text in texts.items():
        policy += f"; {kind}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    given = {name: Markup(text) for name, text in texts.items()} | {"policy": Markup(policy), "body": body}
    return _environment.get_template("document.html").render(title=title, **given)


def tone(status: str, verdict: str) -> str:
    """The colour of a run: good, bad, warn, or none of them while there is nothing to say."""
    if status in ("failed", "damaged") or "FAIL" in verdict:
        return "bad"
    return "warn" if status == "interrupted" or "INCOMPLETE" in verdict else "good" if "PASS" in verdict else ""


def moment(text: str) -> str:
    """An ISO time of a manifest as people read it, "2026-11-20 15:57 UTC"; whatever else it is, as it is."""
    try:
        return f"{dt.datetime.fromisoformat(text).astimezone(dt.UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError):
        return text


class _Outline:
    """The headings of a page, in order: one title, then no level skipped; and the number of code cells so far."""

    def __init__(self) -> None:
        self.title, self.contents, self.count = "", [], 0
        self._level, self._names = 1, {"contents", "main", "code", "theme", "csv"}  # those of the page itself

    def take(self, tag: Tag) -> None:
        """Takes the first first-level heading out of the text, and gives the others their level and a name made of
        their words, which a link to them keeps from one drawing to the next.
        """
        text, level = " ".join(tag.get_text().split()), int(tag.name[1])
        if not text or (level == 1 and not self.title):
            self.title = self.title or text
            tag.decompose()
            return
        self._level = min(max(level, 2), self._level + 1)
        tag.name = f"h{self._level}"
        word = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-") or "part"
        tag["id"] = next(name for n in count(1) if (name := f"{word}-{n}" if n > 1 else word) not in self._names)
        self._names.add(tag["id"])
        tag.append(
            BeautifulSoup(f' <a class="anchor" href="#{tag["id"]}" title="link to this part">#</a>', "html.parser")
        )
        if self._level == 2:
            self.contents.append((tag["id"], text))


def _links(notebook: Path, alone: bool) -> list[tuple[str, str]]:
    """Where a reader can go from the page of a run, to all runs, its study's findings and the files beside it: (word,
    link) relative to the page; `alone`: only to files of the run, as a zip holds them.
    """
    folder = notebook.resolve().parent
    found, facts = {}, _facts(folder)
    home = next((one for one in folder.parents if (one / "index.html").is_file() or one == OUTPUTS.resolve()), None)
    if home is not None and not alone:
        shipped = [place / "findings" / "findings.html" for place in (home, home / "reference")]
        every = [path for path in (*shipped, *sorted(home.glob("*/*-findings/findings.html"))) if path.is_file()]
        every = [path for path in every if _facts(path.parent).get("study") == facts.get("study")]
        found["Runs"] = home / "index.html"
        found |= {"Findings": every[-1]} if every and every[-1].parent != folder else {}
    found["Notebook"] = folder / notebook.name
    if facts:
        source = ROOT / facts["redrawn_from"] if facts.get("redrawn_from") else folder
        if facts["phase"] != "findings":
            # A run that ends well packs its records once its page is made.
            packed = (source / records.PARQUET).exists() or facts["status"] == "running"
            found["Records"] = source / (records.PARQUET if packed else "records")
        if (source / "traces").is_dir():
            found["Traces"] = source / "traces"
        found["Manifest"] = folder / manifest.FILE
    return [(word, quote(Path(os.path.relpath(path, folder)).as_posix())) for word, path in found.items()]


def _facts(folder: Path) -> dict:
    try:
        return manifest.read(folder)
    except RecordError:
        return {}


def _verdict(folder: Path) -> dict[str, object]:
    if not (found := _facts(folder)):
        return dict(verdict=[], tone="", state="", about="")
    line, status = str(found.get("verdict") or ""), found["status"]
    redrawn = f" · redrawn from {found['redrawn_from']}" if found.get("redrawn_from") else ""
    note = f" · {found['reason']}" if status == "completed" and found.get("reason") else ""  # how it was measured
    return dict(
        verdict=line.split(" · ") if line else [],
        tone=tone(status, line),
        # The page of a run that goes well is made while its manifest still says that it is running.
        state=status if status in ("failed", "interrupted") else "",
        about=f"{found['machine']['title']} · {moment(found['started'])}{redrawn}{note}",
    )


def _cell(cell: NotebookNode, outline: _Outline, folder: Path) -> dict[str, object]:
    """A cell as page.html shows it. It is called by its execution count, else by its place; code that is tagged "shown"
    is not folded.
    """
    outline.count += cell.cell_type == "code"
    name = f"cell {cell.get('execution_count') or outline.count}"
    if cell.cell_type == "code":
        code = Markup(highlight(cell.source, PythonLexer(), HtmlFormatter(nowrap=True)))
        cell.outputs = [output for output in cell.outputs if _WIDGET not in output.get("data", {})]  # they are live
        CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)
        outputs = [html for output in cell.outputs if (html := _output(output, name, folder))]
        about = dict(lines=len(cell.source.splitlines()), open="shown" in cell.metadata.get("tags", ()))
        return dict(prose="", name=name, code=code, outputs=outputs, **about)
    if cell.cell_type == "markdown":
        prose = _markdown(cell.source, name, folder, outline.take, cell.get("attachments", {}))
    else:
        prose = _said(cell.source)
    return dict(prose=prose, lines=0, outputs=[])


def _output(output: NotebookNode, name: str, folder: Path) -> Markup:
    if output.output_type == "stream":
        aside = output.name != "stdout"
        facts = sanitise.terminal(output.text).strip().removesuffix(" ·").split(" · ")
        if len(facts) > 2 and "\n" not in output.text.strip() and not aside:  # a verdict's line
            return Markup("<ul>{}</ul>").format(Markup("").join(map(_FACT.format, facts)))
        return _said(output.text, "said aside", f"{output.name} of {name}") if aside else _said(output.text)
    if output.output_type == "error":
        text = "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
        return _said(text, "said error", f"{name} failed with {output.ename}")
    data, about, html = output.data, output.get("metadata", {}), Markup("")
    if "text/html" in data:
        html = sanitise.clean(data["text/html"], cell=name)
    elif "text/markdown" in data:
        html = _markdown(data["text/markdown"], name, folder)
    elif kind := next((kind for kind in _PICTURES if kind in data), ""):
        alt = about.get(kind, about)
        alt = alt.get("alt", "") if isinstance(alt, dict) else ""
        html = sanitise.clean(_IMAGE.format(kind=kind, data=data[kind], alt=alt), cell=name)
    return html or _said(str(data.get("text/plain", "")), "")


def _said(text: str, kind: str = "said", label: str = "") -> Markup:
    html = sanitise.terminal(text)
    label = _LABEL.format(kind=kind, label=label) if label else Markup("")
    return label + _PRE.format(kind=kind, text=html) if html else Markup("")


def _markdown(text: str, name: str, folder: Path, heading: Callable | None = None, attachments=()) -> Markup:
    # Pictures that lie in the notebook's own folder are embedded.
    shown = dict(escape=False, embed_images=True, exclude_anchor_links=True, path=str(folder))
    try:
        html = MarkdownWithMath(renderer=IPythonRenderer(**shown, attachments=dict(attachments))).render(text)
    except Exception as error:  # an attachment that is not there, a picture that cannot be read, text nested too deep
        return _said(text, label=f"[this text could not be rendered: {first_line(error)}]")
    return sanitise.clean(html, cell=name, heading=heading)
