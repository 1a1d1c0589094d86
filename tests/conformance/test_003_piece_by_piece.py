"""Document 003, piece by piece: every use of it runs. Names and signatures: test_003_signatures.py."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from generic_export.diagnose.piece_by_piece import (
    CustomOpStrategy,
    ModelDiagnoseOutput,
    StatusExportCode,
    trace_execution_piece_by_piece,
    trace_forward_execution,
)
from generic_export.errors import CaptureError, MissingExtraError, OptionError, T2NError

DYNAMIC = Dim.DYNAMIC


class Gate(nn.Module):
    """Decides by the values in Python, which torch.export does not take."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * max(float(x.sum()), 1e-6, key=abs)


class Repeated(nn.Module):
    """Gives as many copies of its input as that has rows: nobody guesses the length."""

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
        return x.repeat(x.shape[0], 1), x * scale


class Block(nn.Module):
    """A gate deep inside, between two layers."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(gate, nn.ReLU())

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        y = self.inner(self.first(x))
        return y if shift is None else y + shift


class Everything(nn.Module):
    """Has parameters of every kind."""

    def forward(self, x: Any, /, y: Any, *rest: Any, flag: bool = True, **more: Any) -> Any:
        return x + y if flag else x


def sets(*sizes: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [((torch.randn(size, 4),), {"shift": torch.randn(size, 4)}) for size in sizes or (3, 5)]


def traced(model: nn.Module, calls: list[Any] | None = None, **options: Any) -> ModelDiagnoseOutput:
    torch.manual_seed(0)
    return trace_execution_piece_by_piece(model, calls or sets(), **options)


def at(root: ModelDiagnoseOutput, path: str) -> ModelDiagnoseOutput:
    return next(node for node in root if node.path == path)


# --- tracing ------------------------------------------------------------------------------------------


def test_a_traced_model_has_the_documented_attributes() -> None:
    model = Block(nn.Tanh())
    root = traced(model)
    assert (root.parent, root.name, root.model, root.level) == (None, "block", model, 0)
    assert root.device == torch.device("cpu")
    assert len(root.inputs) == len(root.outputs) == 2
    args, kwargs = root.inputs[0]
    assert args[0].shape == (3, 4) and set(kwargs) == {"shift"}
    assert list(root.signature.parameters) == ["x", "shift"]
    assert root.forward == model.forward
    assert root.forward_parameter_names == {"x", "shift"}
    assert root.forward_ordered_parameter_names == ["x", "shift"]
    assert root.forward_args is None and root.forward_kwargs is None
    assert root.forward_custom_op_schema is None
    assert not root.forward_need_serialization
    assert (root.exporter, root.last_error, root.exporter_status) == (None, None, None)
    tanh = at(root, "inner.0")
    assert tanh.parent is at(root, "inner") and tanh.level == 2
    assert (tanh.dot_name, tanh.full_name) == ("....0", "0:Tanh")
    assert tanh.custom_op_name == "C_Block_inner_0"
    assert "Tanh" in tanh.module_name_type and "0" in tanh.module_name_type


def test_parameters_of_every_kind_are_told_apart() -> None:
    node = ModelDiagnoseOutput(None, "every", Everything())
    assert node.forward_ordered_parameter_names == ["x", "y", "rest", "flag", "more"]
    assert node.forward_parameter_names == {"x", "y", "flag"}
    assert (node.forward_args, node.forward_kwargs) == ("rest", "more")


def test_the_block_form_fills_the_tree_that_it_gives() -> None:
    model = Block(nn.Tanh())
    with trace_forward_execution(model, 0, None) as root:
        assert isinstance(root, ModelDiagnoseOutput)
        for args, kwargs in sets():
            model(*args, **kwargs)
    assert len(root.inputs) == 2 and len(at(root, "inner.1").outputs) == 2
    assert root.try_export().is_ok()


@pytest.mark.parametrize("left_out", [{nn.Sequential: ""}, {"Sequential": ""}, {nn.Sequential: None}])
def test_an_empty_method_leaves_a_class_and_what_is_in_it_out(left_out: Any) -> None:
    assert [node.path for node in traced(Block(nn.Tanh()), traced_method=left_out)] == ["", "first"]


def test_a_model_that_is_left_out_itself_is_refused() -> None:
    with pytest.raises(OptionError, match="excludes Block itself"):
        traced(Block(nn.Tanh()), traced_method={Block: ""})


def test_verbose_says_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    traced(Block(nn.Tanh()))
    assert capsys.readouterr().out == ""
    root = traced(Block(nn.Tanh()), verbose=2)
    shown = capsys.readouterr().out
    assert "[trace_forward_execution] block:Block: recording 5 modules" in shown
    assert "float32[3, 4]" in shown
    root.try_export(verbose=1)
    assert capsys.readouterr().out == "[try_export] block: Block by fx\n[try_export] block: OK\n"
    at(root, "inner").put_custom_op_inplace(verbose=1)
    at(root, "inner").remove_custom_op_inplace(verbose=1)
    shown = capsys.readouterr().out
    assert "is diag_lib::C_Block_inner(Tensor[] inputs" in shown and "is restored" in shown


# --- a tree made by hand --------------------------------------------------------------------------------


def test_children_and_inputs_are_stored_inputs_as_copies() -> None:
    model = Block(nn.Tanh())
    root = ModelDiagnoseOutput(None, "block", model)
    child = ModelDiagnoseOutput(None, "first", model.first, level=1)
    root.add_child(child)
    assert list(root) == [root, child] and child.parent is root and child.path == "first"
    x = torch.zeros(3, 4)
    root.add_inputs((x,), {"shift": x})
    x += 1.0
    args, kwargs = root.inputs[0]
    assert not args[0].any() and not kwargs["shift"].any()
    with pytest.raises(OptionError, match="add_child"):
        root.add_child(model)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="is already a child of"):
        ModelDiagnoseOutput(None, "other", model).add_child(child)


def test_a_tree_made_by_hand_is_exported_on_the_calls_that_were_added() -> None:
    model = Block(nn.Tanh())
    root = ModelDiagnoseOutput(None, "block", model)
    root.add_child(ModelDiagnoseOutput(root, "first", model.first, 1))
    for args, kwargs in sets():
        root.add_inputs(args, kwargs)
    assert "float32[5, 4]" in root.pretty_text()
    assert root.try_export("nnef").is_ok()
    assert torch.equal(root.outputs[1][0], model(*root.inputs[1][0], **root.inputs[1][1]))
    assert len(root.children[0].inputs) == 2


# --- shapes -------------------------------------------------------------------------------------------


def test_dynamic_shapes_are_guessed() -> None:
    root = traced(Block(nn.Tanh()))
    assert root.guess_dynamic_shapes() == (({0: DYNAMIC},), {"shift": {0: DYNAMIC}})
    nest = [{"a": [torch.zeros(n, 2)], "b": None} for n in (3, 5)]
    assert root.guess_dynamic_shape_object(*nest) == {"a": [{0: DYNAMIC}], "b": None}
    with pytest.raises(CaptureError, match="the place"):
        root.guess_dynamic_shape_object(torch.zeros(2), 3, msg=lambda: "the place")
    with pytest.raises(OptionError):
        root.guess_dynamic_shape_object()


def test_shapes_of_outputs_are_mapped_to_inputs() -> None:
    class Joined(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return y * 2.0, torch.cat([x, y])

    root = traced(Joined(), [(torch.randn(a, 4), torch.randn(b, 4)) for a, b in ((3, 7), (5, 2))])
    same, joined = root.build_shape_mapping_indices()
    assert same == (1, torch.float32, None)
    assert joined[:2] == ((0, 1), torch.float32)
    assert joined[2] is not None and joined[2](torch.zeros(11, 4), torch.zeros(13, 4)).shape == (24, 4)


def test_a_shape_function_is_determined_from_args_and_kwargs() -> None:
    root = traced(Block(nn.Tanh()))
    calls = [((torch.randn(a, 4),), {"past": torch.randn(b, 4)}) for a, b in ((3, 7), (5, 2))]
    outputs = [(torch.randn(4), torch.randn(a + b, 2)) for a, b in ((3, 7), (5, 2))]
    made = root.determine_shape_fct(1, calls, outputs)
    assert made(torch.zeros(11, 4), past=torch.zeros(13, 4)).shape == (24, 2)
    assert root.determine_shape_fct(0, calls, outputs)(torch.zeros(11, 4), torch.zeros(13, 4)).shape == (4,)
    with pytest.raises(CaptureError, match="depends on no input"):
        root.determine_shape_fct(0, calls, [(torch.randn(n),) for n in (1, 9)])
    for wrong in ((2, calls, outputs), (0, calls[:1], outputs), (0, [], [])):
        with pytest.raises(OptionError):
            root.determine_shape_fct(*wrong)


def of_the_first(_output_index: int, *args: Any, **kwargs: Any) -> Any:
    return args[0].new_empty((args[0].shape[0] ** 2, 4)) if _output_index == 0 else None


def as_sizes(*args: Any, _output_index: int, **kwargs: Any) -> Any:
    return (args[0].shape[0] ** 2, args[0].shape[1]) if _output_index == 0 else None


def as_keywords(*args: Any, **kwargs: Any) -> Any:
    return of_the_first(kwargs["_output_index"], *args)


def of_all(x: torch.Tensor) -> Any:
    return x.new_empty((x.shape[0] ** 2, 4)), torch.empty_like(x)


class Repeats(nn.Module):
    """Has a module inside whose output's length depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated = Repeated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        long, short = self.repeated(x)
        return long.sum(0) + short


