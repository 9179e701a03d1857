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
  document.documentElement.classList.add("js");  // without it no button opens what is hidden
  say();
  button.hidden = false;
  button.addEventListener("click", () => {
    const open = folded();
    for (const one of all) one.open = open;
    say();
  });
  for (const one of all) one.addEventListener("toggle", say);
});
// The list of runs: filters and order, which the address keeps.
document.addEventListener("DOMContentLoaded", () => {
  const of = (id) => document.getElementById(id), runs = [...document.querySelectorAll(".run")];
  if (!runs.length) return;
  const keys = ["phase", "machine", "sort", "text"], words = runs.map((run) => run.querySelector(".told").textContent.toLowerCase());
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const key of keys) if (asked.has(key)) of(key).value = asked.get(key);
  const order = (by) => (a, b) => {
    const [i, j] = [runs.indexOf(a), runs.indexOf(b)];
    if (by === "when" || by === "oldest") return (by === "when" ? 1 : -1) * (b.dataset.when - a.dataset.when) || i - j;
    return by ? a.dataset[by].localeCompare(b.dataset[by]) || i - j : i - j;
  };
  const filter = () => {
    const wanted = of("text").value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    runs.forEach((run, i) => {
      const fits = ["phase", "machine"].every((key) => !of(key).value || of(key).value === run.dataset[key]);
      run.hidden = !(fits && wanted.every((word) => words[i].includes(word)));
      shown += !run.hidden;
    });
    for (const group of document.querySelectorAll(".group")) {
      const list = group.querySelector(".runs");
      list.append(...[...list.children].sort(order(of("sort").value)));
      group.hidden = [...list.children].every((run) => run.hidden);
    }
    of("count").textContent = shown + " of " + runs.length + " runs";
    of("nothing").hidden = shown > 0;
    const state = new URLSearchParams(keys.filter((key) => of(key).value).map((key) => [key, of(key).value]));
    if (String(state) !== location.hash.slice(1)) location.replace("#" + state);
  };
  for (const key of keys) of(key).addEventListener("input", filter);
  of("filters").hidden = false;
  filter();
});
// Tables: sort by a click on a header, filter, copy as CSV, and a fold of those of more than 20 rows.
document.addEventListener("DOMContentLoaded", () => {
  const MOST = 20, collator = new Intl.Collator("en", { numeric: true });
  const make = (tag, props) => Object.assign(document.createElement(tag), props);
  const text = (cell) => cell.textContent.trim();
  // "-1.2e-5 [..]", "1,234", "4096x4096": the number that a text begins with; what has none comes last.
  const number = (word) => parseFloat(word.replace(/,(?=\d{3})/g, "").replace("−", "-").replace(/^[~<>≤≥+ ]+/, ""));
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
    return x - y || collator.compare(a, b);
  };
  const field = (word) => (/^[-+]?[\d,]+(\.\d+)?$/.test(word) ? word.replaceAll(",", "") : word);
  const csv = (rows) => rows.map((row) => [...row.cells].map((cell) => '"' + field(text(cell)).replaceAll('"', '""') + '"')
    .join(",")).join("\r\n") + "\r\n";
  const tables = [...document.querySelectorAll("main .scroll.table > table")].filter((table) => table.tHead && table.tBodies[0]);
  for (const table of tables) {
    const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
    if (table.tHead.rows.length > 1 || rows.some((row) => row.cells.length !== heads.length)) continue;
    const bar = make("div", { className: "tablebar" }), said = make("span", { className: "muted" });
    said.setAttribute("role", "status");
    let wanted = [], open = rows.length <= MOST, flat = false;
    // What a fold leaves: the last case, which is the largest, by as many of the first columns as make it short.
    const alike = (n) => rows.filter((row) => [...row.cells].slice(0, n).every((cell, i) => text(cell) === text(rows.at(-1).cells[i])));
    const some = [1, 2, 3].map(alike).find((one) => one.length <= MOST) ?? [];
    const kept = new Set(some.length > 1 ? some : rows.slice(0, MOST));
    const fold = make("button", { type: "button", hidden: open });
    const show = () => {
      let shown = 0;
      const now = [...body.rows], plain = !flat && !wanted.length;
      now.forEach((row, i) => {
        const words = row.textContent.toLowerCase(), bare = words.replaceAll(",", "");
        row.hidden = !wanted.every((word) => words.includes(word) || bare.includes(word));
        row.classList.toggle("folded", !open && !wanted.length && !(plain ? kept.has(row) : i < MOST));
        shown += !row.hidden && !row.classList.contains("folded");
      });
      said.textContent = shown < rows.length ? shown + " of " + rows.length + " rows" : "";
      fold.textContent = open ? "Show fewer" : "Show all " + rows.length;
    };
    fold.addEventListener("click", () => { open = !open; show(); });
    if (rows.length > 7) {
      const filter = make("input", { type: "search", placeholder: "Filter rows", autocomplete: "off" });
      filter.setAttribute("aria-label", "Filter rows");
      filter.addEventListener("input", () => { wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean); show(); });
      bar.append(filter);
    }
    if (rows.length > 1) {
      const copy = make("button", { type: "button", textContent: "Copy CSV" });
      copy.addEventListener("click", async () => {
        const made = csv([table.tHead.rows[0], ...[...body.rows].filter((row) => !row.hidden)]);
        try { await navigator.clipboard.writeText(made); } catch (none) {
          const area = make("textarea", { value: made });
          document.body.append(area);
          area.select();
          document.execCommand("copy");
          area.remove();
        }
        copy.textContent = "Copied";
        setTimeout(() => { copy.textContent = "Copy CSV"; }, 1500);
      });
      bar.append(copy, fold, said);
      heads.forEach((head, place) => {
        const button = make("button", { type: "button", textContent: text(head) });
        head.replaceChildren(button);
        button.addEventListener("click", () => {
          const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
          for (const other of heads) other.removeAttribute("aria-sort");
          head.setAttribute("aria-sort", down ? "descending" : "ascending");
          const words = new Map(rows.map((row) => [row, text(row.cells[place])]));
          const none = (row) => /^[–…]?$/.test(words.get(row));
          rows.sort((a, b) => none(a) - none(b) || sign * compare(words.get(a), words.get(b)));
          body.append(...rows);
          flat = true;
          table.classList.add("flat");
          show();
        });
      });
      table.parentElement.before(bar);
    }
    show();
  }
  const all = document.getElementById("csv");
  if (!all || !tables.length) return;
  all.hidden = false;
  all.addEventListener("click", () => {
    const made = tables.map((table) => csv([...table.rows])).join("\r\n");
    const link = make("a", { href: URL.createObjectURL(new Blob([made], { type: "text/csv" })), download: document.title + ".csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
});
