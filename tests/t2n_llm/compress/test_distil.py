"""The whole model learning at the end: nearer to the original on texts that nobody learned from, or as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generic_export.errors import OptionError
from generic_export.weights.values import read_tensor
from quant.packing import unpack_q4_0
from t2n_llm.compress import calibration, distil, pace
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.calibrate import calibrate
from t2n_llm.compress.calibration import TextCalibration
from t2n_llm.compress.distil import Distilled
from t2n_llm.compress.effort import Effort, parse_duration
from t2n_llm.compress.progress import DistilProgress
from t2n_llm.compress.reconstruct import split
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.compress.result import CalibrationResult
from t2n_llm.compress.walk import open_walkable
from t2n_llm.source.hub import open_source
from tests.families import save_tiny_model
from tests.t2n_llm.compress.test_calibrate import _mixtral, divergence, is_linear, load, quantised, text_ids
from tests.trained_model import REAL_MODEL

Chosen = Callable[[str], bool]
IDS = text_ids("calib.txt", sequences=24)


def _calibrated(folder: Path, work: Path, chosen: Chosen, algorithm: str, ids: torch.Tensor = IDS) -> CalibrationResult:
    return calibrate(folder, lambda name: CALIBRATED[algorithm] if chosen(name) else None, ids, work_dir=work)


def _distilled(
    folder: Path, made: CalibrationResult, work: Path, effort: Effort, ids: torch.Tensor = IDS, **options: object
) -> Distilled:
    return distil.distil(open_walkable(folder), made, ids, effort, work_dir=work, **options)


_FIRST = {"model.layers.0.self_attn.q_proj.weight": CALIBRATED["tuned"]}  # of all linears, one


@pytest.fixture(scope="module")
def learned(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[float, CalibrationResult, Distilled, list[DistilProgress]]:
    """The KL before, and a model that has learned."""
    work = tmp_path_factory.mktemp("learned")
    made = _calibrated(REAL_MODEL, work, is_linear, "imatrix")
    evaluated = text_ids("eval.txt", sequences=8)
    before = divergence(quantised(made, REAL_MODEL), load(REAL_MODEL), evaluated)
    told: list[DistilProgress] = []
    found = _distilled(REAL_MODEL, made, work, Effort(passes=160), progress=told.append)
    return before, made, found, told


@pytest.mark.nightly
def test_the_original_is_nearer_on_other_texts(learned) -> None:
    before, made, found, told = learned
    after = divergence(quantised(made, REAL_MODEL), load(REAL_MODEL), text_ids("eval.txt", sequences=8))
    assert found.after < 0.95 * found.before and after < 0.97 * before
    assert found.steps == 80 and 0 < found.kept <= 80
    assert [each.step for each in told][-1] == 80 and told[-1].seconds_left == 0
    assert min(each.now for each in told) == found.after


@pytest.mark.nightly
def test_everything_stored_is_blocks_and_norms(learned) -> None:
    _, made, _, _ = learned
    for source in made.packed.values():
        assert bool(unpack_q4_0(read_tensor(source)).d.isfinite().all())
    assert all("norm" in name and read_tensor(source).ndim == 1 for name, source in made.changed.items())


@pytest.mark.nightly
def test_a_seed_decides(tmp_path: Path) -> None:
    start = _calibrated(REAL_MODEL, tmp_path, is_linear, "imatrix", IDS[:6])

    def levels(folder: str, seed: int) -> list[torch.Tensor]:
        (tmp_path / folder).mkdir()
        made = replace(start, packed=dict(start.packed), changed=dict(start.changed))
        found = _distilled(REAL_MODEL, made, tmp_path / folder, Effort(passes=16, seed=seed), IDS[:6])
        assert found.kept
        return [read_tensor(source) for source in made.packed.values()]

    first, again, other = levels("a", 0), levels("b", 0), levels("c", 1)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


@pytest.mark.nightly
def test_a_tied_table_serves_both(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    made = _calibrated(REAL_MODEL, tmp_path, lambda name: is_linear(name) or name in names, "imatrix")
    assert set(names) <= made.packed.keys()
    before = read_tensor(made.packed[names[0]])
    found = _distilled(REAL_MODEL, made, tmp_path, Effort(passes=80))
    table, head = (read_tensor(made.packed[name]) for name in names)
    assert torch.equal(table, head) and not torch.equal(table, before)
    assert found.after < found.before


def _mamba(folder: Path) -> Path:
    """Nothing in it attends."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("mamba", vocab_size=160, hidden_size=64, num_hidden_layers=2, state_size=8)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "smollm3", "qwen2", "mixtral", "mamba"])
def test_families_learn(family: str, tmp_path: Path) -> None:
    others = {"mixtral": _mixtral, "mamba": _mamba}
    folder = others[family](tmp_path) if family in others else save_tiny_model(family, tmp_path / "model")
    ids = torch.randint(3, 160, (9, 24), generator=torch.Generator().manual_seed(0))
    made = _calibrated(folder, tmp_path, lambda name: ".weight" in name and "norm" not in name, "gptq", ids)
    assert made.packed
    assert distil.bytes_needed(open_walkable(folder), made, *ids.shape) > 0
    found = _distilled(folder, made, tmp_path, Effort(passes=40), ids)
    assert found.before > 0 and found.after <= found.before


def test_what_brings_nothing_is_not_kept(short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distil, "_SCALE_STEP", 3.0)  # scales anywhere
    made = _calibrated(short_model, tmp_path, is_linear, "gptq", IDS[:4])
    before = {name: read_tensor(source) for name, source in made.packed.items()}
    found = _distilled(short_model, made, tmp_path, Effort(passes=8), IDS[:4])
    assert found.kept == 0 and found.after == found.before
    assert all(torch.equal(read_tensor(made.packed[name]), values) for name, values in before.items())
    assert not made.changed


