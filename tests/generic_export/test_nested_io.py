"""Arguments and results of any shape: dicts, dataclasses, tuples, keyword arguments; names; sizes given as Dims; clear refusals."""

from __future__ import annotations

import logging
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import CaptureError, OptionError, SpecializedAxisError
from generic_export.inference_target.tract.engines.wheel import TractWheel

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor
    features: list[torch.Tensor]
    scale: float = 2.0


@dataclass
class Result:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


class Nested(nn.Module):
    def forward(self, batch: Batch, extra: dict[str, torch.Tensor], *, pair: Pair | None = None) -> Result:
        total = batch.features[0] * batch.scale + batch.features[1] + extra["bias"]
        if pair is not None:
            total = total + pair.left - pair.right
        return Result(total + batch.ids, (total, {"last": total * 2}))


def export(tmp_path: Path, model: nn.Module, args: Any, **options: Any) -> list[list[tuple[str, tuple[str, ...]]]]:
    target = options.pop("target", None) or TractNNEF()
    archive = export_model_to_nnef(model, args, tmp_path / "m", target, compression_level=None, **options)
    with TractWheel().load(archive) as engine:
        return [[(fact.name, fact.shape) for fact in facts] for facts in (engine.inputs, engine.outputs)]


def names(facts: list[list[tuple[str, tuple[str, ...]]]]) -> list[list[str]]:
    return [[name for name, _ in side] for side in facts]


def test_nested_arguments_and_results_have_dotted_names(tmp_path: Path) -> None:
    x = torch.randn(3)
    batch = Batch(torch.arange(3), [x, x + 1])
    pair = Pair(torch.randn(3), torch.randn(3))
    facts = export(tmp_path, Nested(), (batch, {"bias": torch.randn(3)}), kwargs={"pair": pair})
    assert names(facts)[0] == [
        "batch_ids", "batch_features_0", "batch_features_1", "extra_bias", "pair_left", "pair_right"
    ]  # fmt: skip
    text = (tmp_path / "m" / "graph.nnef").read_text()
    assert "logits, hidden_0, hidden_1_last" in text
    assert batch.scale == 2.0


def test_dynamic_axes_of_nested_inputs_by_dotted_name_and_by_dim(tmp_path: Path) -> None:
    size = torch.export.Dim("N", min=2, max=64)
    axes = {name: {0: size} for name in ("batch.ids", "batch.features.0", "batch.features.1", "extra.bias")}
    x = torch.randn(3)
    args = (Batch(torch.arange(3), [x, x + 1]), {"bias": torch.randn(3)})
    facts = export(tmp_path, Nested(), args, target=TractNNEF(dynamic_axes=axes))
    assert {shape for _, shape in facts[0]} == {("N",)}
    text = (tmp_path / "m" / "graph.nnef").read_text()
    assert "extension tract_assert N >= 2;" in text
    assert "extension tract_assert N <= 64;" in text


def test_model_outputs_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=11, **sizes)
    model = transformers.BertModel(config)
    facts = export(tmp_path, model, (), kwargs={"input_ids": torch.arange(5)[None], "output_hidden_states": True})
    assert names(facts)[0] == ["input_ids"]
    text = (tmp_path / "m" / "graph.nnef").read_text()
    assert "last_hidden_state, pooler_output, hidden_states_0, hidden_states_1" in text


