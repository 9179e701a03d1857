"""What every page of ours shares: colours of both schemes, the style, the theme switch, and a whole document with its
policy. A page fetches nothing, and a browser runs no script of it but ours: the policy names ours by its digest.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

# name -> light, dark. Text colours reach 4.5:1 (WCAG AA) on each of GROUNDS; the tests compute it.
TOKENS = {
    "paper": ("#ffffff", "#14181d"),
    "panel": ("#f4f6f8", "#1d232a"),
    "line": ("#d0d7de", "#3a434e"),
    "edge": ("#6b7480", "#8b949e"),
    "ink": ("#1c2026", "#e6e9ed"),
    "muted": ("#535c66", "#a8b1bb"),
    "link": ("#0a55ab", "#84bdff"),
    "good": ("#12622f", "#79d492"),
    "bad": ("#a8201a", "#ff968d"),
    "warn": ("#7d4a00", "#efbb66"),
    "keyword": ("#7428a8", "#d6b0ff"),
    "text": ("#0b5f3a", "#8fdcae"),
    "number": ("#0a50a0", "#8cc4ff"),
    "comment": ("#56606b", "#a2acb7"),
    "name": ("#7a4300", "#f2bd78"),
}
GROUNDS = ("paper", "panel")

_STYLE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.wide{max-width:72rem;margin:0 auto;padding:0 1.25rem 4rem}
h1,h2,h3,h4,h5,h6{line-height:1.25;margin:1.6em 0 .5em;overflow-wrap:anywhere}
h1{font-size:1.75rem;margin-top:.6em}h2{font-size:1.3rem}h3{font-size:1.1rem}h4,h5,h6{font-size:1rem}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
code,pre{font:.875rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
.bar{display:flex;flex-wrap:wrap;gap:.5rem;align-items:center;justify-content:space-between;padding:.75rem 0;
border-bottom:1px solid var(--line);color:var(--muted)}
.tools{display:flex;flex-wrap:wrap;gap:.5rem}
button,select,input{font:inherit;font-size:.9rem;color:var(--ink);background:var(--panel);border:1px solid var(--edge);
border-radius:6px;padding:.3rem .7rem;min-height:2.25rem;max-width:100%}
button{cursor:pointer}
[hidden]{display:none!important}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:.5rem;background:var(--panel);padding:.5rem 1rem}
.muted{color:var(--muted)}
.verdict{background:var(--panel);border:1px solid var(--line);border-left:5px solid var(--edge);border-radius:6px;
padding:.8rem 1.1rem;margin:1rem 0}
.verdict p{margin:0;overflow-wrap:anywhere}.verdict ul,.verdict p.muted{margin:.4rem 0 0}
.verdict ul{padding-left:1.2rem}
.verdict.good{border-left-color:var(--good)}.verdict.bad{border-left-color:var(--bad)}
.verdict.warn{border-left-color:var(--warn)}
.state{font-weight:700}
.state.good{color:var(--good)}.state.bad{color:var(--bad)}.state.warn{color:var(--warn)}
@media print{.tools,.skip{display:none}.wide{max-width:none}}
"""

_THEME = """
"use strict";
(() => {
  const root = document.documentElement, kinds = ["system", "light", "dark"];
  let kind = "system";
  try { kind = localStorage.getItem("blockshock-theme") || kind; } catch (none) { /* storage is off: not remembered */ }
  const apply = () => {
    if (!kinds.includes(kind)) kind = "system";
    if (kind === "system") root.removeAttribute("data-theme"); else root.dataset.theme = kind;
  };
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme"), say = () => { button.textContent = "Theme: " + kind; };
    say();
    button.hidden = false;
    button.addEventListener("click", () => {
      kind = kinds[(kinds.indexOf(kind) + 1) % kinds.length];
      apply();
      say();
      try { localStorage.setItem("blockshock-theme", kind); } catch (none) { /* as above */ }
    });
  });
})();
"""

_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{{ title }}</title>
<style>{{ style }}</style>
<script>{{ script }}</script>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<div class="wide">
{{ body }}
</div>
</body>
</html>
"""

_environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render(template: str, **values: object) -> Markup:
    """A jinja template filled in. Every value is escaped but one that is Markup already."""
    return Markup(_environment.from_string(template).render(**values))


def document(title: str, body: Markup, *, style: str, script: str) -> str:
    """A whole HTML page. `style` and `script` are constants of ours, added to what all pages share; `body` has a button
    with the id `theme` and an element with the id `main`.
    """
    style, script = _schemes() + _STYLE + style, _THEME + script
    policy = "; ".join(
        [
            *("default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"),
            f"style-src 'sha256-{_sha256(style)}'",
            f"script-src 'sha256-{_sha256(script)}'",
        ]
    )
    given = dict(policy=Markup(policy), style=Markup(style), script=Markup(script), body=body)
    return str(render(_DOCUMENT, title=title, **given))


def _schemes() -> str:
    # The dark colours twice: as the system's wish, unless the switch says light; and as the switch's.
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in TOKENS.items()) for i in (0, 1))
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def tone(status: str, verdict: str) -> str:
    """The colour of a run: good, bad, warn, or none of them while there is nothing to say."""
    if status in ("failed", "damaged") or "FAIL" in verdict:
        return "bad"
    if status == "interrupted":
        return "warn"
    return "good" if "PASS" in verdict else ""


def moment(text: object) -> str:
    """An ISO time of a manifest as people read it, "2026-11-20 15:57 UTC"; whatever else it is, as it is."""
    try:
        return f"{dt.datetime.fromisoformat(str(text)).astimezone(dt.UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError):
        return str(text)
