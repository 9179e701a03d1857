"""What an ill-meaning colleague would send: a notebook whose outputs try to act, and zips that try to get out.

Whatever manages to run sets `window.owned`, or makes CANARY.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbformat import v4

from blockshock_lib import files
from blockshock_lib.runs import manifest, record, records

REFERENCE = files.ROOT / "outputs" / "reference" / "phase1-cpu"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
ACT = "window.owned=1"
_B64 = "PHNjcmlwdD53aW5kb3cub3duZWQ9MTwvc2NyaXB0Pg=="  # <script>window.owned=1</script>

HTML = {
    "script": f"<script>{ACT}</script>",
    "script from elsewhere": '<script src="https://example.org/x.js"></script>',
    "onerror": f'<img src="x" onerror="{ACT}">',
    "onload of an embedded image": f'<img src="data:image/png;base64,{PIXEL}" onload="{ACT}" alt="a dot">',
    "handlers": f'<p onclick="{ACT}" onmouseover="{ACT}" onfocus="{ACT}" tabindex="1" autofocus>words</p>',
    "javascript: link": f'<a href="javascript:{ACT}">words</a>',
    "data: link": f'<a href="data:text/html;base64,{_B64}">words</a>',
    "other links": '<a href="vbscript:x">a</a><a href="file:///etc/passwd">b</a><a href="blob:x">c</a>',
    "link to a share": '<a href="//example.org/x">a</a><a href="\\\\example.org\\x">b</a>',
    "iframe": f'<iframe src="javascript:{ACT}"></iframe><iframe srcdoc="<script>{ACT}</script>"></iframe>',
    "object": f'<object data="data:text/html;base64,{_B64}"></object>',
    "svg with script": f'<svg onload="{ACT}"><script>{ACT}</script><animate onbegin="{ACT}" attributeName="x"/></svg>',
    "svg image": f'<img alt="" src="data:image/svg+xml;base64,{_B64}">',
    "style": "<style>main, .verdict { display: none } body { background: url(https://example.org/x) }</style>",
    "style attribute": '<div style="position:fixed;inset:0;background:red;display:none">hidden words</div>',
    "classes and names of ours": '<p class="skip" id="main" name="theme">more hidden words</p><h3 id="part-0">x</h3>',
    "meta refresh": '<meta http-equiv="refresh" content="0;url=https://example.org/">',
    "base": '<base href="https://example.org/">',
    "link": '<link rel="stylesheet" href="https://example.org/x.css">',
    "form": f'<form action="https://example.org/"><input name="x" autofocus onfocus="{ACT}">words</form>',
    "comments": f"<!--><script>{ACT}</script>--><!--[if IE]><script>{ACT}</script><![endif]-->",
    "declarations": f"<![CDATA[<script>{ACT}</script>]]><!x <script>{ACT}</script>><?x <script>{ACT}</script>?>",
    "ends of what is around": f"</pre></div></section></main></body></html><script>{ACT}</script>",
    "unclosed": f'<table><tr><td><a href="x"><b><div title="><script>{ACT}</script>',
    "picture from elsewhere": '<img src="https://example.org/x.png" alt="spy"><img srcset="https://example.org/x 2x">',
    "deep": "<div>" * 3000 + f"<script>{ACT}</script>",
}


def write_notebook(path: Path) -> Path:
    """A notebook that tries each of HTML as an output, as Markdown and as Markdown in an output, and other ways in."""
    script, code, text = f"<script>{ACT}</script>", v4.new_code_cell, v4.new_markdown_cell
    cells = [text(f"# Hostile {script}\n\nwords")]
    for name, html in HTML.items():
        show = [v4.new_output("display_data", {"text/html": html, "text/plain": name})]
        show.append(v4.new_output("execute_result", {"text/markdown": f"# {name}\n\n{html}\n"}, execution_count=1))
        cells += [code(f"# {name}", outputs=show), text(f"## {name}\n\n{html}\n\nafter")]
    shown = [
        {"application/javascript": ACT, "text/plain": "<JS>"},
        {"image/svg+xml": f"<svg>{script}</svg>", "text/plain": "<SVG>"},
        {"image/png": f'{PIXEL}" onerror="{ACT}">{script}'},
        {"text/latex": script, "text/plain": script},
    ]
    link = f"\x1b[38;2;1;2;3m{script}\x1b]8;;javascript:{ACT}\x07x\x1b]8;;\x07"
    others = [
        *(v4.new_output("display_data", data) for data in shown),
        v4.new_output("display_data", {"image/png": PIXEL}, metadata={"image/png": {"alt": f'"><{script}'}}),
        v4.new_output("stream", name="stdout", text=script + link),
        v4.new_output("stream", name='stderr"><script>', text=script),
        v4.new_output("error", ename=script, evalue=script, traceback=[script]),
    ]
    picture = text("![an attachment](attachment:x.svg)", attachments={"x.svg": {"image/svg+xml": _B64}})
    cells += [
        code(script, outputs=others),
        text(f"[a](javascript:{ACT}) ![b](javascript:{ACT}) <javascript:{ACT}>\n\n```\n{script}\n```"),
        picture,
        text("![up](../../secret.png) ![gone](attachment:gone.png)"),
        v4.new_raw_cell(script),
        text("The last words."),
    ]
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


KNOWN = json.loads((REFERENCE / manifest.FILE).read_text())


def noted(folder: Path, **facts: object) -> Path:
    """`folder`, with the manifest of the reference run and in it other `facts`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / manifest.FILE).write_text(json.dumps(KNOWN | facts))
    return folder