def test_where_memory_lacks_nothing_is_learned(
    short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "available_memory", lambda: 1_000_000)
    text = tmp_path / "calib.txt"
    text.write_text((REAL_MODEL / "calib.txt").read_text()[:12000])
    made = TextCalibration(open_source(str(short_model)), str(text)).quantized(
        _FIRST, tmp_path, lambda _: None, Effort()
    )
    assert made.packed and any("GB of memory" in note for note in made.notes)


def test_a_short_text_is_not_learned_from(short_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "calib.txt"
    text.write_text((REAL_MODEL / "calib.txt").read_text()[:3000])
    calibration = TextCalibration(open_source(str(short_model)), str(text))
    made = calibration.quantized(_FIRST, tmp_path, lambda _: None, Effort())
    assert made.packed and any("fewer than 4" in note for note in made.notes)
    assert not calibration.quantized(_FIRST, tmp_path, lambda _: None, Effort(seconds=0)).notes


def test_what_is_judged_is_an_average_that_forgets() -> None:
    moving = torch.zeros(3)
    mean = pace.Mean.of([[moving]])
    for step in range(1, 201):
        moving.fill_(float(step))
        mean.add()
        if step == 1:
            assert mean.averaged[0].tolist() == [0.5] * 3  # of the beginning and one step
    with mean.given():
        inside = moving.clone()
    assert moving.tolist() == [200.0] * 3
    memory = pace._MEMORY  # a ramp's average lags by so many steps
    torch.testing.assert_close(inside, torch.full((3,), 200 - memory / (1 - memory)), rtol=0.01, atol=0)


@pytest.mark.nightly
def test_layers_that_reconstruct_read_more_texts(tmp_path: Path) -> None:
    calibration = TextCalibration(open_source(str(REAL_MODEL)), str(REAL_MODEL / "calib.txt"))
    ((name, tuned),) = _FIRST.items()
    read = {}
    for algorithm in (tuned, CALIBRATED["gptq"]):
        made = calibration.quantized({name: algorithm}, tmp_path, lambda _: None, Effort(seconds=0))
        read[algorithm.name] = made.errors[name].tokens
    assert read["gptq"] == 32 * 512 and read["tuned"] > 2 * read["gptq"]  # less the texts that only judge


def test_what_the_model_writes_teaches_and_never_judges(
    short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _calibrated(short_model, tmp_path, is_linear, "imatrix", IDS[:9])
    read: list[int] = []
    plain = distil._Lesson.step
    monkeypatch.setattr(distil._Lesson, "step", lambda self, by, texts: (read.extend(texts), plain(self, by, texts)))
    judged: list[int] = []
    judge = distil._Lesson.judged
    monkeypatch.setattr(distil._Lesson, "judged", lambda self, texts: judged.extend(texts) or judge(self, texts))
    found = _distilled(short_model, made, tmp_path, Effort(passes=24), IDS[:9], written=IDS[9:14, :40])
    assert set(judged) == {0, 8}
    assert sorted(read) == sorted([*range(1, 8), *range(9, 14)] * 2)
    assert found.after < found.before


def test_as_much_is_written_as_keeps_texts_fresh() -> None:
    assert distil.texts_to_write(Effort(passes=600), 96) == 300 - 84
    assert distil.texts_to_write(Effort(passes=100), 96) == 0
    assert distil.texts_to_write(Effort(seconds=60.0), 96) > 600
    assert Effort(seconds=60.0).less(20.0) == Effort(seconds=40.0) and Effort(seconds=1.0).less(2.0).is_none


@pytest.mark.nightly
def test_the_whole_of_it_reads_what_the_model_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "calib.txt"
    text.write_text((REAL_MODEL / "calib.txt").read_text()[:12000])
    given: dict[str, torch.Tensor] = {}
    plain = distil.distil

    def watched(model: object, made: object, ids: torch.Tensor, effort: Effort, **options: object) -> Distilled:
        given.update(ids=ids, written=options["written"])
        return plain(model, made, ids, effort, **options)

    monkeypatch.setattr(distil, "distil", watched)
    calibration = TextCalibration(open_source(str(REAL_MODEL)), str(text))
    calibration.quantized(_FIRST, tmp_path, lambda _: None, Effort(passes=4))
    assert not len(given["written"])  # there is enough to read
    calibration.quantized(_FIRST, tmp_path, lambda _: None, Effort(passes=24))
    taught = len(split(len(given["ids"]))[0])
    assert given["written"].shape == (12 - taught, given["ids"].shape[1] // 2)


def test_a_time_is_an_effort(short_model: Path, tmp_path: Path) -> None:
    made = _calibrated(short_model, tmp_path, is_linear, "imatrix", IDS[:4])
    found = _distilled(short_model, made, tmp_path, Effort(seconds=1.0), IDS[:4])
    assert found.steps >= 1


@pytest.mark.parametrize(("text", "seconds"), [("30min", 1800), ("2h", 7200), ("90 s", 90), ("1.5H", 5400), ("0", 0)])
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "min", "3 days", "-1h", "1e9h", "١h"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(OptionError, match="no time"):
        parse_duration(text)


def test_a_budget_needs_something_that_learns() -> None:
    assert CompressionOptions(name="q4_0:tuned", budget="30min").effort() == Effort(seconds=1800)
    with pytest.raises(OptionError, match="nothing learns"):
        CompressionOptions(name="q4_0:best", budget="30min")
    with pytest.raises(OptionError, match="no time"):
        CompressionOptions(name="q4_0:tuned", budget="soon")
