"""Document 003, piece by piece: every name and signature in it is there."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import pytest

import generic_export
from generic_export import diagnose
from generic_export.diagnose import piece_by_piece
from generic_export.diagnose.piece_by_piece import (
    CustomOpStrategy,
    ModelDiagnoseOutput,
    StatusExport,
    StatusExportCode,
    trace_execution_piece_by_piece,
    trace_forward_execution,
)

NAMES = (
    "CustomOpStrategy",
    "ModelDiagnoseOutput",
    "StatusExport",
    "StatusExportCode",
    "trace_execution_piece_by_piece",
    "trace_forward_execution",
)
NEEDED = inspect.Parameter.empty


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_where_the_document_and_we_have_it(name: str) -> None:
    found = getattr(piece_by_piece, name)
    assert getattr(generic_export, name) is found
    assert getattr(diagnose, name) is found
    assert name in piece_by_piece.__all__ and name in generic_export.__all__ and name in diagnose.__all__


SIGNATURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ModelDiagnoseOutput": (
        ModelDiagnoseOutput,
        {"parent": NEEDED, "name": NEEDED, "model": NEEDED, "level": 0, "method_name": "forward"},
    ),
    "add_child": (ModelDiagnoseOutput.add_child, {"self": NEEDED, "diag": NEEDED}),
    "add_inputs": (ModelDiagnoseOutput.add_inputs, {"self": NEEDED, "args": NEEDED, "kwargs": NEEDED}),
    "build_shape_mapping_indices": (
        ModelDiagnoseOutput.build_shape_mapping_indices,
        {"self": NEEDED, "shape_functions": None, "verbose": 0},
    ),
    "determine_shape_fct": (
        ModelDiagnoseOutput.determine_shape_fct,
        {
            "self": NEEDED,
            "output_index": NEEDED,
            "flattened_inputs": NEEDED,
            "flattened_outputs": NEEDED,
            "verbose": 0,
            "shape_functions": None,
        },
    ),
    "get_export_report": (
        ModelDiagnoseOutput.get_export_report,
        {"self": NEEDED, "exported_program": False, "fx": False},
    ),
    "guess_dynamic_shape_object": (
        ModelDiagnoseOutput.guess_dynamic_shape_object,
        {"self": NEEDED, "objs": NEEDED, "msg": None},
    ),
    "guess_dynamic_shapes": (ModelDiagnoseOutput.guess_dynamic_shapes, {"self": NEEDED}),
    "pretty_text": (
        ModelDiagnoseOutput.pretty_text,
        {
            "self": NEEDED,
            "with_dynamic_shape": False,
            "with_shape": True,
            "with_min_max": True,
            "with_device": True,
            "with_inputs": True,
        },
    ),
    "put_custom_op_inplace": (
        ModelDiagnoseOutput.put_custom_op_inplace,
        {"self": NEEDED, "shape_functions": None, "verbose": 0},
    ),
    "remove_custom_op_inplace": (ModelDiagnoseOutput.remove_custom_op_inplace, {"self": NEEDED, "verbose": 0}),
    "try_export": (
        ModelDiagnoseOutput.try_export,
        {
            "self": NEEDED,
            "exporter": "fx",
            "exporter_kwargs": None,
            "verbose": 0,
            "quiet": True,
            "discrepancies": True,
            "use_dynamic_shapes": None,
            "replace_by_custom_op": CustomOpStrategy.NONE,
            "atol": 0.01,
            "rtol": 0.1,
            "shape_functions": None,
        },
    ),
    "StatusExport": (StatusExport, {"status": NEEDED, "step": "", "reason": "", "exported": None}),
    "StatusExportCode.remove": (StatusExportCode.remove, {"self": NEEDED, "a": NEEDED}),
    "trace_execution_piece_by_piece": (
        trace_execution_piece_by_piece,
        {"model": NEEDED, "inputs": NEEDED, "verbose": 0, "traced_method": None},
    ),
    "trace_forward_execution": (trace_forward_execution, {"model": NEEDED, "verbose": 0, "traced_method": None}),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_each_signature_begins_with_the_documented_parameters_in_their_order(name: str) -> None:
    function, documented = SIGNATURES[name]
    found = list(inspect.signature(function).parameters.values())
    assert len(found) >= len(documented)
    for parameter, (wanted, default) in zip(found, documented.items(), strict=False):
        assert (parameter.name, parameter.default) == (wanted, default)
    assert all(parameter.default is not NEEDED for parameter in found[len(documented) :]), "ours follow, with defaults"


@pytest.mark.parametrize("name", ["custom_op_name", "dot_name", "full_name", "module_name_type"])
def test_each_property_is_one(name: str) -> None:
    assert isinstance(getattr(ModelDiagnoseOutput, name), property)


def test_strategies_and_codes_are_the_documented_ones() -> None:
    assert issubclass(CustomOpStrategy, enum.Enum) and issubclass(StatusExportCode, enum.Flag)
    assert {"NONE", "ONLY_IF_FAILING", "ALWAYS", "LOCAL"} <= set(CustomOpStrategy.__members__)
    assert {"FAIL", "OK", "CHILDC", "CUSTOM", "DISC"} <= set(StatusExportCode.__members__)
    both = StatusExportCode.FAIL | StatusExportCode.DISC
    assert both.remove(StatusExportCode.DISC) is StatusExportCode.FAIL
    assert both.remove(a=StatusExportCode.OK) == both
    status = StatusExport(StatusExportCode.FAIL, "EXPORT", "a reason", {"any": "object"})
    assert (status.status, status.step, status.reason) == (StatusExportCode.FAIL, "EXPORT", "a reason")
    assert status.exported == {"any": "object"}
