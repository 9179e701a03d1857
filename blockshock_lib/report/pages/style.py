"""Style and script of a notebook's page: what it adds to that of all pages (web.py)."""

STYLE = """
.cell{margin:1rem 0;overflow-wrap:break-word}
.prose p,.prose li{max-width:46rem}
.prose code{background:var(--panel);border-radius:4px;padding:.1em .3em}
.prose pre code{padding:0}
nav ol{columns:2 18rem;margin:0;padding-left:1.6rem}
nav li{break-inside:avoid}
blockquote{margin:1rem 0;padding-left:1rem;border-left:4px solid var(--line)}
details.code{border:1px solid var(--line);border-radius:6px;background:var(--panel)}
summary{cursor:pointer;padding:.35rem .8rem;font-size:.9rem}
details.code[open] summary{border-bottom:1px solid var(--line)}
pre{margin:0;padding:.7rem .8rem;overflow-x:auto;background:var(--panel);border-radius:6px}
.said{white-space:pre-wrap;overflow-wrap:anywhere}
.label{margin:.6rem 0 .2rem;font-size:.85rem;color:var(--muted)}
.label.error{color:var(--bad);font-weight:700}
pre.aside{border-left:4px solid var(--warn)}
pre.error{border-left:4px solid var(--bad)}
.output{margin:.7rem 0}
.output img,.prose img{display:block;max-width:100%;height:auto;background:#fff;border-radius:6px}
.note{color:var(--muted)}
.heading{font-weight:700}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;margin:.3rem 0}
th,td{padding:.3rem .7rem;border-bottom:1px solid var(--line);vertical-align:top;text-align:left}
.dataframe td{text-align:right}
.short{white-space:nowrap}
.long{min-width:18rem}
.dataframe .left,.left td,.left th{text-align:left}
.dataframe .right,.right th,.right td{text-align:right}
.dataframe .center,.center th,.center td{text-align:center}
thead th{border-bottom:2px solid var(--edge);vertical-align:bottom}
tbody tr:nth-child(even){background:var(--panel)}
dt{font-weight:700}
.k,.kc,.kd,.kn,.kp,.kr,.kt,.ow{color:var(--keyword)}
.s,.s1,.s2,.sa,.sb,.sc,.sd,.se,.sh,.si,.sr,.ss,.sx,.dl{color:var(--text)}
.m,.mb,.mf,.mh,.mi,.mo,.il{color:var(--number)}
.c,.c1,.ch,.cm,.cp,.cs{color:var(--comment);font-style:italic}
.nf,.nc,.nd,.fm{color:var(--name)}
.nb,.bp{color:var(--link)}
[class*=ansi-red]{color:var(--bad)}
[class*=ansi-green]{color:var(--good)}
[class*=ansi-yellow]{color:var(--warn)}
[class*=ansi-blue],[class*=ansi-cyan]{color:var(--link)}
[class*=ansi-magenta]{color:var(--keyword)}
.ansi-bold{font-weight:700}
.ansi-underline{text-decoration:underline}
@media print{details.code:not([open]){display:none}}
"""

SCRIPT = """
document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("code"), all = [...document.querySelectorAll("details.code")];
  const folded = () => all.some((one) => !one.open);
  const say = () => { button.textContent = folded() ? "Show all code" : "Hide all code"; };
  if (!all.length) return;
  say();
  button.hidden = false;
  button.addEventListener("click", () => {
    const open = folded();
    for (const one of all) one.open = open;
    say();
  });
  for (const one of all) one.addEventListener("toggle", say);
});
"""
