"""The HTML report: stands alone, tells everything, is well formed, and works in a real browser in both themes."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.debug.diagnosis import Diagnosis
from generic_export.debug.records import (
    Axis,
    AxisReport,
    Comparison,
    ErrorRecord,
    Leaf,
    LeafKind,
    Outcome,
    Piece,
    Stage,
    Verdict,
)
from generic_export.debug.report.report_html import diagnosis_html

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)
_VOID = {"meta", "input", "br", "wbr"}


def _hidden(name: str) -> Leaf:
    return Leaf(name, LeafKind.TENSOR, "float32", (1, 7, 64), ("1", "S", "64"))


def _piece(key: str, class_name: str, paths: tuple[str, ...], depth: int, children: tuple[str, ...] = ()) -> Piece:
    parents = {"norm": ("layer",), "attention": ("layer",), "mlp": ("layer",), "layer": ("model",), "model": ("root",)}
    return Piece(
        key=key,
        class_name=class_name,
        qualified_name=f"transformers.models.llama.modeling_llama.{class_name}",
        path=paths[0],
        paths=paths,
        depth=depth,
        source="modeling_llama.py:301",
        inputs=(_hidden("hidden_states"), Leaf("attention_mask", LeafKind.NONE)),
        outputs=(_hidden("output"),),
        attributes=(("eps", "1e-06"),),
        parameters=("weight: float32[64]",),
        parameter_count=64,
        sets=(0, 1),
        calls=2 * len(paths),
        parents=parents.get(key, ()),
        children=children,
    )


def compared(set_index: int, passed: bool, error: float, share: float, snr: float, allowed: float) -> Comparison:
    return Comparison(
        "output", passed, error, 0.0, (0,), 0.0, allowed=allowed, rms=error / share, snr_db=snr, set_index=set_index
    )


def sample() -> Diagnosis:
    """A Llama of which one norm is wrong and the attention has an operator without translation."""
    layers = tuple(f"model.layers.{index}" for index in range(32))
    pieces = (
        _piece("root", "LlamaForCausalLM", ("",), 0, ("model", "head")),
        _piece("model", "LlamaModel", ("model",), 1, ("layer",)),
        _piece("layer", "LlamaDecoderLayer", layers, 2, ("norm", "attention", "mlp")),
        _piece("norm", "LlamaRMSNorm", tuple(f"{layer}.input_layernorm" for layer in layers), 3),
        _piece("attention", "LlamaAttention", tuple(f"{layer}.self_attn" for layer in layers), 3),
        _piece("mlp", "LlamaMLP", tuple(f"{layer}.mlp" for layer in layers), 3),
        replace(_piece("head", "Linear", ("lm_head",), 1), parents=("root",)),
    )
    wrong = (
        compared(0, False, 3.1e-2, 4.4e-2, 27.1, 1e-5),
        compared(1, False, 2.9e-2, 4.1e-2, 27.9, 1e-5),
    )
    times = {"capture": 0.41, "translate": 0.05, "write": 0.02, "load": 0.09, "run": 0.03, "compare": 0.01}
    error = ErrorRecord(
        "MismatchError", "outputs differ by up to 0.031 <where 1e-05 is allowed>", "Compare the epsilon."
    )
    missing = ErrorRecord(
        "UnsupportedOperatorError",
        "aten.special_zeta.default at model.layers.0.self_attn (modeling_llama.py:245): no NNEF form is registered.",
        "Write that line with other operators, or register a translation.",
        'Traceback (most recent call last):\n  File "modeling_llama.py", line 245, in forward\n',
    )

    def failed(key: str, path: str, stage: Stage, **more: object) -> Verdict:
        return Verdict(key, path, Outcome.FAILED, stage, stage_seconds=times, peak_rss=310_000_000, **more)  # type: ignore[arg-type]

    verdicts = (
        failed("root", "", Stage.TRANSLATE, error=missing, seconds=4.2),
        failed("model", "model", Stage.TRANSLATE, error=missing, seconds=3.9),
        failed("layer", layers[0], Stage.TRANSLATE, error=missing, seconds=1.4),
        failed(
            "norm",
            f"{layers[0]}.input_layernorm",
            Stage.COMPARE,
            error=error,
            metrics=wrong,
            seconds=0.6,
            source="modeling_llama.py:66",
        ),
        failed(
            "attention",
            f"{layers[0]}.self_attn",
            Stage.TRANSLATE,
            error=missing,
            operator="aten.special_zeta.default",
            source="modeling_llama.py:245",
            unsupported=("aten.special_zeta.default (modeling_llama.py:245)",),
            suggestions=("register a translation of aten.special_zeta.default",),
            repro_path="out/repro/2-LlamaAttention",
            seconds=0.9,
        ),
        Verdict(
            "mlp",
            f"{layers[0]}.mlp",
            Outcome.OK,
            Stage.COMPARE,
            seconds=0.7,
            stage_seconds=times,
            engine_nodes=9,
            metrics=(
                compared(0, True, 1e-7, 2e-7, 128.4, 1e-5),
                compared(1, True, 0.0, 1.0, float("inf"), 1e-5),
            ),
        ),
        Verdict("head", "lm_head", Outcome.NOT_TRIED),
    )
    alone = Verdict("layer", layers[0], Outcome.OK, Stage.COMPARE, isolated=True)
    axes = AxisReport(
        (("S", (7, 1, 5)), ("P", (0, 11, 13))),
        (Axis("input_ids", 1, "S", (7, 1, 5)), Axis("past_key_values.key_0", 2, "P", (0, 11, 13))),
        ("axis 0 of 'input_ids' is 1 in every set: it is static.",),
    )
    return Diagnosis(
        "LlamaForCausalLM", "tract 0.23.9", "failing", pieces, verdicts, (alone,), axes, ("model.layers.3.unused",),
        ("LlamaForCausalLM was in train mode.",), 48.3, versions={"torch": "2.13.0", "tract": "0.23.9"},
    )  # fmt: skip


class _Balanced(HTMLParser):
    """Checks that every element is closed in order, and collects text and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self.ids |= {value or "" for name, value in attrs if name == "id"}
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _parsed(page: str) -> _Balanced:
    parser = _Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_stands_alone_and_every_link_leads_to_a_row() -> None:
    page = diagnosis_html(sample())
    parsed = _parsed(page)
    assert parsed.links and all(link.startswith("#") and link[1:] in parsed.ids for link in parsed.links)
    assert not re.search(r"https?://|@import|url\(", page)


