"""History, differences, tables and the page: what a run looks like to a reader."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from math import inf
from pathlib import Path

import pytest

from generic_export.errors import OptionError
from t2n_llm.zoo.expectations import Expected
from t2n_llm.zoo.history import Run, Tally, compare_runs, keep_run, read_history, read_results, write_results
from t2n_llm.zoo.page import page
from t2n_llm.zoo.tables import markdown, replace_table, summary
from t2n_llm.zoo.verdict import CRASHED, FAILED, NOT_RUNNABLE, RIGHT, WRONG, CellVerdict, Check

CHECKS = {"prefill": Check(2e-6, 3.0, 1, 1, True), "greedy": Check(3e-6, 3.0, 16, 16, True)}
VERSIONS = {"torch": "2.13.0", "tract": "0.23.9"}
LLAMA = CellVerdict("llama", "f32", RIGHT, "done", "LlamaForCausalLM", checks=CHECKS, seconds=3.0, versions=VERSIONS)
HALF = replace(LLAMA, dtype="f16")
BLOOM = CellVerdict(
    "bloom", "f32", FAILED, "capture", "BloomForCausalLM", error="CaptureError", message="aten.<foo> | *has* no_form"
)
BROKEN = CellVerdict("opt", "f32", WRONG, "decode", checks={"decode": Check(inf, 2.0, 0, 16, False)})
DEAD = CellVerdict("mpt", "f32", CRASHED, "capture", message="killed by SIGABRT", log="<script>alert(1)</script>")
ABSENT = CellVerdict("blt", "f32", NOT_RUNNABLE, "transformers", error="AttributeError", message="no layers")
RUN = Run("2026-01-02T03-04-05", (LLAMA, HALF, BLOOM, BROKEN, DEAD, ABSENT))


def test_results_survive_the_file(tmp_path: Path) -> None:
    write_results(tmp_path / "sub" / "run.jsonl", RUN.verdicts)
    assert read_results([tmp_path / "sub" / "run.jsonl"]) == list(RUN.verdicts)
    assert "Infinity" not in (tmp_path / "sub" / "run.jsonl").read_text()


def test_shards_are_one_run_and_the_later_line_counts(tmp_path: Path) -> None:
    write_results(tmp_path / "1.jsonl", [LLAMA, BLOOM])
    write_results(tmp_path / "2.jsonl", [replace(BLOOM, stage="write"), HALF])
    found = read_results([tmp_path / "1.jsonl", tmp_path / "2.jsonl"])
    assert [(verdict.key, verdict.stage) for verdict in found] == [
        ("llama:f32", "done"),
        ("bloom:f32", "write"),
        ("llama:f16", "done"),
    ]


@pytest.mark.parametrize("text", ["garbage", "[]", '{"architecture": "a"}', '{"checks": 3}', "\xff"])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(OptionError, match=r"x\.jsonl"):
        read_results([tmp_path / "x.jsonl"])


def test_lines_of_a_later_version_are_read() -> None:
    line = LLAMA.to_json()[:-1] + ', "new_field": 3}'
    assert CellVerdict.from_json(line) == LLAMA


def test_history_is_a_folder_of_runs_by_time(tmp_path: Path) -> None:
    assert read_history(tmp_path / "none") == []
    keep_run(tmp_path / "h", [BLOOM], when=2e9)
    keep_run(tmp_path / "h", [LLAMA], when=1e9)
    names = [run.name for run in read_history(tmp_path / "h")]
    assert names == ["2001-09-09T01-46-40", "2033-05-18T03-33-20"]
    assert read_history(tmp_path / "h")[0].verdicts == (LLAMA,)


def test_what_does_not_run_in_transformers_does_not_count() -> None:
    assert RUN.tally("f32") == Tally(right=1, runnable=4, total=5)
    assert summary(RUN) == [
        "f32: 1 right of 4 that run in transformers (of 5 architectures), 1 failed [capture], 1 wrong [decode], "
        "1 crashed [capture]",
        "f16: 1 right of 1 that run in transformers (of 1 architectures)",
    ]


def test_differences() -> None:
    before = [LLAMA, BLOOM, BROKEN, DEAD]
    after = [replace(LLAMA, outcome=FAILED, stage="load", message="refused"), replace(BLOOM, outcome=RIGHT), HALF]
    after += [replace(BROKEN, stage="prefill")]
    found = {change.key: (change.kind, change.before, change.after) for change in compare_runs(before, after)}
    assert found == {
        "llama:f32": ("broken", "right", "failed [load]"),
        "bloom:f32": ("fixed", "failed [capture]", "right"),
        "opt:f32": ("moved", "wrong [decode]", "wrong [prefill]"),
        "llama:f16": ("new", "", "right"),
        "mpt:f32": ("gone", "crashed [capture]", ""),
    }
    assert compare_runs(before, before) == []
    assert compare_runs([LLAMA], [replace(LLAMA, seconds=9.0, checks={})]) == []


def test_the_table_has_a_row_per_architecture_and_reasons() -> None:
    text = markdown(RUN, {"opt:f32": Expected(WRONG, "decode", "a person's reason")})
    assert "| `llama` | LlamaForCausalLM | ✓ 3e-06 | ✓ 3e-06 |" in text
    assert "| `bloom` | BloomForCausalLM | **failed** (capture) |  |" in text
    assert "| `opt` | f32 | decode | a person's reason |" in text
    assert r"CaptureError: aten.&lt;foo> \| \*has\* no\_form" in text
    assert text.index("transformers itself does not run") < text.index("AttributeError: no layers")
    assert "torch 2.13.0, tract 0.23.9" in text


def test_the_table_is_put_between_its_marks() -> None:
    once = replace_table("# Zoo\n\nIntroduction.\n", "one\n")
    assert once.startswith("# Zoo\n\nIntroduction.\n\n<!--")
    assert once.endswith("-->\n")
    twice = replace_table(once + "\n## After\n", "two\n")
    assert "one" not in twice and "two" in twice
    assert twice.endswith("\n## After\n") and twice.startswith("# Zoo\n\nIntroduction.\n\n<!--")
    assert replace_table(twice, "two\n") == twice


class _Balanced(HTMLParser):
    """Counts what is open, and collects the text."""

    VOID = frozenset({"meta", "input", "line", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name in ("src", "href") for name, _ in attrs), "the page must be self-contained"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_page_is_whole_and_escapes_what_models_say(count: int) -> None:
    older = Run("2026-01-01T00-00-00", (BLOOM, replace(LLAMA, outcome=FAILED, stage="load", checks={})))
    text = page([older, older, RUN][3 - count :] if count else [], {})
    assert "<script>alert" not in text and "<foo>" not in text
    parser = _Balanced()
    parser.feed(text)
    assert parser.open == []
    if count:
        assert "aten.<foo> | *has* no_form" in parser.text
        assert "1 right of 4" in parser.text
    assert ("1 fixed" in parser.text) == (count > 1)


def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    (tmp_path / "zoo.html").write_text(page([RUN, RUN], {}).replace("</body>", _PROBE + "</body>"), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "zoo.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "PROBE all=5 failing=4 bloom=1" in done.stdout, done.stderr[-2000:]


# Uses the page's own filter, and writes what it shows.
_PROBE = """<script>
const rows = [...document.querySelectorAll("tr.row")], only = document.getElementById("only");
const shown = () => rows.filter(row => !row.hidden).length, all = shown();
only.click(); const left = shown();
const find = document.getElementById("search"); find.value = 'Bloom'; find.dispatchEvent(new Event('input'));
document.body.append(`PROBE all=${all} failing=${left} bloom=${shown()}`);
</script>"""
