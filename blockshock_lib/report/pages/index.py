"""The page that lists all runs: what is known of each, and the HTML of it."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from blockshock_lib.report.pages import web


@dataclass(frozen=True)
class Picture:
    """A small PNG, or none, and the text that stands for it."""

    alt: str = ""
    png: bytes = b""

    @property
    def source(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png).decode('ascii')}"


@dataclass(frozen=True)
class Entry:
    """What the list says of one run. All of it is text of a manifest, which anybody may have written; `folder`, `page`
    and `notebook` are links, relative to the list and quoted; `page` and `notebook` are empty where there is none.
    """

    folder: str
    status: str
    verdict: str = ""
    phase: str = "unknown phase"
    machine: str = "unknown machine"
    started: str = ""
    redrawn_from: str = ""
    received: str = ""
    page: str = ""
    notebook: str = ""
    picture: Picture = Picture()

    @property
    def tone(self) -> str:
        return web.tone(self.status, self.verdict)

    @property
    def parts(self) -> list[str]:
        return [part for part in self.verdict.split(" · ") if part]

    @property
    def when(self) -> str:
        return web.moment(self.started) if self.started else "unknown time"


_BODY = """
<header>
<div class="bar"><span>Block-Shock</span><span class="tools">
<button type="button" id="theme" hidden>Theme</button></span></div>
<h1>Runs</h1>
</header>
<main id="main">
{% if entries %}
<div class="filters" id="filters" role="search" aria-label="Filter the runs" hidden>
<label>Phase <select id="phase"><option value="">all</option>
{% for name in phases %}<option>{{ name }}</option>{% endfor %}</select></label>
<label>Machine <select id="machine"><option value="">all</option>
{% for name in machines %}<option>{{ name }}</option>{% endfor %}</select></label>
<label>Text <input id="text" type="search" placeholder="verdict, status, folder" autocomplete="off"></label>
</div>
<p class="muted" id="count" role="status">{{ entries|length }} of {{ entries|length }} runs</p>
<p id="nothing" hidden>No run fits these filters.</p>
<ol class="runs">
{% for e in entries %}
<li class="run" data-phase="{{ e.phase }}" data-machine="{{ e.machine }}">
<div class="picture">{% if e.picture.png %}<img src="{{ e.picture.source }}" alt="{{ e.picture.alt }}">
{% else %}<p class="muted">{{ e.picture.alt or "no figure" }}</p>{% endif %}</div>
<div class="told">
<h2>{% if e.page %}<a href="{{ e.page }}">{{ e.phase }} · {{ e.machine }}</a>{% else %}{{ e.phase }} · {{ e.machine }}\
{% endif %}</h2>
<p><span class="state {{ e.tone }}">{{ e.status }}</span> <span class="muted"> · {{ e.when }}
{%- if e.redrawn_from %} · redrawn from {{ e.redrawn_from }}{% endif %}
{%- if e.received %} · received as {{ e.received }}{% endif %}</span></p>
{% if e.parts %}<ul>{% for part in e.parts %}<li>{{ part }}</li>{% endfor %}</ul>{% endif %}
<p class="links">{% if e.page %}<a href="{{ e.page }}">page</a> · {% endif %}
{% if e.notebook %}<a href="{{ e.notebook }}">notebook</a> · {% endif %}
<a href="{{ e.folder }}/">folder</a> <span class="muted">{{ e.folder }}</span></p>
</div>
</li>
{% endfor %}
</ol>
{% else %}
<p id="count">No runs yet. <code>make phase0</code> makes the first one, <code>make share</code> this list again.</p>
{% endif %}
</main>
"""

_STYLE = """
.filters{display:flex;flex-wrap:wrap;gap:.7rem 1.2rem}
.filters label{display:flex;gap:.45rem;align-items:center;max-width:100%}
.filters select,.filters input{min-width:0;flex:0 1 auto}
.runs{list-style:none;margin:0;padding:0}
.run{display:grid;grid-template-columns:17.5rem minmax(0,1fr);gap:1.4rem;padding:1.2rem 0;
border-top:1px solid var(--line)}
.picture img{display:block;width:100%;height:auto;background:#fff;border-radius:6px}
.picture p{margin:0;padding:1.2rem 1rem;border:1px dashed var(--edge);border-radius:6px;overflow-wrap:anywhere}
.told{overflow-wrap:anywhere}
.told h2{margin:0 0 .2rem;font-size:1.15rem}
.told p{margin:0}.told ul{margin:.4rem 0;padding-left:1.2rem;list-style:disc}
.links{font-size:.9rem}
@media (max-width:44rem){.run{grid-template-columns:minmax(0,1fr);gap:.8rem}.picture{max-width:22rem}}
"""

_SCRIPT = """
document.addEventListener("DOMContentLoaded", () => {
  const of = (id) => document.getElementById(id), runs = [...document.querySelectorAll(".run")];
  if (!runs.length) return;
  const words = runs.map((run) => run.querySelector(".told").textContent.toLowerCase());
  const filter = () => {
    const wanted = of("text").value.toLowerCase().split(/\\s+/).filter(Boolean);
    let shown = 0;
    runs.forEach((run, i) => {
      const fits = ["phase", "machine"].every((key) => !of(key).value || of(key).value === run.dataset[key]);
      run.hidden = !(fits && wanted.every((word) => words[i].includes(word)));
      shown += !run.hidden;
    });
    of("count").textContent = shown + " of " + runs.length + " runs";
    of("nothing").hidden = shown > 0;
  };
  for (const key of ["phase", "machine", "text"]) of(key).addEventListener("input", filter);
  of("filters").hidden = false;
  filter();
});
"""


def html(entries: list[Entry]) -> str:
    """The whole page, entries in the order given."""
    body = web.render(
        _BODY,
        entries=entries,
        phases=sorted({entry.phase for entry in entries}),
        machines=sorted({entry.machine for entry in entries}),
    )
    return web.document("Block-Shock runs", body, style=_STYLE, script=_SCRIPT)
