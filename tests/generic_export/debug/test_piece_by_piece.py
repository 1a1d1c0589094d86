"""The names that users of the piece-by-piece tool know, each doing what it says."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from generic_export.diagnose import state_adapters
from generic_export.diagnose.piece_by_piece import (
    CustomOpStrategy,
    ModelDiagnoseOutput,
    StatusExport,
    StatusExportCode,
    trace_execution_piece_by_piece,
    trace_forward_execution,
)
from generic_export.errors import CaptureError, MissingExtraError, OptionError
from tests.generic_export.debug import toys
from tests.generic_export.debug.planted import DecidedByPython, UnsupportedOperator
from tests.generic_export.debug.states import GROWING

DYNAMIC = Dim.DYNAMIC


def rows(*counts: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(count, 4),) for count in counts]


class Nested(nn.Module):
    """A module with a good child and a faulty one."""

    def __init__(self, fault: nn.Module) -> None:
        super().__init__()
        self.good = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.ReLU(), fault])

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.good(x) * scale
        for layer in self.layers:
            x = layer(x)
        return x + 1.0


def traced(model: nn.Module, sets: list[Any] | None = None, **options: Any) -> ModelDiagnoseOutput:
    torch.manual_seed(0)
    return trace_execution_piece_by_piece(model, sets or rows(3, 5), **options)


def node(root: ModelDiagnoseOutput, path: str) -> ModelDiagnoseOutput:
    (found,) = [each for each in root if each.path == path]
    return found


# --- the tree ---------------------------------------------------------------------------------------


def test_the_tree_follows_the_modules_and_holds_inputs_and_outputs() -> None:
    model = Nested(nn.Tanh()).eval()
    sets = rows(3, 5)
    root = traced(model, sets)
    assert [each.path for each in root] == ["", "good", "layers.0", "layers.1"]
    assert [each.level for each in root] == [0, 1, 1, 1]
    assert torch.equal(root.inputs[1][0][0], sets[1][0])
    assert torch.equal(root.outputs[1][0], model(*sets[1]))
    assert node(root, "good").full_name == "good:Linear"
    assert node(root, "layers.1").dot_name == "..layers.1"
    assert node(root, "layers.1").custom_op_name == "C_Nested_layers_1"
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_block_form_gives_the_same_tree_and_only_when_it_is_left() -> None:
    model = Nested(nn.Tanh()).eval()
    with trace_forward_execution(model) as root:
        for (x,) in rows(3, 5):
            model(x, scale=2.0)
        assert [each.path for each in root] == ["", "good", "layers.0", "layers.1"]
        assert root.inputs == []
    assert len(root.inputs) == 2
    assert root.inputs[0][1] == {"scale": 2.0}
    assert root.try_export("nnef").is_ok()


def test_classes_can_be_left_out_and_other_methods_traced() -> None:
    class Speaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

        def speak(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) * 2.0

    model = Speaks()
    root = traced(model, traced_method={"Speaks": "speak", nn.Linear: None})
    assert root.method_name == "speak"
    assert root.full_name.endswith(":Speaks.speak")
    assert [each.path for each in root] == [""]
    assert len(root.inputs) == 2
    assert "speak" not in vars(model)
    assert root.try_export("nnef").is_ok()
    with pytest.raises(OptionError, match="no method"):
        traced(model, traced_method={"Speaks": "sing"})


def test_a_module_that_is_not_called_has_no_input() -> None:
    root = traced(toys.SomeUnused(), rows(3, 2))
    status = node(root, "never").try_export("nnef")
    assert status.status == StatusExportCode.FAIL_NOINPUT
    assert "not called" in root.get_export_report()


def test_free_functions_are_watched_when_asked_for() -> None:
    root = traced(toys.CallsFunction(), trace_functions=True)
    assert len(root.inputs) == 2
    assert root.try_export("nnef").is_ok()


# --- shapes -----------------------------------------------------------------------------------------


def test_dynamic_shapes_are_guessed_per_argument() -> None:
    sets = [((torch.randn(n, 4),), {"shift": torch.randn(n, 4), "scale": 3.0}) for n in (3, 5)]
    root = traced(toys.KeywordsAndRest(), sets)
    assert root.guess_dynamic_shapes() == (({0: DYNAMIC},), {"shift": {0: DYNAMIC}, "scale": None})


def test_one_call_has_no_dynamic_shape() -> None:
    assert traced(toys.Doubled(), rows(3)).guess_dynamic_shapes() == (({},), {})


def test_dynamic_shapes_of_nests_states_and_axes_that_are_always_empty() -> None:
    root = traced(toys.Doubled())
    nests = [{"a": (torch.zeros(n, 2), [torch.zeros(0, 3)]), "b": None} for n in (3, 5)]
    assert root.guess_dynamic_shape_object(*nests) == {"a": ({0: DYNAMIC}, [{0: DYNAMIC}]), "b": None}
    with state_adapters(GROWING):
        states = [toys.Growing(torch.zeros(n, 2)) for n in (3, 5)]
        assert root.guess_dynamic_shape_object(*states) == [{0: DYNAMIC}]


@pytest.mark.parametrize(
    "values",
    [
        (torch.zeros(2), torch.zeros(2, 2)),
        (torch.zeros(2), None),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (1, "1"),
    ],
)
def test_values_that_change_their_kind_are_refused_with_the_place(values: tuple[Any, Any]) -> None:
    root = traced(toys.Doubled())
    with pytest.raises(CaptureError, match="here"):
        root.guess_dynamic_shape_object(*values, msg=lambda: "here")


class Joins(nn.Module):
    """Outputs of the shape of an input, of two inputs together, of another element type."""

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2.0, torch.cat([past, x], dim=0), x[:1] > 0


def test_shapes_of_outputs_are_learnt_from_inputs() -> None:
    sets = [(torch.randn(s, 4), torch.randn(p, 4)) for s, p in ((3, 7), (5, 2))]
    root = traced(Joins(), sets)
    first, joined, flags = root.build_shape_mapping_indices()
    assert first == (0, torch.float32, None)
    assert joined[0] == (0, 1)
    assert joined[2] is not None
    assert joined[2](torch.zeros(11, 4), torch.zeros(13, 4)).shape == (24, 4)
    assert flags[1] is torch.bool
    assert flags[2] is not None
    assert flags[2](torch.zeros(11, 4), torch.zeros(13, 4)).shape == (1, 4)


def test_a_given_shape_function_is_taken() -> None:
    root = traced(toys.Doubled())
    given = {"Doubled": torch.empty_like}
    calls = [[torch.randn(n, 4)] for n in (3, 5)]
    made = root.determine_shape_fct(0, calls, [[torch.randn(3, 9)], [torch.randn(5, 9)]], shape_functions=given)
    assert made(torch.zeros(7, 4)).shape == (7, 4)


class Squares(nn.Module):
    """An output whose length is the square of the input's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * x.shape[0])


