"""What models do to whoever records them, one test per case, each through the real engine where there is something to run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.debug.record.observe import completed
from generic_export.diagnose import (
    Diagnosis,
    LeafKind,
    ObservationError,
    Outcome,
    Piece,
    Stage,
    StateAdapter,
    Verdict,
    diagnose,
    infer_axes,
    observe,
    register_state_adapter,
    state_adapters,
)
from generic_export.errors import OptionError, RegistrationError
from tests.generic_export.debug import toys
from tests.generic_export.debug.planted import DecidedByPython, line_of


def rows(*counts: int, width: int = 4) -> list[tuple[torch.Tensor]]:
    """Return input sets of one tensor each, with so many rows."""
    return [(torch.randn(count, width),) for count in counts]


def diagnosed(model: nn.Module, sets: list[Any], **options: Any) -> Diagnosis:
    torch.manual_seed(0)
    model.eval()
    return diagnose(model, TractNNEF(), sets, **options)


def the_piece(found: Diagnosis, path: str) -> tuple[Piece, Verdict]:
    (piece,) = [piece for piece in found.pieces if piece.path == path]
    return piece, found.verdict(piece.key)


GROWING = StateAdapter(
    toys.Growing,
    flatten=lambda cache: {} if cache.past is None else {"past": cache.past},
    copy=lambda cache: toys.Growing(cache.past),
    assign=lambda cache, tensors: setattr(cache, "past", tensors["past"]),
    blank=lambda _name, after: after[:0],
)


# --- input sets -------------------------------------------------------------------------------------


def test_one_input_set_is_exported_static_and_the_report_says_so() -> None:
    found = diagnosed(toys.Doubled(), rows(5))
    assert found.ok
    assert found.axes.symbols == ()
    assert any("no dynamic axis could be inferred" in warning for warning in found.axes.warnings)
    assert found.pieces[0].inputs[0].axes == ("5", "4")


def test_two_sets_of_equal_sizes_are_static_with_a_warning() -> None:
    found = diagnosed(toys.Doubled(), rows(5, 5))
    assert found.ok
    assert any("same sizes" in warning for warning in found.axes.warnings)


def test_an_axis_that_is_empty_in_one_set_is_compared_there_and_not_traced_with() -> None:
    found = diagnosed(toys.Mask(), [mask_set(5, 7), mask_set(3, 0), mask_set(1, 2)])
    assert found.ok
    assert {each.set_index for each in found.verdicts[0].metrics} == {0, 1, 2}


def mask_set(steps: int, past: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(steps, 4), torch.randn(past, 4), torch.randn(steps, steps + past)


def test_a_size_that_is_the_sum_of_two_others_is_said_so_and_exported_so() -> None:
    found = diagnosed(
        toys.Mask(), [mask_set(5, 7), mask_set(3, 11), mask_set(2, 2)], axes={"x": {0: "S"}, "past": {0: "P"}}
    )
    assert found.ok
    assert found.pieces[0].inputs[2].axes == ("S", "S+P")


def test_an_axis_of_one_in_every_set_is_static_with_a_warning_that_names_it_unless_overridden() -> None:
    sets = [(torch.randn(1, count, 4),) for count in (3, 5)]
    found = diagnosed(toys.Doubled(), sets)
    assert found.pieces[0].inputs[0].axes[0] == "1"
    assert any("axis 0 of x is 1 in every set" in warning for warning in found.axes.warnings)
    declared = diagnosed(toys.Doubled(), sets, axes={"x": {0: "B"}}, strategy="whole")
    assert declared.ok
    assert declared.pieces[0].inputs[0].axes[0] == "B"


def test_an_override_of_an_input_that_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match="no input 'y'"):
        diagnosed(toys.Doubled(), rows(3, 5), axes={"y": {0: "B"}})


def test_two_symbols_of_equal_sizes_are_reported() -> None:
    sets = [(torch.randn(n, 4), torch.randn(n, 4), torch.randn(n, 2 * n)) for n in (3, 5)]
    found = diagnosed(toys.Mask(), sets, axes={"x": {0: "S"}, "past": {0: "P"}}, strategy="whole")
    assert any("S and P" in warning or "P and S" in warning for warning in found.axes.warnings)


def test_ranks_that_differ_make_two_pieces() -> None:
    found = diagnosed(toys.RankMatters(), [(torch.randn(2, n, 4),) for n in (3, 5)], strategy="leaves")
    assert found.ok
    ranks = [len(piece.inputs[0].sizes) for piece in found.pieces if piece.class_name == "Linear"]
    assert sorted(ranks) == [2, 3]


def test_an_optional_argument_that_is_missing_in_some_calls_makes_another_piece() -> None:
    x = torch.randn(3, 4)
    shifted = {"x": torch.randn(5, 4), "shift": torch.randn(5, 4)}
    found = diagnosed(toys.KeywordsAndRest(), [(x,), shifted, (torch.randn(7, 4),)])
    assert found.ok
    kinds = {tuple(leaf.kind for leaf in piece.inputs if leaf.name == "shift") for piece in found.pieces}
    assert kinds == {(LeafKind.NONE,), (LeafKind.TENSOR,)}
    assert sorted(piece.sets for piece in found.pieces) == [(0, 2), (1,)]


def test_every_kind_of_parameter_is_bound_to_its_name() -> None:
    def tensors(count: int) -> list[torch.Tensor]:
        return [torch.randn(count, 4) for _ in range(4)]

    sets: list[Any] = []
    for count in (3, 5):
        x, first, second, less = tensors(count)
        sets.append(((x, first, second), {"scale": 3.0, "less": less}))
    found = diagnosed(toys.KeywordsAndRest(), sets)
    assert found.ok
    leaves = {leaf.name: leaf for leaf in found.pieces[0].inputs}
    assert set(leaves) == {"x", "rest.0", "rest.1", "scale", "shift", "less"}
    assert leaves["scale"].value == "3.0"
    assert leaves["shift"].kind is LeafKind.NONE


def test_the_same_call_written_in_two_ways_is_one_piece() -> None:
    x, y = torch.randn(3, 4), torch.randn(5, 4)
    found = diagnosed(toys.KeywordsAndRest(), [(x,), {"x": y, "scale": 2.0}], strategy="whole")
    assert len(found.pieces) == 1
    assert found.ok


# --- modules ----------------------------------------------------------------------------------------


def test_a_module_called_several_times_is_one_piece_with_several_calls() -> None:
    found = diagnosed(toys.SharedTwice(), rows(3, 5), strategy="leaves")
    assert found.ok
    piece, _ = the_piece(found, "block")
    assert piece.calls == 6
    assert piece.paths == ("block", "again")


def test_tied_parameters_are_one_weight_file_and_both_names_are_listed(tmp_path: Path) -> None:
    found = diagnosed(toys.Tied(), rows(3, 5), strategy="whole", out=tmp_path)
    assert found.ok
    assert found.pieces[0].tied == (("first.weight", "second.weight"),)
    assert found.pieces[0].parameter_count == 16


def test_modules_that_are_not_called_are_neutral() -> None:
    found = diagnosed(toys.SomeUnused(), rows(3, 5, 2), strategy="leaves")
    assert found.unexercised == ("never",)
    always, _ = the_piece(found, "always")
    assert always.sets == (0, 1, 2)
    assert "sometimes" in always.paths
    only = diagnosed(toys.SomeUnused(), rows(3, 2), strategy="leaves")
    assert set(only.unexercised) == {"never", "sometimes"}
    assert only.ok


def test_containers_are_transparent_and_paths_are_those_of_named_modules() -> None:
    model = toys.Containers()
    found = diagnosed(model, rows(3, 5), strategy="leaves")
    assert found.ok
    paths = {path for piece in found.pieces for path in piece.paths}
    assert paths == {"", "layers.0", "layers.1", "heads.a", "heads.b", "blocks.0.0"}
    assert paths <= set(dict(model.named_modules()))


# --- results ----------------------------------------------------------------------------------------


def test_a_dataclass_of_nested_tuples_with_none_is_flattened_with_names() -> None:
    found = diagnosed(toys.Structured(), rows(3, 5))
    assert found.ok
    outputs = {leaf.name: leaf for leaf in found.pieces[0].outputs}
    assert set(outputs) == {"hidden", "extra.0", "extra.1", "count", "label"}
    assert outputs["extra.0"].kind is LeafKind.NONE
    assert outputs["count"].value == "3"
    assert {each.name for each in found.verdicts[0].metrics} == {"hidden", "extra.1"}


def test_an_output_that_is_no_tensor_is_a_constant_and_one_that_varies_is_reported() -> None:
    found = diagnosed(toys.SaysItsLength(), rows(3, 5))
    assert any("output_1 is no tensor and differs" in note for note in found.pieces[0].notes)
    steady = diagnosed(toys.Structured(), rows(3, 5))
    assert not steady.pieces[0].notes


def test_an_input_handed_back_is_an_output_with_its_own_name() -> None:
    found = diagnosed(toys.HandsBack(), rows(3, 5))
    assert found.ok
    assert found.pieces[0].outputs[0].alias_of == "x"
    assert {each.name for each in found.verdicts[0].metrics} == {"output_0", "output_1"}


def test_writing_to_an_input_is_seen_exported_as_an_output_and_the_caller_is_told() -> None:
    found = diagnosed(toys.WritesToInput(), rows(3, 5))
    assert found.ok
    assert found.pieces[0].inputs[0].written
    assert {each.name for each in found.verdicts[0].metrics} == {"output", "out_x"}
    assert any("writes to its input x" in note for note in found.pieces[0].notes)


def test_a_child_that_writes_to_its_input_can_be_left_out() -> None:
    found = diagnosed(toys.CallsWriter(), rows(3, 5), strategy="isolate")
    assert found.ok
    _, verdict = the_piece(found, "")
    assert verdict.isolated
    assert verdict.stage is Stage.COMPARE


# --- states -----------------------------------------------------------------------------------------


def cache_sets(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"x": torch.randn(s, 4), "cache": toys.Growing(torch.randn(p, 4))} for s, p in sizes]


def test_a_cache_written_in_place_is_an_input_and_an_output() -> None:
    sets = [{"x": torch.randn(1, 4), "cache": toys.Growing(torch.randn(p, 4))} for p in (3, 5, 0)]
    with state_adapters(GROWING):
        found = diagnosed(toys.UsesCache(), sets, axes={"cache.past": {0: "P"}})
    assert found.ok
    (past,) = [leaf for leaf in found.pieces[0].inputs if leaf.name == "cache.past"]
    assert past.written
    assert past.axes == ("P", "4")
    assert {each.name for each in found.verdicts[0].metrics} == {"output", "out_cache.past"}


def test_an_empty_cache_counts_as_one_of_length_zero() -> None:
    sets = [{"x": torch.randn(1, 4), "cache": toys.Growing(torch.randn(3, 4) if p else None)} for p in (1, 0)]
    with state_adapters(GROWING):
        found = diagnosed(toys.UsesCache(), sets)
    assert found.ok
    assert len(found.pieces) == 1
    assert found.axes.axes[0].sizes == (3, 0)


def test_a_cache_created_inside_is_an_output() -> None:
    with state_adapters(GROWING):
        found = diagnosed(toys.UsesCache(), rows(1, 1))
    assert found.ok
    assert [leaf.name for leaf in found.pieces[0].outputs] == ["output_0", "output_1.past"]


def test_an_unknown_cache_is_a_verdict_that_says_how_to_register_it() -> None:
    found = diagnosed(toys.UsesCache(), cache_sets((1, 3), (1, 5)))
    (culprit,) = found.culprits()
    assert culprit.verdict.stage is Stage.CAPTURE
    assert culprit.verdict.error is not None
    assert culprit.verdict.error.kind == "UnknownStateError"
    assert "register_state_adapter" in culprit.verdict.error.hint
    assert any("no state adapter" in warning for warning in found.warnings)


def test_a_class_has_one_adapter() -> None:
    with state_adapters(GROWING), pytest.raises(RegistrationError, match="Growing"):
        register_state_adapter(StateAdapter(toys.Growing, lambda _: {}, lambda c: c, lambda _c, _t: None))


# --- what cannot be exported ------------------------------------------------------------------------


def test_a_data_dependent_branch_is_told_with_line_and_hint() -> None:
    found = diagnosed(nn.Sequential(nn.Linear(4, 4), DecidedByPython()), rows(3, 5))
    (culprit,) = found.culprits()
    assert culprit.piece.path == "1"
    assert culprit.verdict.stage is Stage.CAPTURE
    assert culprit.source == line_of(DecidedByPython, "the decision")
    assert culprit.verdict.error is not None
    assert culprit.verdict.error.hint


def test_random_results_are_told_before_anything_else_is_blamed() -> None:
    found = diagnosed(nn.Sequential(nn.Linear(4, 4), toys.Noise()), rows(3, 5))
    (culprit,) = found.culprits()
    assert culprit.piece.class_name == "Noise"
    assert culprit.verdict.stage is Stage.CAPTURE
    assert culprit.verdict.error is not None
    assert culprit.verdict.error.kind == "NonDeterministicError"


def test_training_mode_is_left_and_restored_with_a_warning() -> None:
    model = toys.WithDropout().train()
    found = diagnose(model, TractNNEF(), rows(3, 5))
    assert found.ok
    assert any("training mode" in warning for warning in found.warnings)
    assert model.training
    assert model.dropout.training


def test_a_fault_in_a_parents_own_code_is_told_from_its_childrens() -> None:
    found = diagnosed(toys.FailsAloneOnly(), rows(3, 5))
    (culprit,) = found.culprits()
    assert culprit.piece.path == ""
    assert culprit.own_code
    assert culprit.verdict.isolated
    assert culprit.source == line_of(toys.FailsAloneOnly, "own code")
    _, linear = the_piece(found, "linear")
    assert linear.outcome is Outcome.OK


# --- element types ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rms_share"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
)
def test_each_element_type_has_its_own_limits(dtype: torch.dtype, rms_share: float) -> None:
    model = toys.Doubled().to(dtype)
    sets = [(torch.randn(count, 4, dtype=dtype),) for count in (30, 50)]
    found = diagnosed(model, sets, strategy="leaves")
    assert found.ok
    for verdict in found.verdicts:
        for comparison in verdict.metrics:
            assert comparison.allowed >= rms_share * comparison.rms * 0.99
    if dtype is torch.bfloat16:
        assert any("bfloat16" in note for verdict in found.verdicts for note in verdict.notes)


# --- recording --------------------------------------------------------------------------------------


def test_tensors_beyond_the_budget_are_computed_again() -> None:
    model = toys.SharedTwice().eval()
    with observe(model, budget=200) as recording, torch.no_grad():
        for (x,) in rows(3, 5, 7):
            model(x)
    assert any(not recorded.whole for recorded in recording.calls)
    assert all(completed(recording, recorded).whole for recorded in recording.calls)
    assert recording.store.bytes < sum(h.nbytes for r in recording.calls for g in r.groups() for h in g.values())
    found = diagnose(recording, TractNNEF(), strategy="leaves")
    assert found.ok
    assert {m.set_index for m in the_piece(found, "block")[1].metrics} == {0, 1, 2}


def test_a_model_that_computes_something_else_again_is_told() -> None:
    model = nn.Sequential(toys.Noise(), nn.Linear(4, 4))
    with observe(model, budget=0) as recording, torch.no_grad():
        for (x,) in rows(3, 5):
            model(x)
    later = [r for r in recording.calls if not r.whole and r.call.class_name == "Linear"]
    with pytest.raises(ObservationError, match="other numbers"):
        completed(recording, later[0])


def test_an_exception_while_recording_keeps_its_type_and_leaves_nothing_behind() -> None:
    model = toys.Raises().eval()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="please stop") as caught, observe(model) as recording:
        model(torch.randn(3, 4))
        model(torch.randn(7, 4))
    assert any("recorded in module inner (RaisesInside, toys.py:" in note for note in caught.value.__notes__)
    assert len(caught.value.__notes__) == 1
    assert [recorded.call.set_index for recorded in recording.calls] == [0, 0]
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_the_model_comes_back_untouched() -> None:
    model = toys.Containers()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    diagnosed(model, rows(3, 5))
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_recording_belongs_to_one_thread() -> None:
    model = toys.Doubled().eval()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            model(torch.randn(3, 4))
        except BaseException as error:
            errors.append(error)

    with observe(model) as recording:
        model(torch.randn(5, 4))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert [type(error) for error in errors] == [ObservationError]
    assert len(recording.roots()) == 1


def test_a_model_run_by_one_other_thread_is_recorded() -> None:
    model = toys.Doubled().eval()
    with observe(model) as recording:
        thread = threading.Thread(target=model, args=(torch.randn(3, 4),))
        thread.start()
        thread.join()
    assert len(recording.roots()) == 1


def test_calls_beyond_the_limit_pass_unrecorded() -> None:
    model = toys.SharedTwice().eval()
    with observe(model, max_calls=2) as recording:
        for (x,) in rows(3, 5, 7, 9):
            model(x)
    assert len(recording.roots()) == 2


# --- wrappers ---------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A wrapper as adapters are put around a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.base_layer(x, *args, **kwargs) + self.up(self.down(x))


def test_an_adapter_around_a_layer_is_a_piece_like_any_other() -> None:
    found = diagnosed(nn.Sequential(Lora(nn.Linear(4, 4)), nn.ReLU()), rows(3, 5), strategy="leaves")
    assert found.ok
    assert "0.base_layer" in {path for piece in found.pieces for path in piece.paths}


def test_hooks_that_move_weights_are_left_to_do_their_work() -> None:
    model = toys.Doubled().eval()
    weights = {name: tensor.clone() for name, tensor in model.linear.named_parameters()}
    moves: list[str] = []

    def bring(module: nn.Module, args: Any) -> None:
        moves.append("in")
        for name, tensor in weights.items():
            setattr(module, name, nn.Parameter(tensor.clone()))

    def take(module: nn.Module, args: Any, output: Any) -> None:
        moves.append("out")
        for name, tensor in weights.items():
            setattr(module, name, nn.Parameter(tensor.to("meta")))

    model.linear.register_forward_pre_hook(bring)
    model.linear.register_forward_hook(take)
    x, y = torch.randn(3, 4), torch.randn(5, 4)
    expected = torch.relu(nn.functional.linear(x, weights["weight"], weights["bias"])) * 2
    with observe(model) as recording, torch.no_grad():
        assert torch.equal(model(x), expected)
        model(y)
    assert moves == ["in", "out"] * 2
    assert {recorded.call.path for recorded in recording.calls} == {"", "linear"}


def test_a_compiled_module_is_recorded_as_a_whole() -> None:
    model = nn.Sequential(torch.compile(toys.Doubled(), backend="eager"), nn.ReLU()).eval()
    with observe(model) as recording, torch.no_grad():
        for (x,) in rows(3, 5):
            model(x)
    assert {recorded.call.path for recorded in recording.calls} == {"", "0", "1"}


def test_a_quantised_module_is_recorded_and_tried() -> None:
    linear = torch.ao.nn.quantized.dynamic.Linear(4, 4)
    model = nn.Sequential(linear, nn.ReLU()).eval()
    found = diagnosed(model, rows(3, 5), strategy="failing", atol=0.1)
    assert {piece.path for piece in found.pieces} == {"", "0", "1"}
    assert all(verdict.outcome is not Outcome.NOT_TRIED for verdict in found.verdicts)


# --- free functions ---------------------------------------------------------------------------------


def test_a_function_of_the_same_file_is_a_piece_when_asked_for() -> None:
    model = toys.CallsFunction()
    original = toys.halved
    found = diagnosed(model, rows(3, 5), functions=True, strategy="leaves")
    assert found.ok
    assert toys.halved is original
    piece, verdict = the_piece(found, ":halved")
    assert piece.class_name == "halved"
    assert verdict.outcome is Outcome.OK
    assert {leaf.name: leaf.value for leaf in piece.inputs}["by"] == "4.0"
    without = diagnosed(model, rows(3, 5))
    assert [each.path for each in without.pieces] == [""]


# --- axes -------------------------------------------------------------------------------------------


def test_symbols_are_shared_by_equal_sizes_and_sums_are_found() -> None:
    model = toys.Mask()
    with observe(model) as recording:
        for steps, past in ((5, 7), (3, 11), (2, 13)):
            model(*mask_set(steps, past))
    _, report = infer_axes(recording)
    sizes: Mapping[tuple[str, int], str] = {(axis.leaf, axis.axis): axis.size for axis in report.axes}
    assert sizes["x", 0] == sizes["mask", 0]
    assert sizes["mask", 1] == f"{sizes['x', 0]}+{sizes['past', 0]}"
