"""The look of the HTML report: its style sheet and the few lines of script that open and filter rows.

Kept apart from `report_html.py`, which fills the page. No file or font from elsewhere is named: the page stands alone.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #f6f7f9; --card: #ffffff; --ink: #1b2330; --soft: #5d6878; --line: #dde2ea; --code: #eef1f5; --link: #1f5fbf;
  --ok: #1a7f4b; --ok-bg: #dff3e7; --failed: #b3261e; --failed-bg: #fbe4e2; --covered: #3f6d94; --covered-bg: #e3edf7;
  --idle: #69727f; --idle-bg: #eceff3;
  --capture: #7757b8; --translate: #2f74c0; --write: #2b8f8f; --load: #5f9a35; --run: #c07a1c; --compare: #bb4f7c;
}
@media (prefers-color-scheme: dark) {
  :root:not([data-theme="light"]) {
    --bg: #12161c; --card: #1a2029; --ink: #e4e9f0; --soft: #9aa6b5; --line: #2d3642; --code: #232b36; --link: #7fb2ff;
    --ok: #6fd19c; --ok-bg: #173526; --failed: #ff9a91; --failed-bg: #45201f; --covered: #94bfe6; --covered-bg: #1d3247;
    --idle: #98a3b1; --idle-bg: #262e39;
    --capture: #a98be0; --translate: #6ba5e8; --write: #5cc0c0; --load: #8ec664; --run: #e2a24c; --compare: #e283ab;
  }
}
:root[data-theme="light"] { color-scheme: light; }
:root[data-theme="dark"] {
  color-scheme: dark;
  --bg: #12161c; --card: #1a2029; --ink: #e4e9f0; --soft: #9aa6b5; --line: #2d3642; --code: #232b36; --link: #7fb2ff;
  --ok: #6fd19c; --ok-bg: #173526; --failed: #ff9a91; --failed-bg: #45201f; --covered: #94bfe6; --covered-bg: #1d3247;
  --idle: #98a3b1; --idle-bg: #262e39;
  --capture: #a98be0; --translate: #6ba5e8; --write: #5cc0c0; --load: #8ec664; --run: #e2a24c; --compare: #e283ab;
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 1340px; margin: 0 auto; padding: 28px 24px 64px; }
header { display: flex; gap: 16px; align-items: flex-start; justify-content: space-between; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 12px; }
h3 { font-size: 13px; margin: 14px 0 4px; color: var(--soft); font-weight: 600; }
p { margin: 4px 0; }
a { color: var(--link); }
code, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.88em; }
code { background: var(--code); border-radius: 4px; padding: 1px 5px; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0 14px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 9px 16px; min-width: 104px; }
.tile b { display: block; font-size: 21px; line-height: 1.25; }
.tile span { color: var(--soft); font-size: 13px; }
.bar { display: flex; height: 10px; border-radius: 5px; overflow: hidden; background: var(--idle-bg); }
.bar i { display: block; height: 100%; min-width: 3px; }
.bar i + i { border-left: 1px solid var(--card); }
.s-ok { background: var(--ok); } .s-failed { background: var(--failed); } .s-covered { background: var(--covered); }
.s-idle { background: var(--idle); opacity: 0.55; }
.pill { display: inline-block; border-radius: 999px; padding: 1px 10px; font-size: 13px; font-weight: 600; white-space: nowrap; }
.p-ok { color: var(--ok); background: var(--ok-bg); } .p-failed { color: var(--failed); background: var(--failed-bg); }
.p-covered { color: var(--covered); background: var(--covered-bg); } .p-idle { color: var(--idle); background: var(--idle-bg); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; margin: 10px 0; }
.fault { border-left: 4px solid var(--failed); }
.fault .sentence { font-size: 16px; font-weight: 600; margin: 0 0 6px; overflow-wrap: anywhere; }
.error { margin: 8px 0 2px; color: var(--failed); overflow-wrap: anywhere; }
.hint { margin: 2px 0 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 8px 0 0; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.tools { display: flex; flex-wrap: wrap; gap: 10px; align-items: center; margin-bottom: 10px; }
input[type="search"] { flex: 1 1 220px; max-width: 340px; padding: 6px 10px; border: 1px solid var(--line); border-radius: 7px;
  background: var(--card); color: var(--ink); font: inherit; }
button { padding: 5px 12px; border: 1px solid var(--line); border-radius: 7px; background: var(--card); color: var(--ink);
  font: inherit; font-size: 14px; cursor: pointer; }
button:hover, button[aria-pressed="true"] { background: var(--covered-bg); }
:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; }
table.tree { min-width: 980px; }
.tree > thead > tr > th, .tree > tbody > tr.piece > td { padding-left: 9px; padding-right: 9px; }
th { text-align: left; font-size: 13px; font-weight: 600; color: var(--soft); padding: 8px 12px;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
td { padding: 6px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child > td { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.piece { cursor: pointer; }
tr.piece:hover > td { background: var(--code); }
tr.piece.failed > td:first-child { box-shadow: inset 4px 0 0 var(--failed); }
.name { display: flex; gap: 6px; align-items: baseline; padding-left: calc(var(--level) * 16px); }
.name button { border: 0; background: none; padding: 0 2px; color: var(--soft); font-size: 12px; width: 16px; flex: none; }
.name b { font-weight: 600; white-space: nowrap; }
.where { font-size: 13px; overflow-wrap: anywhere; min-width: 170px; }
.line { font-size: 13px; white-space: nowrap; }
.clock { display: inline-block; width: 44px; height: 6px; border-radius: 3px; background: var(--idle-bg);
  overflow: hidden; margin-right: 8px;
  vertical-align: middle; text-align: left; }
.clock i { display: block; height: 100%; background: var(--translate); }
tr.detail > td { background: var(--code); padding: 8px 18px 18px 40px; }
tr.detail code { background: var(--card); }
.script tr.detail:not(.open) { display: none; }
tr.hidden { display: none; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 0 32px; }
.facts > div { min-width: 0; }
ul { margin: 2px 0; padding-left: 18px; } li { overflow-wrap: anywhere; }
ul.plain { list-style: none; padding: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 340px; overflow-y: auto; margin: 4px 0;
  padding: 10px 12px; background: var(--card);
  border: 1px solid var(--line); border-radius: 7px; font-size: 12.5px; }
.stages { height: 14px; max-width: 560px; }
.legend { display: flex; flex-wrap: wrap; gap: 3px 14px; font-size: 13px; color: var(--soft); margin-top: 5px; }
.legend i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px; }
.inner { width: auto; min-width: 50%; } .inner th, .inner td { padding: 3px 14px 3px 0; font-size: 13px; }
.inner tr:last-child td { border-bottom: 0; }
.bad { color: var(--failed); font-weight: 600; }
footer { margin-top: 36px; font-size: 13px; color: var(--soft); }
@media print { .tools, #theme { display: none; } body { background: #fff; } }
"""