def test_a_shape_that_follows_from_no_input_asks_for_a_function() -> None:
    root = traced(Squares(), rows(3, 5, 6))
    with pytest.raises(CaptureError, match="follows from no input"):
        root.build_shape_mapping_indices()
    with pytest.raises(CaptureError):
        root.put_custom_op_inplace()


# --- opaque operators -------------------------------------------------------------------------------


def test_a_module_is_replaced_by_an_operator_and_put_back() -> None:
    model = Nested(nn.Tanh()).eval()
    root = traced(model)
    x = torch.randn(7, 4)
    expected = model(x)
    child = node(root, "layers.1")
    child.put_custom_op_inplace()
    with pytest.raises(OptionError, match="already"):
        child.put_custom_op_inplace()
    assert torch.equal(model(x), expected)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: DYNAMIC},))
    assert any("C_Nested_layers_1" in str(each.target) for each in program.graph.nodes)
    child.remove_custom_op_inplace()
    child.remove_custom_op_inplace()
    assert torch.equal(model(x), expected)
    assert "forward" not in vars(model.layers[1])
    assert not hasattr(torch.ops.diag_lib, "C_Nested_layers_1")


def test_an_operator_writes_to_the_state_that_it_is_given() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = toys.UsesCache()

        def forward(self, x: torch.Tensor, cache: toys.Growing) -> torch.Tensor:
            return self.inner(x, cache) + cache.past.sum()

    with state_adapters(GROWING):
        model = Holder()
        sets = [{"x": torch.randn(1, 4), "cache": toys.Growing(torch.randn(p, 4))} for p in (3, 5)]
        root = traced(model, sets)
        x, past = torch.randn(1, 4), torch.randn(7, 4)
        expected = model(x, toys.Growing(past))
        node(root, "inner").put_custom_op_inplace()
        cache = toys.Growing(past)
        assert torch.equal(model(x, cache), expected)
        assert cache.past.shape == (8, 4)
        node(root, "inner").remove_custom_op_inplace()
        assert root.try_export("fx").is_ok()


# --- exports ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exporter", ["nnef", "fx", "onnx_dynamo", "torch_script"])
def test_each_exporter_exports_and_compares_on_every_set(exporter: str) -> None:
    if exporter in ("onnx_dynamo", "torch_script") and not (find_spec("onnx") and find_spec("onnxscript")):
        with pytest.raises(MissingExtraError, match="onnx"):
            traced(Nested(nn.Tanh())).try_export(exporter)
        return
    root = traced(Nested(nn.Tanh()))
    status = root.try_export(exporter)
    assert status.is_ok(), status.pretty_text()
    assert status.status == StatusExportCode.OK
    assert root.statuses[exporter] is status
    assert root.last_error is None


def test_an_exporter_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from generic_export.debug.piece_by_piece import exporters

    monkeypatch.setattr(exporters, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="needs the package onnx"):
        traced(toys.Doubled()).try_export("onnx_dynamo")


def test_an_exporter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown exporter"):
        traced(toys.Doubled()).try_export("coreml")