@pytest.mark.parametrize("function", [of_the_first, as_sizes, as_keywords, of_all])
@pytest.mark.parametrize("key", ["Repeated", "C_Repeats_repeated"])
def test_a_shape_function_is_asked_per_output_and_none_is_learnt(function: Any, key: str) -> None:
    root = traced(Repeats(), [(torch.randn(n, 4),) for n in (3, 5, 6)])
    assert root.try_export(replace_by_custom_op=CustomOpStrategy.LOCAL).status == StatusExportCode.FAIL_CHILDC
    status = root.try_export(replace_by_custom_op=CustomOpStrategy.LOCAL, shape_functions={key: function})
    assert status.status == StatusExportCode.OK_CHILDC, status.reason
    makers = at(root, "repeated").build_shape_mapping_indices({key: function})
    assert makers[0][2] is not None and makers[0][2](torch.zeros(7, 4)).shape == (49, 4)


def test_what_a_shape_function_leaves_open_and_nobody_knows_is_told() -> None:
    root = traced(Repeats(), [(torch.randn(n, 4),) for n in (3, 5, 6)])
    status = root.try_export(
        replace_by_custom_op=CustomOpStrategy.LOCAL, shape_functions={"Repeated": lambda _output_index, *_: None}
    )
    assert not status.is_ok() and "depends on no input" in status.reason