def test_the_page_tells_what_the_diagnosis_knows() -> None:
    text = " ".join(_parsed(diagnosis_html(sample())).text)
    for told in (
        "32 x LlamaAttention cannot be translated",
        "aten.special_zeta.default",
        "modeling_llama.py:245",
        "<where 1e-05 is allowed>",  # escaped: read back as it was written
        "out/repro/2-LlamaAttention",
        "hidden_states: float32[1, S, 64]",
        "27 dB",
        "exact",
        "not tried",
        "past_key_values.key_0[2]",
        "model.layers.3.unused",
        "was in train mode",
        "Traceback (most recent call last)",
        "torch 2.13.0",
    ):
        assert told in text, told


def test_a_page_of_what_came_back_from_json_is_the_same() -> None:
    assert diagnosis_html(Diagnosis.from_json(sample().to_json())) == diagnosis_html(sample())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"interrupted": True}, "interrupted: not everything was tried"),
        ({"verdicts": (), "pieces": (), "isolated": ()}, "nothing was tried"),
    ],
)
def test_the_first_line_says_how_it_ended(change: dict, told: str) -> None:
    assert told in " ".join(_parsed(diagnosis_html(replace(sample(), **change))).text)


def test_a_diagnosis_without_faults_says_so() -> None:
    whole = sample()
    fine = tuple(replace(verdict, outcome=Outcome.OK, error=None) for verdict in whole.verdicts)
    page = diagnosis_html(replace(whole, verdicts=fine))
    assert "everything that was tried passes" in page and "<h2>Faults</h2>" not in page


