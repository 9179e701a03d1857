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
document.addEventListener("DOMContentLoaded", () => {
  const of = (id) => document.getElementById(id), runs = [...document.querySelectorAll(".run")];
  if (!runs.length) return;
  const words = runs.map((run) => run.querySelector(".told").textContent.toLowerCase());
  const filter = () => {
    const wanted = of("text").value.toLowerCase().split(/\s+/).filter(Boolean);
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