class Returns(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        return {"x2": x * 2, "other": self.what}


@pytest.mark.parametrize(("what", "kind"), [("text", "str"), ({1}, "set")])
def test_results_that_are_no_tensors_are_refused_by_name(tmp_path: Path, what: Any, kind: str) -> None:
    with pytest.raises(CaptureError, match=f"output 'other' is a {kind}, not a tensor"):
        export(tmp_path, Returns(what), torch.randn(2))


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x2": x * 2, "half": x.shape[0] // 2, "three": 3, "whole": True, "part": 0.5}


def test_numbers_and_sizes_are_results_of_rank_0(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes={"x": {0: "N"}})
    archive = export_model_to_nnef(Counts(), torch.randn(4), tmp_path / "m", target, compression_level=None)
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        _, *numbers = engine.run([np.ones(9, np.float32)])
    assert [number.item() for number in numbers] == [4, 3, True, 0.5]
    assert [number.dtype for number in numbers] == [np.int64, np.int64, np.bool_, np.float32]


class Point(NamedTuple):
    x: torch.Tensor
    count: int = 2
    nothing: None = None


class Mixed(nn.Module):
    def forward(self, parts: dict[str, Any], flag: int, mask: torch.Tensor | None = None) -> tuple[Any, ...]:
        point = parts["inner"]["point"]
        total = point.x * point.count + parts["inner"]["more"][0] * flag
        total = total if mask is None else total * mask
        return Point(total, total.shape[0]), {"deep": {"list": [total * 2, None, (total - point.x,)]}}, None


def test_ints_and_none_among_nested_tensors_at_three_sizes(tmp_path: Path) -> None:
    def given(n: int) -> tuple[Any, ...]:
        return {"inner": {"point": Point(torch.randn(n, 3)), "more": [torch.randn(n, 3), None]}, "flag": 7}, 4, None

    axes = {name: {0: "N"} for name in ("parts.inner.point.x", "parts.inner.more.0")}
    archive = export_model_to_nnef(
        Mixed(), given(4), tmp_path / "m", TractNNEF(dynamic_axes=axes), compression_level=None
    )
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        for size in (4, 1, 9):
            parts, flag, _ = given(size)
            point, more, _ = Mixed()(parts, flag)
            answers = engine.run([parts["inner"]["point"].x.numpy(), parts["inner"]["more"][0].numpy()])
            wanted = [point.x, torch.tensor(point.count), more["deep"]["list"][0], more["deep"]["list"][2][0]]
            for answer, expected in zip(answers, wanted, strict=True):
                np.testing.assert_allclose(answer, expected.numpy(), rtol=1e-6)


def test_none_is_left_out(tmp_path: Path) -> None:
    export(tmp_path, Returns(None), torch.randn(2))
    assert "-> (x2)" in (tmp_path / "m" / "graph.nnef").read_text()


def test_arguments_that_the_forward_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="does not accept these arguments"):
        export(tmp_path, Returns(None), (torch.randn(2), torch.randn(2)))


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y, x - y


def test_numbers_of_names(tmp_path: Path) -> None:
    args = (torch.randn(2), torch.randn(2))
    with pytest.raises(OptionError, match="2 input tensors, but 1 input names"):
        export(tmp_path, TwoInputs(), args, input_names=["a"])
    facts = export(
        tmp_path, TwoInputs(), args, input_names=["a"], output_names=["s", "d", "z"], check_io_names_qte_match=False
    )
    assert names(facts)[0] == ["a", "y"]
    assert "-> (s, d)" in (tmp_path / "m" / "graph.nnef").read_text()


def test_an_output_with_the_name_of_an_input(tmp_path: Path) -> None:
    args, options = (torch.randn(2), torch.randn(2)), {"input_names": ["x", "y"], "output_names": ["x", "z"]}
    with pytest.raises(OptionError, match="'x'"):
        export(tmp_path, TwoInputs(), args, **options)
    export(tmp_path, TwoInputs(), args, **options, allow_same_io_names=True)
    assert "-> (x_output, z)" in (tmp_path / "m" / "graph.nnef").read_text()
    with pytest.raises(OptionError, match="'a_b'"):
        export(tmp_path, TwoInputs(), args, input_names=["a.b", "a_b"])


def test_the_log_says_the_stages_and_keeps_its_level(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("generic_export")
    before = logger.level
    export(tmp_path, TwoInputs(), (torch.randn(2), torch.randn(2)), log_level="info")
    assert logger.level == before
    assert [record.message.split()[0] for record in caplog.records if record.name == "generic_export"] == [
        "captured", "translated:", "wrote", "checked"
    ]  # fmt: skip


def test_one_tensor_given_twice_is_two_inputs(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    target = TractNNEF(dynamic_axes={"x": {0: "N"}, "y": {0: "N"}})
    facts = export(tmp_path, TwoInputs(), (x, x), target=target)
    assert names(facts)[0] == ["x", "y"]


class FrozenByPython(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [x[index] for index in range(x.shape[0])]
        return torch.stack(rows) * 2


class FrozenByAdd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(3)


@pytest.mark.parametrize("model", [FrozenByPython(), FrozenByAdd()])
def test_an_axis_that_the_model_freezes_names_the_line(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(SpecializedAxisError, match=r"at test_nested_io\.py:\d+: a dynamic axis is restricted"):
        export(tmp_path, model, torch.randn(3), target=TractNNEF(dynamic_axes={"x": {0: "N"}}))


def test_hints_without_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no name"):
        export(
            tmp_path,
            TwoInputs(),
            (torch.randn(2),) * 2,
            target=TractNNEF(dynamic_axes={"x": {0: torch.export.Dim.DYNAMIC}}),
        )


def test_the_forward_is_given_back(tmp_path: Path) -> None:
    model = TwoInputs()
    export(tmp_path, model, (torch.randn(2), torch.randn(2)))
    assert "forward" not in vars(model)
    np.testing.assert_array_equal(model(torch.ones(2), torch.ones(2))[0], np.full(2, 2, np.float32))
