"""A diagnosis as one self-contained HTML file: the faults, then the tree of pieces with errors, source lines and timings.

In: a `Diagnosis`. Out: text of a page that needs no other file, no network and no script to be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from generic_export.diagnose.records import (
    Culprit,
    Diagnosis,
    ErrorRecord,
    Leaf,
    Metrics,
    Outcome,
    Piece,
    Stage,
    Verdict,
)
from generic_export.diagnose.report.report_page import SCRIPT, STYLE

# outcome -> (class of its colours, sign for those who do not see colours)
_LOOKS = {
    Outcome.OK: ("ok", "✓"),
    Outcome.FAILED: ("failed", "✗"),
    Outcome.COVERED: ("covered", "⊂"),
    Outcome.NOT_EXERCISED: ("idle", "–"),
    Outcome.NOT_TRIED: ("idle", "…"),
}
_FAILS = {
    Stage.CAPTURE: "cannot be captured",
    Stage.TRANSLATE: "cannot be translated",
    Stage.WRITE: "cannot be written",
    Stage.LOAD: "is refused by the engine",
    Stage.RUN: "fails in the engine",
    Stage.COMPARE: "computes something else than PyTorch",
    None: "fails",
}
_MOST_PATHS = 12


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as a web page."""
    title = f"Diagnosis of {diagnosis.model}"
    body = "\n".join(
        part
        for part in (
            _header(diagnosis, title),
            _overview(diagnosis),
            _faults(diagnosis.culprits(), _anchors(diagnosis)),
            _pieces(diagnosis),
            _axes(diagnosis),
            _list_section("Never called", diagnosis.unexercised, mono=True),
            _list_section("Warnings", (*diagnosis.axes.warnings, *diagnosis.warnings)),
            _footer(diagnosis),
        )
        if part
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def write_html(diagnosis: Diagnosis, path: Path) -> Path:
    """Write `diagnosis_html` to a file, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(diagnosis_html(diagnosis), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


# --- the top --------------------------------------------------------------------------------------


def _header(diagnosis: Diagnosis, title: str) -> str:
    return (
        f"<header><div><h1>{escape(title)}</h1>"
        f'<p class="soft">for {escape(diagnosis.target)}, strategy <b>{escape(diagnosis.strategy)}</b>, '
        f"{_seconds(diagnosis.seconds)}</p></div>"
        '<button id="theme" type="button" title="Light or dark">◐</button></header>'
    )


def _overview(diagnosis: Diagnosis) -> str:
    counts = {outcome: sum(verdict.outcome is outcome for verdict in diagnosis.verdicts) for outcome in Outcome}
    faults = len(diagnosis.culprits())
    if diagnosis.interrupted:
        verdict = _pill("failed" if faults else "idle", "interrupted: not everything was tried")
    elif faults:
        verdict = _pill("failed", f"✗ {faults} fault{'s' if faults > 1 else ''}")
    else:
        verdict = (
            _pill("ok", "✓ everything that was tried passes") if diagnosis.ok else _pill("idle", "nothing was tried")
        )
    modules = sum(len(piece.paths) for piece in diagnosis.pieces)
    tiles = [("pieces", len(diagnosis.pieces)), ("modules", modules), ("faults", faults)]
    tiles += [(str(outcome), count) for outcome, count in counts.items() if count]
    bar = "".join(
        f'<i class="s-{_LOOKS[outcome][0]}" style="flex:{count}" title="{outcome}: {count}"></i>'
        for outcome, count in counts.items()
        if count
    )
    shown = "".join(f'<div class="tile"><b>{count}</b><span>{escape(name)}</span></div>' for name, count in tiles)
    return f'<p>{verdict}</p><div class="tiles">{shown}</div><div class="bar">{bar}</div>'


def _faults(culprits: Sequence[Culprit], anchors: dict[str, str]) -> str:
    if not culprits:
        return ""
    cards = "\n".join(_fault(number, culprit, anchors) for number, culprit in enumerate(culprits, 1))
    return f"<h2>Faults</h2>\n{cards}"


def _fault(number: int, culprit: Culprit, anchors: dict[str, str]) -> str:
    verdict = culprit.verdict
    what = f" at <code>{escape(verdict.operator)}</code>" if verdict.operator else ""
    own = ", in its own code" if culprit.own_code else ""
    facts: list[tuple[str, str]] = [
        ("where", ", ".join(_piece_link(piece, anchors) for piece in culprit.pieces)),
        ("line", _code(culprit.source)),
        ("unsupported", _codes(verdict.unsupported)),
        ("worst error", _worst_text(verdict)),
        ("try", "<br>".join(escape(suggestion) for suggestion in verdict.suggestions)),
        ("reproduction", _code(verdict.repro_path)),
    ]
    return (
        f'<section class="card fault"><p class="sentence">{number}. {escape(culprit.piece.label)} '
        f"{_FAILS[verdict.stage]}{what}{own}</p>{_error(verdict.error)}{_definitions(facts)}</section>"
    )


def _piece_link(piece: Piece, anchors: dict[str, str]) -> str:
    more = f" and {len(piece.paths) - 1} more" if len(piece.paths) > 1 else ""
    return f'<a class="mono" href="#{anchors[piece.key]}">{escape(piece.path or "(root)")}</a>{more}'


def _error(error: ErrorRecord | None) -> str:
    if error is None:
        return ""
    hint = f'<p class="hint">{escape(error.hint)}</p>' if error.hint else ""
    return f'<p class="error"><b>{escape(error.kind)}</b>: {escape(error.message)}</p>{hint}'


# --- the tree -------------------------------------------------------------------------------------


def _anchors(diagnosis: Diagnosis) -> dict[str, str]:
    return {piece.key: f"p{number}" for number, piece in enumerate(diagnosis.pieces, 1)}


def _pieces(diagnosis: Diagnosis) -> str:
    anchors = _anchors(diagnosis)
    isolated = {verdict.key: verdict for verdict in diagnosis.isolated}
    longest = max((verdict.seconds for verdict in diagnosis.verdicts), default=0.0)
    rows = "\n".join(
        _row(level, piece, verdict, anchors[piece.key], longest) + _detail(piece, verdict, isolated, anchors[piece.key])
        for level, piece, verdict in diagnosis.tree()
    )
    return (
        '<h2>Pieces</h2>\n<div class="tools"><input id="search" type="search" placeholder="class, path, operator, line" '
        'aria-label="Filter the pieces"><button id="failed" type="button" aria-pressed="false">Failed only</button>'
        '<button id="all" type="button">Open all</button><span id="shown" class="soft"></span></div>\n'
        '<div class="scroll"><table class="tree"><thead><tr><th>piece</th><th>path</th><th>verdict</th><th>line</th>'
        '<th class="number">SNR</th><th class="number">time</th><th class="number">memory</th></tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _row(level: int, piece: Piece, verdict: Verdict, anchor: str, longest: float) -> str:
    look, sign = _LOOKS[verdict.outcome]
    stage = f": {verdict.stage}" if verdict.failed else ""
    more = f' <span class="soft">+{len(piece.paths) - 1}</span>' if len(piece.paths) > 1 else ""
    line = verdict.source or piece.source
    words = " ".join([piece.class_name, *piece.paths, verdict.operator, line, str(verdict.outcome), str(verdict.stage)])
    share = 100 * verdict.seconds / longest if longest else 0
    clock = f'<span class="clock"><i style="width:{share:.0f}%"></i></span>{_seconds(verdict.seconds)}'
    worst = verdict.worst
    snr = _decibel(worst) if worst is not None else ""
    return (
        f'<tr class="piece {look}" id="{anchor}" data-text="{escape(words.lower())}">'
        f'<td><div class="name" style="--level:{level}"><button type="button" aria-expanded="false" '
        f'aria-label="Details">▸</button><b>{escape(piece.label)}</b></div></td>'
        f'<td class="mono where">{_path(piece.path)}{more}</td>'
        f'<td>{_pill(look, f"{sign} {verdict.outcome}{stage}")}</td><td class="mono line">{escape(line)}</td>'
        f'<td class="number">{snr}</td><td class="number">{clock if verdict.seconds else ""}</td>'
        f'<td class="number">{_bytes(verdict.peak_rss) if verdict.peak_rss else ""}</td></tr>\n'
    )


def _detail(piece: Piece, verdict: Verdict, isolated: dict[str, Verdict], anchor: str) -> str:
    alone = isolated.get(piece.key)
    parts = [
        _error(verdict.error),
        _definitions(_verdict_facts(piece, verdict, alone)),
        _stage_times(verdict),
        _metrics_table(verdict.metrics),
        _signature(piece),
        _account(verdict.error),
    ]
    return f'<tr class="detail" id="{anchor}-detail"><td colspan="7">{"".join(parts)}</td></tr>'


def _verdict_facts(piece: Piece, verdict: Verdict, alone: Verdict | None) -> list[tuple[str, str]]:
    places = [_code(path or "(root)") for path in piece.paths[:_MOST_PATHS]]
    more = f" and {len(piece.paths) - _MOST_PATHS} more" if len(piece.paths) > _MOST_PATHS else ""
    return [
        ("tried", _code(verdict.path or "(root)") + (" (from an earlier run)" if verdict.cached else "")),
        ("members", " ".join(places) + more if len(piece.paths) > 1 else ""),
        ("operator", _code(verdict.operator)),
        ("line", _code(verdict.source)),
        ("defined", _code(piece.source)),
        ("unsupported", _codes(verdict.unsupported)),
        ("without its children", _alone(alone)),
        ("try", "<br>".join(escape(suggestion) for suggestion in verdict.suggestions)),
        ("reproduction", _code(verdict.repro_path)),
        ("engine", f"{verdict.engine_nodes} nodes after optimisation" if verdict.engine_nodes is not None else ""),
        ("notes", "<br>".join(escape(note) for note in (*piece.notes, *verdict.notes))),
    ]


def _alone(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    look, sign = _LOOKS[verdict.outcome]
    stage = f": {verdict.stage}" if verdict.failed else ""
    error = f" {escape(str(verdict.error))}" if verdict.error is not None else ""
    return _pill(look, f"{sign} {verdict.outcome}{stage}") + error


def _stage_times(verdict: Verdict) -> str:
    times = [(str(stage), verdict.stage_seconds[str(stage)]) for stage in Stage if str(stage) in verdict.stage_seconds]
    if not times:
        return ""
    total = sum(time for _, time in times) or 1.0
    bar = "".join(f'<i style="flex:{100 * time / total:.2f};background:var(--{stage})"></i>' for stage, time in times)
    legend = "".join(
        f'<span><i style="background:var(--{stage})"></i>{stage} {_seconds(time)}</span>' for stage, time in times
    )
    return f'<h3>Time by stage</h3><div class="bar stages">{bar}</div><div class="legend">{legend}</div>'


def _metrics_table(metrics: Sequence[Metrics]) -> str:
    if not metrics:
        return ""
    rows = "".join(
        f'<tr><td>{_code(entry.name)}</td><td class="number">{entry.set_index}</td>'
        f'<td class="number">{entry.max_abs:.3g}</td><td class="number">{entry.allowed:.3g}</td>'
        f'<td class="number">{entry.relative:.3g}</td><td class="number">{_decibel(entry)}</td>'
        f"<td>{_comparison(entry)}</td></tr>"
        for entry in metrics
    )
    return (
        '<h3>Compared with PyTorch</h3><table class="inner"><thead><tr><th>output</th><th class="number">set</th>'
        '<th class="number">max error</th><th class="number">allowed</th><th class="number">error / rms</th>'
        f'<th class="number">SNR</th><th></th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _comparison(entry: Metrics) -> str:
    told = escape(entry.reason)
    if entry.top1_agreement is not None:
        told += f" same arg max {entry.top1_agreement:.1%}"
    if entry.kl is not None:
        told += f" KL {entry.kl:.2g}"
    return told.strip() if entry.passed else f'<span class="bad">differs</span> {told}'.strip()


def _signature(piece: Piece) -> str:
    columns = [
        _leaves("Inputs", piece.inputs),
        _leaves("Outputs", piece.outputs),
        _items("Parameters", [_code(text) for text in piece.parameters], f"{piece.parameter_count:,} numbers"),
        _items("Configuration", [f"{_code(name)} {escape(value)}" for name, value in piece.attributes], ""),
    ]
    return f'<div class="facts">{"".join(columns)}</div>'


def _leaves(title: str, leaves: Iterable[Leaf]) -> str:
    def told(leaf: Leaf) -> str:
        marks = ["written in place"] if leaf.written else []
        marks += [f"is the input {leaf.alias_of}"] if leaf.alias_of else []
        return _code(str(leaf)) + (f' <span class="soft">{escape(", ".join(marks))}</span>' if marks else "")

    return _items(title, [told(leaf) for leaf in leaves], "")


def _items(title: str, items: Sequence[str], remark: str) -> str:
    if not items:
        return ""
    note = f' <span class="soft">({escape(remark)})</span>' if remark else ""
    return f'<div><h3>{title}{note}</h3><ul class="plain">{"".join(f"<li>{item}</li>" for item in items)}</ul></div>'


def _account(error: ErrorRecord | None) -> str:
    return f"<h3>Whole account</h3><pre>{escape(error.detail)}</pre>" if error is not None and error.detail else ""


# --- the end --------------------------------------------------------------------------------------


def _axes(diagnosis: Diagnosis) -> str:
    if not diagnosis.axes.symbols:
        return ""
    sets = max(len(sizes) for _, sizes in diagnosis.axes.symbols)
    headings = "".join(f'<th class="number">set {index}</th>' for index in range(sets))
    rows = "".join(
        f"<tr><td><b>{escape(name)}</b></td>"
        + "".join(f'<td class="number">{"" if size is None else size}</td>' for size in sizes)
        + f'<td class="where">{_used_by(diagnosis, name)}</td></tr>'
        for name, sizes in diagnosis.axes.symbols
    )
    return (
        f'<h2>Dynamic axes</h2><div class="scroll"><table><thead><tr><th>symbol</th>{headings}<th>inputs</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _used_by(diagnosis: Diagnosis, name: str) -> str:
    places = [f"{axis.leaf}[{axis.axis}]" for axis in diagnosis.axes.axes if axis.size == name]
    more = f" and {len(places) - _MOST_PATHS} more" if len(places) > _MOST_PATHS else ""
    return " ".join(map(_code, places[:_MOST_PATHS])) + more


def _list_section(title: str, lines: Sequence[str], *, mono: bool = False) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{_code(line) if mono else escape(line)}</li>" for line in lines)
    return f'<h2>{title}</h2><div class="card"><ul>{items}</ul></div>'


def _footer(diagnosis: Diagnosis) -> str:
    versions = ", ".join(f"{escape(name)} {escape(version)}" for name, version in diagnosis.versions.items())
    return f"<footer>{versions}</footer>" if versions else ""


# --- words ----------------------------------------------------------------------------------------


def _pill(look: str, text: str) -> str:
    return f'<span class="pill p-{look}">{escape(text)}</span>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>" if text else ""


def _path(path: str) -> str:
    """Return a path that breaks between names rather than within them."""
    return escape(path or "(root)").replace(".", ".<wbr>")


def _codes(texts: Iterable[str]) -> str:
    return "<br>".join(map(_code, texts))


def _definitions(facts: Iterable[tuple[str, str]]) -> str:
    def entries() -> Iterator[str]:
        for name, value in facts:
            if value:
                yield f"<dt>{name}</dt><dd>{value}</dd>"

    content = "".join(entries())
    return f"<dl>{content}</dl>" if content else ""


def _worst_text(verdict: Verdict) -> str:
    return escape(str(verdict.worst)) if verdict.worst is not None else ""


def _decibel(metrics: Metrics) -> str:
    if metrics.reason or math.isnan(metrics.snr_db):
        return "?"
    return "exact" if math.isinf(metrics.snr_db) and metrics.snr_db > 0 else f"{metrics.snr_db:.0f} dB"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


__all__ = ["diagnosis_html", "write_html"]
