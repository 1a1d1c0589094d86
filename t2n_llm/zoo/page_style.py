"""How the zoo's page looks and what its filter does; both are put into the page."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --soft: #667; --rule: #dde1e6; --panel: #f6f7f9;
  --right: #2e8b57; --wrong: #c8442f; --failed: #d98a1f; --killed: #8a4fbf; --none: #9aa3ad;
  --right-soft: #e2f3e9; --wrong-soft: #fbe3de; --failed-soft: #fcefd9; --killed-soft: #efe4f8; --none-soft: #eef0f2;
  --f32: #2f6fd0; --f16: #b0479a; --q4_0: #1f9a8a; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15181c; --text: #e4e7ea; --soft: #98a2ad; --rule: #2c323a; --panel: #1d2126;
    --right: #4fb87f; --wrong: #e8705c; --failed: #e5a54a; --killed: #b58be0; --none: #6f7983;
    --right-soft: #1b3326; --wrong-soft: #3c201b; --failed-soft: #38290f; --killed-soft: #2d2138; --none-soft: #23282e;
    --f32: #74a7f5; --f16: #e08acd; --q4_0: #58cbbb; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { margin: 0; font-size: 26px; } h2 { font-size: 18px; margin: 0 0 10px; }
header p { margin: 4px 0 0; color: var(--soft); } section { margin-top: 30px; }
small { color: var(--soft); } code { font: 13px ui-monospace, monospace; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 14px; }
.card { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: 14px 16px; }
.card h2 { margin: 0; } .card p { margin: 4px 0 10px; } .card b { font-size: 22px; }
.card .legend { margin: 8px 0 0; font-size: 12px; color: var(--soft); }
.bar { display: flex; gap: 2px; height: 10px; border-radius: 5px; overflow: hidden; }
i.right { background: var(--right); } i.wrong { background: var(--wrong); } i.failed { background: var(--failed); }
i.timeout, i.memory, i.crashed { background: var(--killed); } i.not-runnable { background: var(--none); }
.trend { width: 100%; max-width: 760px; font-size: 11px; } .trend text { fill: var(--soft); }
.trend .grid { stroke: var(--rule); } .trend polyline { fill: none; stroke-width: 2; }
.f32 polyline { stroke: var(--f32); } .f32 circle, .line.f32 text { fill: var(--f32); }
.f16 polyline { stroke: var(--f16); } .f16 circle, .line.f16 text { fill: var(--f16); }
.q4_0 polyline { stroke: var(--q4_0); } .q4_0 circle, .line.q4_0 text { fill: var(--q4_0); }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: 5px 10px; vertical-align: top; }
thead th { color: var(--soft); font-weight: 600; font-size: 13px; } tbody tr { border-top: 1px solid var(--rule); }
#zoo thead th { position: sticky; top: 0; background: var(--back); }
th small, .cell small { display: block; font-weight: 400; font-size: 12px; }
.cell { white-space: nowrap; font-variant-numeric: tabular-nums; border-left: 3px solid transparent; }
.cell.right { background: var(--right-soft); border-color: var(--right); }
.cell.wrong { background: var(--wrong-soft); border-color: var(--wrong); }
.cell.failed { background: var(--failed-soft); border-color: var(--failed); }
.cell.timeout, .cell.memory, .cell.crashed { background: var(--killed-soft); border-color: var(--killed); }
.cell.not-runnable { background: var(--none-soft); border-color: var(--none); color: var(--soft); }
.message { font-size: 13px; overflow-wrap: anywhere; } .message p { margin: 0 0 4px; }
.kind { font-size: 12px; border-radius: 4px; padding: 1px 7px; background: var(--none-soft); }
.kind.fixed { background: var(--right-soft); color: var(--right); }
.kind.broken { background: var(--wrong-soft); color: var(--wrong); }
.kind.moved { background: var(--failed-soft); color: var(--failed); }
details { color: var(--soft); font-size: 12px; } details table { width: auto; }
details td, details th { padding: 1px 10px; white-space: nowrap; }
#zoo th, .cell { width: 1%; } #zoo > thead th:last-child { width: auto; }
@media (max-width: 700px) { section { overflow-x: auto; } }
details tr { border: 0; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
details td.ended { white-space: nowrap; }
details.changes, details.changes table { color: inherit; font-size: inherit; width: 100%; }
details.changes td, details.changes th { padding: 5px 10px; white-space: normal; }
details.changes tr { border-top: 1px solid var(--rule); }
.filter { display: flex; flex-wrap: wrap; gap: 16px; align-items: center; }
input[type=search] { width: 300px; max-width: 100%; padding: 6px 10px; font: inherit; color: inherit;
  background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; }
"""

SCRIPT = """
const find = document.getElementById('find'), failing = document.getElementById('failing');
const rows = [...document.querySelectorAll('#zoo > tbody > tr')];
function show() {
  const words = find.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = (failing.checked && row.classList.contains('all-right')) || !words.every(word => text.includes(word));
  }
}
find.addEventListener('input', show); failing.addEventListener('change', show);
"""