@pytest.mark.parametrize("exporter", ["nnef", "fx"])
def test_without_replacement_the_search_goes_on_below_a_failure(exporter: str) -> None:
    root = traced(Nested(DecidedByPython()))
    status = root.try_export(exporter)
    assert status.status == StatusExportCode.FAIL
    assert status.step == "EXPORT"
    assert node(root, "good").statuses[exporter].is_ok()
    assert not node(root, "layers.1").statuses[exporter].is_ok()
    report = root.get_export_report()
    assert f"{exporter}: FAIL -- EXPORT" in report


@pytest.mark.parametrize("exporter", ["nnef", "fx"])
def test_a_failing_module_passes_with_its_children_replaced(exporter: str) -> None:
    root = traced(Nested(DecidedByPython()))
    status = root.try_export(exporter, replace_by_custom_op=True)
    assert status.status == StatusExportCode.OK_CHILDC
    assert not node(root, "layers.1").statuses[exporter].is_ok()


def test_local_never_exports_a_parent_whole() -> None:
    root = traced(Nested(UnsupportedOperator()))
    assert root.try_export("fx", replace_by_custom_op="LOCAL").status == StatusExportCode.OK_CHILDC
    assert node(root, "good").statuses["fx"].status == StatusExportCode.OK


def test_always_makes_the_module_itself_one_operator() -> None:
    root = traced(Nested(DecidedByPython()))
    assert root.try_export("fx", replace_by_custom_op=CustomOpStrategy.ALWAYS).status == StatusExportCode.OK_CUSTOM
    with pytest.raises(OptionError, match="ALWAYS"):
        traced(toys.Doubled()).try_export("nnef", replace_by_custom_op=CustomOpStrategy.ALWAYS)


def test_a_strategy_that_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(OptionError, match="replace_by_custom_op"):
        traced(toys.Doubled()).try_export("fx", replace_by_custom_op={"Doubled": 9})
    with pytest.raises(OptionError, match="'Tripled', which is not there"):
        traced(toys.Doubled()).try_export("fx", replace_by_custom_op={"Tripled": CustomOpStrategy.ALWAYS})
    with pytest.raises(OptionError, match="key 3"):
        traced(toys.Doubled()).try_export("fx", replace_by_custom_op={3: True})  # type: ignore[dict-item]


class FrozenValue(nn.Module):
    """Exports, and is wrong for other sizes than the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.shape[0] if torch.compiler.is_exporting() else 1)


def test_other_numbers_are_a_discrepancy_unless_nobody_asks() -> None:
    root = traced(FrozenValue(), rows(3))
    status = root.try_export("fx")
    assert status.status == StatusExportCode.FAIL_DISC
    assert status.step == "DISC"
    assert traced(FrozenValue(), rows(3)).try_export("fx", discrepancies=False).is_ok()


def test_quiet_false_raises() -> None:
    with pytest.raises(CaptureError, match="EXPORT"):
        traced(Nested(DecidedByPython())).try_export("fx", quiet=False)


def test_reports_show_graphs_and_recordings_when_asked_for() -> None:
    root = traced(toys.Doubled())
    assert root.try_export("fx").is_ok()
    assert "ExportedProgram" in root.get_export_report(exported_program=True)
    text = root.pretty_text(with_dynamic_shape=True)
    for words in (":Doubled", "linear:Linear", "float32[3, 4]@cpu in ", "DYNAMIC"):
        assert words in text
    assert "float32[" not in root.pretty_text(with_inputs=False)


# --- status -----------------------------------------------------------------------------------------


def test_every_combination_of_flags_has_a_name_and_comes_apart_again() -> None:
    flags = [StatusExportCode[n] for n in ("OK", "FAIL", "CHILDC", "CUSTOM", "DISC", "NOINPUT")]
    for count in range(len(flags) + 1):
        for chosen in itertools.combinations(flags, count):
            whole = StatusExportCode.NONE
            for flag in chosen:
                whole |= flag
            assert str(StatusExport(whole, "DISC", "why").status)
            for flag in chosen:
                assert flag in whole
                assert flag not in whole.remove(flag)
            assert whole & StatusExportCode.OK in (StatusExportCode.OK, StatusExportCode.NONE)
    assert str(StatusExportCode.FAIL_CHILDC | StatusExportCode.DISC) == "FAIL_CHILDC_DISC"


def test_a_status_tells_its_reason_short_and_long() -> None:
    status = StatusExport(StatusExportCode.FAIL, "EXPORT", "a reason\nof more than thirty characters in all")
    assert not status.is_ok()
    assert len(status.short_reason) == 30
    assert status.pretty_text().startswith("FAIL EXPORT\na reason")


@pytest.mark.parametrize(
    ("given", "meant"),
    [(True, "ONLY_IF_FAILING"), (False, "NONE"), (3, "LOCAL"), ("ALWAYS", "ALWAYS"), (CustomOpStrategy.NONE, "NONE")],
)
def test_strategies_are_parsed(given: Any, meant: str) -> None:
    assert CustomOpStrategy.of(given) is CustomOpStrategy[meant]