# --- exports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exporter", ["fx", "nnef", "onnx_dynamo", "torch_script", "to_onnx"])
def test_each_exporter_is_accepted_and_leaves_what_it_made(exporter: str) -> None:
    root = traced(Block(nn.Tanh()))
    if exporter not in ("fx", "nnef") and not (find_spec("onnx") and find_spec("onnxscript")):
        with pytest.raises(MissingExtraError, match="onnx"):
            root.try_export(exporter)
        return
    status = root.try_export(exporter)
    assert status.status is StatusExportCode.OK, status.reason
    assert root.exporter == exporter and root.exporter_status is status and root.last_error is None
    assert getattr(root, exporter) is status.exported is not None


@pytest.mark.parametrize("strict", [True, False])
def test_arguments_of_an_exporter_are_laid_over_ours(strict: bool) -> None:
    root = traced(Block(nn.Tanh()))
    assert root.try_export("fx", exporter_kwargs={"strict": strict}).is_ok()
    named = root.try_export("fx", exporter_kwargs={"dynamic_shapes": {"x": {0: Dim("B")}, "shift": {0: Dim("B")}}})
    assert named.is_ok() and "'B'" in str(named.dynamic_shapes)
    assert root.try_export("fx", exporter_kwargs={"dynamic_shapes": root.guess_dynamic_shapes()}).is_ok()
    frozen = root.try_export("fx", exporter_kwargs={"dynamic_shapes": None})
    assert frozen.step == "EVAL"
    with pytest.raises(OptionError, match="'args'"):
        root.try_export("fx", exporter_kwargs={"args": ()})
    assert "unexpected keyword" in root.try_export("fx", exporter_kwargs={"nonsense": 1}).reason
    with pytest.raises(OptionError, match="'strict'"):
        root.try_export("nnef", exporter_kwargs={"strict": False})


