"""A task gets a front end with one line, whatever else an export does: q4_0 weights, a tgz, a killed run continued."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import WhisperFeatureExtractor

from t2n_llm.export.against_source import compare_with_source
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.options import ExportOptions
from t2n_llm.export.pipeline import export_llm, plan_llm_export
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.export.verify import verify_export
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks import registry
from t2n_llm.tasks.frontends.frontend import frontend_graphs
from t2n_llm.tasks.heads.table import HEADS
from t2n_llm.tasks.heads.task import HeadTask
from t2n_llm.tasks.names import FEATURE_EXTRACTION
from tests.t2n_llm.command_line import call, strict_json

_INPUT = "input_features"


class WithFrontEnd(HeadTask):
    """A task of one archive that has a front end too."""

    def __init__(self) -> None:
        super().__init__(HEADS[FEATURE_EXTRACTION])

    def graphs(self, source: ModelSource, options: GraphOptions) -> tuple[ModelGraph, ...]:
        return (*frontend_graphs(source, options, _INPUT), *super().graphs(source, options))


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text with an extractor of sound beside it."""
    folder = tmp_path_factory.mktemp("wiring") / "source"
    shutil.copytree(tiny_llama, folder)
    WhisperFeatureExtractor(chunk_length=1, feature_size=64).save_pretrained(folder)
    return folder


@pytest.fixture
def source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That model, and the task above."""
    monkeypatch.setitem(registry._TASKS, FEATURE_EXTRACTION, f"{__name__}:{WithFrontEnd.__name__}")
    return folder


def _dtypes(archive: Path) -> set[str]:
    record = strict_json(call("inspect", archive, "--json").out)
    return {share["dtype"] for share in record["dtypes"]}


@pytest.mark.parametrize("archive", ["tgz", pytest.param("dir", marks=pytest.mark.nightly)])
def test_q4_0_weights_leave_it_plain(archive: str, source: Path, tmp_path: Path) -> None:
    options = ExportOptions.of(task=FEATURE_EXTRACTION, require_tokenizer=False, compress="q4_0", archive=archive)
    result = export_llm(str(source), tmp_path / "out", options=options)
    assert result.validation is not None and result.validation.passed
    assert result.archive == result.archives["model"]
    assert _dtypes(result.archives["frontend"]) == {"f32"} and "q4_0" in _dtypes(result.archive)
    assert list(read_manifest(result.output_dir)["archives"]) == ["frontend", "model"]
    assert [check.name[:7] for check in result.validation.checks][:3] == ["log-mel"] * 3
    assert verify_export(result.output_dir).passed and validate_folder(result.output_dir, str(source)).passed
    compared = compare_with_source(result.output_dir, str(source))
    assert not compared.findings and compared.same_graph


def test_f16_activations_are_measured_without_it(source: Path, tmp_path: Path) -> None:
    options = ExportOptions.of(task=FEATURE_EXTRACTION, require_tokenizer=False, activations="f16")
    result = export_llm(str(source), tmp_path / "out", options=options)
    assert result.validation is not None and result.validation.passed
    assert set(result.manifest["activation_ranges"]) == {"model"}
    names = [archive.name for archive in plan_llm_export(str(source), tmp_path / "x", options=options).archives]
    assert names == ["frontend.nnef.tar", "model.nnef.tar"]
