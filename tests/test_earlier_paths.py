"""Paths that documents have named stay importable, as the very modules at their new places."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("earlier", "now", "name"),
    [
        ("generic_export.checking", "generic_export.inference_target.tract.checking", "assert_io"),
        ("generic_export.coverage", "generic_export.debug.coverage", "module_coverage"),
        ("generic_export.exceptions", "generic_export.errors", "T2NErrorTorchJitTraceFailed"),
        ("generic_export.ops.builder", "generic_export.translate.builder", "NnefBuilder"),
        ("generic_export.ops.registry", "generic_export.translate.registry", "translates"),
        ("generic_export.ops.modules", "generic_export.translate.modules", "translates_module"),
        ("generic_export.remodeler", "generic_export.remodel", "RemodelPlan"),
        ("generic_export.torch_graph.harden", "generic_export.torchscript.harden", "harden_jit_for_export"),
        ("generic_export.torch_graph.jit_passes", "generic_export.torchscript.harden", "strip_prim_data"),
        (
            "generic_export.inference_target.tract.wheel",
            "generic_export.inference_target.tract.engines.wheel",
            "TractWheel",
        ),
        ("generic_export.utils", "generic_export.inference_target.version", "SemanticVersion"),
        ("generic_export.weights.disk", "generic_export.write.weights_only", "export_tensors_to_nnef"),
        ("t2n_llm.benchmark", "t2n_llm.bench.benchmark", "bench_archives"),
        ("t2n_llm.diagnosis", "t2n_llm.debug.diagnosis", "diagnose_model"),
        ("t2n_llm.inspection", "t2n_llm.inspect.inspection", "inspect_archive"),
        ("t2n_llm.explain.diagnosis", "t2n_llm.debug.diagnosis", "diagnose_model"),
        ("t2n_llm.measure.benchmark", "t2n_llm.bench.benchmark", "bench_archives"),
        ("t2n_llm.measure.generate", "t2n_llm.runtime.generate", "ExportedModel"),
        ("t2n_llm.measure.inspection", "t2n_llm.inspect.inspection", "inspect_archive"),
        ("t2n_llm.located", "t2n_llm.export.archive_lookup", "locate_archive"),
        ("t2n_llm.options", "t2n_llm.export.options", "ExportOptions"),
    ],
)
def test_an_earlier_path_is_the_same_module(earlier: str, now: str, name: str) -> None:
    module = importlib.import_module(earlier)
    assert module is importlib.import_module(now)
    assert hasattr(module, name)
    assert module.__spec__ is not None
    assert module.__spec__.name == now


# Every module that the documents of torch-to-nnef name, under our root, with what they take from it.
@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("generic_export", "export_model_to_nnef"),
        (
            "generic_export.export",
            "export_model_to_nnef export_tensors_to_nnef export_tensors_from_disk_to_nnef iter_torch_tensors_from_disk",
        ),
        ("generic_export.exceptions", "T2NErrorTorchJitTraceFailed"),
        ("generic_export.inference_target", "TractNNEF KhronosNNEF"),
        ("generic_export.inference_target.tract", "TractNNEF TractCli"),
        ("generic_export.remodeler", "RemodelPlan"),
        ("generic_export.torch_graph", "TorchModuleTracer TorchModuleIRGraph TorchOp TensorVariable FixedTensorList"),
        ("generic_export.torch_graph.harden", "harden_jit_for_export"),
        ("generic_export.utils", "SemanticVersion"),
    ],
)
def test_a_documented_module_holds_what_documents_take_from_it(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_what_never_was_is_missing() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("generic_export.ops.nothing")