@pytest.mark.skipif(not (find_spec("onnx") and find_spec("onnxscript")), reason="onnx is not installed")
@pytest.mark.parametrize("exporter", ["onnx_dynamo", "torch_script", "to_onnx"])
def test_arguments_of_the_onnx_exporters_are_laid_over_ours(exporter: str) -> None:
    root = traced(Block(nn.Tanh()))
    assert root.try_export(exporter, exporter_kwargs={"opset_version": 18, "input_names": ["a", "b"]}).is_ok()


@pytest.mark.parametrize("exporter", ["fx", "nnef"])
def test_without_dynamic_shapes_the_first_call_is_exported(exporter: str) -> None:
    class OneSize(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(1, 4) if x.shape[0] == 1 else x

    root = traced(OneSize(), [(torch.randn(n, 4),) for n in (1, 3)])
    assert not root.try_export(exporter, use_dynamic_shapes=True).is_ok()
    assert not root.try_export(exporter).is_ok()
    status = root.try_export(exporter, use_dynamic_shapes=False)
    assert status.is_ok(), status.reason
    if exporter == "nnef":
        assert {metrics.set_index for metrics in status.exported.metrics} == {0}
    else:
        assert status.dynamic_shapes == ({},)


def test_discrepancies_are_measured_with_the_given_limits_unless_nobody_asks() -> None:
    class Off(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1.5 if torch.compiler.is_exporting() else 1.0)

    root = traced(Off(), [(torch.ones(n, 4),) for n in (3, 5)])
    status = root.try_export()
    assert status.status == StatusExportCode.FAIL | StatusExportCode.DISC and status.step == "DISC"
    assert root.try_export(discrepancies=False).is_ok()
    assert root.try_export(atol=0.6).is_ok() and root.try_export(rtol=0.6).is_ok()


def test_quiet_is_a_status_and_not_quiet_an_error_with_its_cause() -> None:
    root = traced(Block(Gate()))
    assert root.try_export("fx").status is StatusExportCode.FAIL
    assert root.last_error is not None and "Gate" not in [n.true_model_name for n in root if n.last_error is None]
    for exporter in ("fx", "nnef"):
        with pytest.raises(CaptureError, match="EXPORT") as told:
            root.try_export(exporter, quiet=False)
        assert exporter == "nnef" or told.value.__cause__ is not None


# --- custom operators ---------------------------------------------------------------------------------


def test_a_module_is_an_operator_until_it_is_put_back() -> None:
    model = Block(Gate())
    root = traced(model)
    (x,), kwargs = sets(7)[0]
    expected = model(x, **kwargs)
    gate = at(root, "inner.0")
    gate.put_custom_op_inplace()
    assert gate.forward_custom_op_schema == "diag_lib::C_Block_inner_0(Tensor[] inputs, str key) -> Tensor[]"
    assert torch.equal(model(x, **kwargs), expected)
    program = torch.export.export(model, (x,), kwargs)
    assert any("C_Block_inner_0" in str(node.target) for node in program.graph.nodes)
    gate.remove_custom_op_inplace()
    assert "forward" not in vars(model.inner[0])


@pytest.mark.parametrize("exporter", ["fx", "nnef"])
@pytest.mark.parametrize("key", [Gate, "Gate", "inner.0", "C_Block_inner_0"])
def test_chosen_modules_are_operators_in_whatever_is_around_them(exporter: str, key: Any) -> None:
    root = traced(Block(Gate()))
    status = root.try_export(exporter, replace_by_custom_op={key: CustomOpStrategy.ALWAYS})
    assert status.status == StatusExportCode.OK_CHILDC, status.reason
    assert at(root, "inner").statuses[exporter].status == StatusExportCode.OK_CHILDC
    assert at(root, "first").statuses[exporter].status is StatusExportCode.OK
    gate = at(root, "inner.0").exporter_status
    assert gate is None if exporter == "nnef" else gate is not None and gate.status == StatusExportCode.OK_CUSTOM


def test_a_dict_gives_each_class_its_own_strategy_names_first() -> None:
    root = traced(Block(Gate()))
    chosen = {nn.Sequential: CustomOpStrategy.ONLY_IF_FAILING, "block": CustomOpStrategy.NONE, Block: True}
    assert root.try_export(replace_by_custom_op=chosen).status is StatusExportCode.FAIL
    assert at(root, "inner").statuses["fx"].status == StatusExportCode.OK_CHILDC
    assert at(root, "inner.0").statuses["fx"].status is StatusExportCode.FAIL


@pytest.mark.parametrize(
    ("strategy", "status"),
    [
        (False, StatusExportCode.FAIL),
        (CustomOpStrategy.NONE, StatusExportCode.FAIL),
        (True, StatusExportCode.OK_CHILDC),
        (CustomOpStrategy.ONLY_IF_FAILING, StatusExportCode.OK_CHILDC),
        (CustomOpStrategy.LOCAL, StatusExportCode.OK_CHILDC),
        (CustomOpStrategy.ALWAYS, StatusExportCode.OK_CUSTOM),
    ],
)
def test_each_strategy_does_what_it_is_called(strategy: Any, status: StatusExportCode) -> None:
    root = traced(Block(Gate()))
    assert root.try_export("fx", replace_by_custom_op=strategy).status == status


# --- reports and the environment ------------------------------------------------------------------------


def test_reports_show_what_they_are_asked_for() -> None:
    root = traced(Block(Gate()))
    root.try_export(replace_by_custom_op=True)
    plain = root.get_export_report()
    assert [line.split()[0] for line in plain.splitlines()] == ["block", "..first", "..inner", "....0", "....1"]
    assert "OK_CHILDC" in plain and "ExportedProgram" not in plain
    assert isinstance(root.fx, ExportedProgram)  # type: ignore[attr-defined]
    assert "ExportedProgram" in root.get_export_report(exported_program=True)
    assert "placeholder" in root.get_export_report(fx=True)


@pytest.mark.parametrize(
    ("flag", "word"),
    [("with_shape", "[3, 4]"), ("with_min_max", ".."), ("with_device", "@cpu"), ("with_inputs", "float32")],
)
def test_text_leaves_out_what_nobody_asks_for(flag: str, word: str) -> None:
    root = traced(nn.Linear(4, 4), [(torch.randn(n, 4),) for n in (3, 5)])
    assert word in root.pretty_text() and word not in root.pretty_text(**{flag: False})
    assert "DYNAMIC" in root.pretty_text(with_dynamic_shape=True) and "DYNAMIC" not in root.pretty_text()


def test_the_environment_names_a_module_to_speak_of_and_not_to_catch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = traced(Block(Gate()))
    monkeypatch.setenv("DIAGNAME", "inner.0")
    with pytest.raises(CaptureError, match="0:Gate"):
        root.try_export()
    shown = capsys.readouterr().out
    assert "[try_export] ....0: Gate by fx" in shown and "block" not in shown
    monkeypatch.setenv("DIAGNAME", "elsewhere")
    assert not root.try_export().is_ok()
    assert capsys.readouterr().out == ""


def test_the_environment_asks_for_statuses_and_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = traced(Block(nn.Tanh()))
    monkeypatch.setenv("DIAGPRINTSTATUS", "1")
    root.try_export()
    assert capsys.readouterr().out == "OK\n"
    monkeypatch.setenv("DIAGPRINTSTATUS", "0")
    monkeypatch.setenv("DIAGPRINTEXPORT", "1")
    root.try_export()
    assert "ExportedProgram" in capsys.readouterr().out


def test_what_cannot_be_done_is_told_by_our_own_errors() -> None:
    for wrong in (lambda: traced(Block(nn.Tanh()), [3]), lambda: trace_execution_piece_by_piece(nn.ReLU(), [])):
        with pytest.raises(T2NError):
            wrong()
    root = traced(Block(nn.Tanh()))
    for options in ({"exporter": "coreml"}, {"replace_by_custom_op": "NEVER"}, {"replace_by_custom_op": {"Gate": 1}}):
        with pytest.raises(OptionError):
            root.try_export(**options)  # type: ignore[arg-type]


def test_calls_that_differ_in_rank_are_refused_where_one_operator_is_wanted() -> None:
    class TwoRanks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(x)[0])

    root = traced(TwoRanks(), [(torch.randn(n, 4),) for n in (3, 5)])
    with pytest.raises(CaptureError, match="other ranks"):
        at(root, "linear").put_custom_op_inplace()
    assert root.try_export(replace_by_custom_op=True).is_ok()
    with pytest.raises(CaptureError, match="other ranks"):
        root.determine_shape_fct(0, [[torch.zeros(2)], [torch.zeros(2, 2)]], [[torch.zeros(2)], [torch.zeros(2)]])
    with pytest.raises(CaptureError, match="different ranks"):
        root.determine_shape_fct(0, [[torch.zeros(2)]] * 2, [[torch.zeros(2)], [torch.zeros(2, 2)]])