@given(st.text(max_size=40))
@settings(max_examples=50, deadline=None)
def test_any_text_stays_text(text: str) -> None:
    whole = sample()
    error = ErrorRecord(text, text, text, text)
    verdicts = tuple(replace(verdict, error=error, source=text, operator=text) for verdict in whole.verdicts)
    pieces = tuple(replace(piece, class_name=text, source=text) for piece in whole.pieces)
    page = diagnosis_html(replace(whole, model=text, target=text, verdicts=verdicts, pieces=pieces, warnings=(text,)))
    plain = _parsed(diagnosis_html(whole))
    odd = _parsed(page)
    assert odd.ids == plain.ids and odd.links == plain.links


# --- in a browser -----------------------------------------------------------------------------------


def browse(*arguments: str, folder: Path) -> str:
    """Run a headless Chromium and return what it prints."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", "--window-size=1280,1500", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_browser
def test_a_link_to_a_piece_opens_its_details(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(diagnosis_html(sample()), encoding="utf-8")
    page = file.as_uri()
    closed = browse("--dump-dom", page, folder=tmp_path)
    assert 'class="script"' in closed and 'aria-expanded="true"' not in closed
    opened = browse("--dump-dom", f"{page}#p5", folder=tmp_path)
    assert opened.count('aria-expanded="true"') == 1
    row = opened[opened.index('id="p5"') :]
    assert 'aria-expanded="true"' in row[: row.index("</tr>")]
    assert 'class="detail open" id="p5-detail"' in opened


@needs_browser
def test_filters_and_buttons_work(tmp_path: Path) -> None:
    """The page presses its own buttons, in a script added at its end."""
    presses = """<script>
      const shown = () => document.querySelectorAll("tr.row:not([hidden])").length;
      const told = [shown()];
      document.getElementById("only").click(); told.push(shown());
      document.getElementById("only").click(); told.push(shown());
      const search = document.getElementById("search");
      search.value = "layernorm py:66"; search.dispatchEvent(new Event("input")); told.push(shown());
      search.value = ""; search.dispatchEvent(new Event("input")); told.push(shown());
      document.getElementById("all").click(); told.push(document.querySelectorAll("tr.detail.open").length);
      document.querySelector("#p6").click(); told.push(document.querySelectorAll("tr.detail.open").length);
      document.getElementById("theme").click(); told.push(document.documentElement.dataset.theme);
      document.title = JSON.stringify(told);
    </script></body>"""
    path = tmp_path / "pressed.html"
    path.write_text(diagnosis_html(sample()).replace("</body>", presses), encoding="utf-8")
    dom = browse("--dump-dom", path.as_uri(), folder=tmp_path)
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None and title[1].startswith('[7,5,7,1,7,7,6,"'), title


@needs_browser
@pytest.mark.parametrize(("scheme", "darkest", "brightest"), [("light", 0.75, 1.0), ("dark", 0.0, 0.35)])
def test_it_is_light_or_dark_and_nothing_overflows(
    tmp_path: Path, scheme: str, darkest: float, brightest: float
) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the screenshot")
    measure = "<script>document.title = document.documentElement.scrollWidth - innerWidth;</script></body>"
    path = tmp_path / "report.html"
    path.write_text(diagnosis_html(sample()).replace("</body>", measure), encoding="utf-8")
    picture = tmp_path / "page.png"
    setting = "--blink-settings=preferredColorScheme=" + ("1" if scheme == "light" else "0")
    browse(setting, f"--screenshot={picture}", path.as_uri(), folder=tmp_path)
    pixels = np.asarray(image.open(picture).convert("L")) / 255
    assert darkest <= pixels.mean() <= brightest
    assert pixels.std() > 0.03  # not an empty page
    for width in ("1280,1500", "520,900"):
        dom = browse("--dump-dom", f"--window-size={width}", path.as_uri(), folder=tmp_path)
        assert "<title>0</title>" in dom, width