# Without script all details are open, and nothing is missing.
SCRIPT = """
(function () {
  const root = document.documentElement;
  root.classList.add("script");
  const rows = Array.from(document.querySelectorAll("tr.piece"));
  const detail = (row) => document.getElementById(row.id + "-detail");
  function open(row, wanted) {
    detail(row).classList.toggle("open", wanted);
    const button = row.querySelector("button");
    button.setAttribute("aria-expanded", String(wanted));
    button.textContent = wanted ? "\\u25be" : "\\u25b8";
  }
  rows.forEach((row) => row.addEventListener("click", (event) => {
    if (event.target.closest("a")) return;
    open(row, !detail(row).classList.contains("open"));
  }));
  const search = document.getElementById("search"), failed = document.getElementById("failed");
  function filter() {
    const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
    const only = failed.getAttribute("aria-pressed") === "true";
    let shown = 0;
    rows.forEach((row) => {
      const fits = (!only || row.classList.contains("failed")) && words.every((word) => row.dataset.text.includes(word));
      row.classList.toggle("hidden", !fits);
      detail(row).classList.toggle("hidden", !fits);
      shown += fits;
    });
    document.getElementById("shown").textContent = shown === rows.length ? "" : shown + " of " + rows.length + " shown";
  }
  search.addEventListener("input", filter);
  failed.addEventListener("click", () => {
    failed.setAttribute("aria-pressed", String(failed.getAttribute("aria-pressed") !== "true"));
    filter();
  });
  const all = document.getElementById("all");
  all.addEventListener("click", () => {
    const wanted = all.textContent === "Open all";
    rows.forEach((row) => open(row, wanted));
    all.textContent = wanted ? "Close all" : "Open all";
  });
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  function follow() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.classList.contains("piece")) { open(target, true); target.scrollIntoView({ block: "center" }); }
  }
  addEventListener("hashchange", follow);
  follow();
})();
"""

__all__ = ["SCRIPT", "STYLE"]