def small_run(folder: Path) -> Path:
    """A whole run, as light as can be: one record and one trace of the reference run, and a notebook of two cells."""
    for kind in ("records", "traces"):
        (folder / kind).mkdir(parents=True)
    one, trace = records.scan(REFERENCE)[0][0], min((REFERENCE / "traces").iterdir())
    (folder / "records" / f"{one['id']}-{one['group']}.json").write_bytes(record.encode(one))
    shutil.copy(trace, folder / "traces" / trace.name)
    (folder / "logs").mkdir()
    (folder / "logs" / "rank0.log").write_text("a path of a machine")
    output = v4.new_output("display_data", {"image/png": PIXEL})
    cells = [v4.new_markdown_cell("# A run\n\n## Part"), v4.new_code_cell("run()", outputs=[output])]
    nbformat.write(v4.new_notebook(cells=cells), folder / "phase1_forward.ipynb")
    (folder / "phase1_forward.html").write_text(f"<script>{ACT}</script>")
    return noted(folder, files=manifest.digests(folder))


def contents(path: Path) -> dict[str, bytes]:
    """Name -> content of a zip."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(files: dict[str, bytes], *entries: tuple, told: dict = {}, honest: bool = True, **facts) -> bytes:  # noqa: B006
    """A zip of `files`, the manifest's digests made right and its `facts` others, and of `entries`, of which it tells
    what is `told`.
    """
    if honest:
        others = {name: data for name, data in files.items() if name != manifest.FILE}
        known = json.loads(files[manifest.FILE]) | facts
        known["files"] |= {name: hashlib.sha256(data).hexdigest() for name, data in others.items()} | told
        files = others | {manifest.FILE: json.dumps(known).encode()}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (*files.items(), *entries):
            archive.writestr(name, data)
    return made.getvalue()


CANARY = Path(tempfile.gettempdir()) / f"canary-{os.getpid()}"  # there once a pickle was opened


class _Bomb:
    def __reduce__(self):
        return os.system, (f"touch '{CANARY}'",)


PICKLE = pickle.dumps(_Bomb())


# Each of these gives a function: files of a good zip -> bytes of a bad one.
def _added(name: str, data: bytes = b"{}", mode: int = stat.S_IFREG | 0o644) -> Callable:
    """One more file; told of in the manifest, so that only its name, mode or content is wrong."""
    entry = zipfile.ZipInfo(name)
    entry.external_attr, entry.create_system = mode << 16, 3
    return lambda files: zipped(files, (entry, data), told={name: hashlib.sha256(data).hexdigest()})


def _with(**facts: object) -> Callable:
    return lambda files: zipped(files, **facts)


def _changed(start: str, change: Callable[[bytes], bytes | None], honest: bool = False) -> Callable:
    def changed(files: dict[str, bytes]) -> bytes:
        name = min(name for name in files if name.startswith(start))
        found = files | {name: change(files[name])}
        return zipped({name: data for name, data in found.items() if data is not None}, honest=honest)

    return changed


def _untold(name: str) -> Callable:
    return lambda files: zipped(files, (name, b"{}"))


def _bytes(change: Callable[[bytes], bytes]) -> Callable:
    return lambda files: change(zipped(files))


def _directory(*changes: tuple[int, bytes]) -> Callable:
    """Other bytes at places of the last entry in the directory."""

    def change(data: bytes) -> bytes:
        data, start = bytearray(data), data.rindex(b"PK\1\2")
        for place, new in changes:
            data[start + place : start + place + len(new)] = new
        return bytes(data)

    return _bytes(change)


NOTEBOOK = "phase1_forward.ipynb"
STRANGERS = (  # absolute, leading out, a drive's, with a backslash or a control character, no ASCII, no kind of ours
    *("/tmp/evil.json", "records/../../evil.json", "../evil.json", "C:evil.json", "records\\..\\..\\evil.json"),
    *("records/a\n.json", "records/\u202egpj.json", "records//a.json", "records/.a.json", "more/a.json", "weights.pt"),
    *("records/a.pkl", "sitecustomize.py", "x.so", "more.zip", "figure.svg"),
)
# What is wrong -> how such a zip is made, and what the refusal says.
ZIPS: dict[str, tuple[Callable, str]] = {
    "symlink": (_added("records/a.json", b"/etc/passwd", stat.S_IFLNK | 0o777), "link"),
    "symlink to a folder": (_added("records", b"/tmp", stat.S_IFLNK | 0o777), "link"),
    "device": (_added("records/a.json", b"", stat.S_IFCHR | 0o666), "plain file"),
    "set-user-id": (_added("records/a.json", b"", stat.S_IFREG | 0o4755), "plain file"),
    "folder entry": (_added("logs/", b"", stat.S_IFDIR | 0o755), "no folder"),
    **{name: (_added(name, PICKLE), "no file of a run") for name in STRANGERS},
    "pickle as a picture": (_added("figure.png", PICKLE), "no PNG"),
    "pickle as a trace": (_added("traces/a.json.gz", PICKLE), "no whole trace"),
    "one name twice": (_untold(NOTEBOOK), "twice"),
    "one name in two cases": (_untold("PHASE1_forward.ipynb"), "twice"),
    "record altered": (_changed("records/", lambda data: data.replace(b"1", b"2", 1)), "not the file"),
    "trace altered": (_changed("traces/", lambda data: data + b"\0"), "not the file"),
    "page altered": (_changed("phase1_forward.html", lambda data: data + b"<p>"), "not the file"),
    "record missing": (_changed("records/", lambda data: None), "is missing"),
    "file that the manifest does not name": (_untold("records/a.json"), "not the file"),
    "trace cut": (_changed("traces/", lambda data: data[:-20], honest=True), "no whole trace"),
    "notebook is none": (_changed(NOTEBOOK, lambda data: b"[]", honest=True), "no notebook"),
    "notebook nested too deep": (_changed(NOTEBOOK, lambda data: b"[" * 200_000, honest=True), "no notebook"),
    "no manifest": (_changed(manifest.FILE, lambda data: None), "no manifest.json"),
    "manifest is no JSON": (_changed(manifest.FILE, lambda data: b"{"), "cannot be read"),
    "manifest nested too deep": (_changed(manifest.FILE, lambda data: b"[" * 200_000), "cannot be read"),
    "manifest is a list": (_changed(manifest.FILE, lambda data: b"[]"), "no run that ended"),
    "no digests": (_changed(manifest.FILE, lambda data: data.replace(b'"files"', b'"flies"')), "no run that ended"),
    "unknown phase": (_with(phase="../../evil"), "phase"),
    "phase is a list": (_with(phase=["phase1"]), "phase"),
    "still running": (_with(status="running"), "status"),
    "machine is text": (_with(machine="H200"), "machine"),
    "machine without libraries": (_with(machine={"title": "x"}), "machine"),
    "parameters are a list": (_with(params=[]), "params"),
    "redraws another folder": (_with(redrawn_from="../../.."), "redrawn_from"),
    "verdict is no text": (_with(verdict={}), "verdict"),
    "answer is no text": (_with(answer=["Yes."]), "answer"),
    "encrypted": (_directory((8, b"\1\0")), "encrypted"),
    "larger than it says": (_directory((24, b"\1\0\0\0")), "whole zip"),
    "of a version to come": (_directory((6, b"\xff")), "whole zip"),
    "name that is no UTF-8": (_directory((8, b"\0\x08"), (46, b"\xff")), "whole zip"),
    "cut": (_bytes(lambda data: data[: len(data) // 2]), "plain zip"),
    "no zip": (_bytes(lambda data: pickle.dumps(0)), "plain zip"),
    "empty": (_bytes(lambda data: b""), "plain zip"),
    "with a comment": (_bytes(lambda data: data[:-2] + b"\2\0ab"), "plain zip"),
}
