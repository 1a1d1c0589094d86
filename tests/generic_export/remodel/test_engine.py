"""Archives with a remodelled boundary, run in tract at several sizes and compared with the module called in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.read.contents import read_contents
from generic_export.read.outline import GraphOutline, read_outline
from generic_export.remodel import (
    BindConstant,
    BindSize,
    BindValue,
    InputPlan,
    OutputPlan,
    RemodelPlan,
    Subgraph,
    SubgraphPlan,
    SymbolConstraint,
    export_remodelled,
    parse_plan,
    plan_of_archive,
    remodel,
)


class Encoder(nn.Module):
    """Speech features [B, 4, T] and lengths [B] to frames [B, (T+1)//2, 6], masked beyond their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, audio: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        frames = self.conv(audio).transpose(1, 2) * self.scale
        count = (length + 1) // 2
        mask = torch.arange(frames.shape[1])[None] < count[:, None]
        frames = frames * mask[..., None]
        return frames, count, frames.sum(1)


def encoder(batch: int = 1, time: int = 12) -> Subgraph:
    return Subgraph(
        "encoder",
        Encoder().eval(),
        (torch.randn(batch, 4, time), torch.full((batch,), time)),
        output_names=["frames", "count", "pooled"],
        dynamic_axes={"audio": {0: "AUDIO_BATCH", 2: "T"}, "length": {0: "LENGTH_BATCH"}},
    )


def plan_for(name: str, **fields: Any) -> RemodelPlan:
    return RemodelPlan({name: SubgraphPlan(**fields)})


def check(
    subgraph: Subgraph,
    plan: RemodelPlan,
    folder: Path,
    cases: Sequence[tuple[Sequence[torch.Tensor], tuple[Any, ...]]],
    pick: Callable[[Any], Sequence[torch.Tensor]],
    target: TractNNEF | None = None,
) -> GraphOutline:
    """Export; compare each case, inputs of the archive beside the full arguments of the module, as `pick` takes its results."""
    archive = export_remodelled([subgraph], plan, folder, target, compression_level=None)[subgraph.name]
    with TractWheel(timeout_seconds=60).load(archive) as engine:
        for inputs, full in cases:
            answers = engine.run([tensor.numpy() for tensor in inputs])
            with torch.no_grad():
                expected = pick(subgraph.module(*full))
            assert len(answers) == len(expected)
            for answer, reference in zip(answers, expected, strict=True):
                assert answer.shape == tuple(reference.shape) and answer.dtype == reference.numpy().dtype
                np.testing.assert_allclose(answer, reference.numpy(), rtol=1e-5, atol=1e-5)
    return read_outline(read_contents(archive).graph_text)


def shapes(outline: GraphOutline) -> dict[str, list[str]]:
    return {entry.name: list(entry.shape) for entry in outline.externals}


def test_a_batch_disappears_and_a_length_is_computed(tmp_path: Path) -> None:
    plan = plan_for(
        "encoder",
        inputs={
            "audio": InputPlan(collapse=("B",), rename="features"),
            "length": InputPlan(bind=BindSize("audio", "T")),
        },
        outputs={"frames": OutputPlan(collapse=("B",), rename="encoded"), "pooled": OutputPlan(collapse=(0,))},
        aliases={"B": ("AUDIO_BATCH", "LENGTH_BATCH")},
    )
    cases = []
    for time in (2, 7, 64):
        audio = torch.randn(4, time)
        cases.append(([audio], (audio[None], torch.tensor([time]))))
    outline = check(encoder(), plan, tmp_path, cases, lambda out: (out[0][0], out[1], out[2][0]))
    assert shapes(outline) == {"features": ["4", "T"]}
    assert outline.outputs == ("encoded", "count", "pooled")
    assert outline.symbols == ("T",)
    assert {variable.label for variable in outline.variables} == {"conv.weight", "conv.bias", "scale"}


def test_a_bound_length_keeps_its_batch(tmp_path: Path) -> None:
    plan = plan_for(
        "encoder",
        inputs={"length": InputPlan(bind=BindSize("audio", 2))},
        aliases={"B": ("AUDIO_BATCH", "LENGTH_BATCH")},
    )
    cases = []
    for batch, time in ((2, 3), (3, 16), (5, 9)):
        audio = torch.randn(batch, 4, time)
        cases.append(([audio], (audio, torch.full((batch,), time))))
    outline = check(encoder(2), plan, tmp_path, cases, tuple)
    assert shapes(outline) == {"audio": ["B", "4", "T"]}


@pytest.mark.parametrize(
    ("keep", "order"),
    [
        (("pooled", "frames"), (2, 0)),
        (("count", "pooled", "frames"), (1, 2, 0)),
        (("count",), (1,)),
    ],
)
def test_values_follow_the_names_of_reordered_outputs(
    tmp_path: Path, keep: tuple[str, ...], order: tuple[int, ...]
) -> None:
    full = (torch.randn(1, 4, 9), torch.tensor([6]))
    plan = plan_for("encoder", outputs_keep=keep, aliases={"B": ("AUDIO_BATCH", "LENGTH_BATCH")})
    cases = [(full, full)]
    outline = check(encoder(2), plan, tmp_path, cases, lambda out: [out[position] for position in order])
    assert outline.outputs == keep


class Chained(nn.Module):
    """Everything a bind can give: sizes, sizes of bound inputs, equal values, constants of several types."""

    def forward(
        self,
        x: torch.Tensor,
        length: torch.Tensor,
        same: torch.Tensor,
        batch: torch.Tensor,
        gain: torch.Tensor,
        rows: torch.Tensor,
        flag: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        y = torch.where(flag, x * gain + rows, x)
        return y, length + same.to(torch.int64) * 100, same, batch


def test_chains_and_constants(tmp_path: Path) -> None:
    rows = torch.tensor([[1.0, -2.0, 0.5]])
    subgraph = Subgraph(
        "chained",
        Chained(),
        (
            torch.randn(2, 5, 3),
            torch.tensor([5, 5]),
            torch.tensor([5, 5], dtype=torch.int32),
            torch.tensor(2.0),
            torch.tensor(1.5),
            torch.zeros(1, 3),
            torch.tensor(False),
        ),
        dynamic_axes={"x": {0: "B", 1: "T"}, "length": {0: "B"}, "same": {0: "B"}},
    )
    plan = plan_for(
        "chained",
        inputs={
            "same": InputPlan(bind=BindValue("length")),  # before what it depends on
            "batch": InputPlan(bind=BindSize("same", "B")),  # the size of an input that is bound itself
            "length": InputPlan(bind=BindSize("x", "T")),
            "gain": InputPlan(bind=BindConstant(2.5)),
            "rows": InputPlan(bind=BindConstant(((1.0, -2.0, 0.5),))),
            "flag": InputPlan(bind=BindConstant(True)),
        },
    )
    cases = []
    for batch, time in ((3, 2), (4, 9)):
        x = torch.randn(batch, time, 3)
        lengths = torch.full((batch,), time)
        given = (lengths, lengths.int(), torch.tensor(float(batch)), torch.tensor(2.5), rows, torch.tensor(True))
        cases.append(([x], (x, *given)))
    outline = check(subgraph, plan, tmp_path, cases, tuple)
    assert shapes(outline) == {"x": ["B", "T", "3"]}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)

    def forward(
        self, x: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        return self.lstm(x, states)


def test_nested_inputs_by_name_and_a_batch_in_the_middle(tmp_path: Path) -> None:
    module = Recurrent().eval()
    states = (torch.randn(2, 1, 4), torch.randn(2, 1, 4))
    subgraph = Subgraph("decoder", module, (torch.randn(1, 5, 3), states), output_names=["y", "h", "c"])
    plan = parse_plan(
        """
        decoder:
          inputs:
            x: {shape: [B, S, 3], collapse: [B]}
            states.0: {shape: [2, B, 4], collapse: [B], rename: hidden}
            states_1: {shape: [2, B, 4], collapse: [B]}
          outputs:
            y: {collapse: [B]}
            h: {collapse: [B]}
            c: {collapse: [-2]}
        """
    )
    cases = []
    for length in (1, 3, 8):
        x, h, c = torch.randn(length, 3), torch.randn(2, 4), torch.randn(2, 4)
        cases.append(([x, h, c], (x[None], (h[:, None], c[:, None]))))
    outline = check(subgraph, plan, tmp_path, cases, lambda out: (out[0][0], out[1][0][:, 0], out[1][1][:, 0]))
    assert shapes(outline) == {"x": ["S", "3"], "hidden": ["2", "4"], "states_1": ["2", "4"]}


@pytest.mark.parametrize("pinned", [4, 12, 30])
def test_a_pinned_symbol_is_static_whatever_the_example(tmp_path: Path, pinned: int) -> None:
    plan = plan_for(
        "encoder",
        inputs={"length": InputPlan(bind=BindSize("audio", "T"))},
        aliases={"B": ("AUDIO_BATCH", "LENGTH_BATCH")},
        pins={"T": pinned},
        assertions=("T <= 30", "B <= T"),
    )
    audio = torch.randn(3, 4, pinned)
    cases = [([audio], (audio, torch.full((3,), pinned)))]
    outline = check(encoder(2), plan, tmp_path, cases, tuple)
    assert shapes(outline) == {"audio": ["B", "4", str(pinned)]}
    assert f"B <= {pinned}" in outline.assertions
    assert not any("T" in assertion for assertion in outline.assertions)


class Blocks(nn.Module):
    """Needs to know that a size is a multiple of 8, of an axis that two inputs share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        blocks = self.linear(x.reshape(4, -1, 8).transpose(0, 1).reshape(-1, 32))
        return blocks * y.reshape(4, -1, 8).sum()


def test_a_multiple_of_an_axis_that_two_inputs_share(tmp_path: Path) -> None:
    torch.manual_seed(0)  # the sum of many random numbers may be so near zero that float32 has no digits left
    axes = {"x": {1: "T"}, "y": {1: "T"}}
    subgraph = Subgraph("blocks", Blocks(), (torch.randn(4, 32), torch.randn(4, 32)), dynamic_axes=axes)
    plan = plan_for("blocks", constraints={"T": SymbolConstraint(max=400, multiple_of=8)})
    cases = [(full, full) for full in ((torch.randn(4, time), torch.randn(4, time)) for time in (16, 40, 400))]
    outline = check(subgraph, plan, tmp_path, cases, lambda out: [out])
    assert shapes(outline) == {"x": ["4", "T"], "y": ["4", "T"]}
    assert "T <= 400" in outline.assertions


def test_a_multiple_that_the_module_need_not_know_is_held_too(tmp_path: Path) -> None:
    plan = plan_for(
        "encoder",
        aliases={"B": ("AUDIO_BATCH", "LENGTH_BATCH")},
        constraints={"T": SymbolConstraint(min=4, max=400, multiple_of=2)},
    )
    cases = [(full, full) for full in ((torch.randn(2, 4, t), torch.tensor([t, t - 1])) for t in (4, 50))]
    outline = check(encoder(2), plan, tmp_path, cases, tuple)
    assert {"T >= 4", "T <= 400", "sizes: T-(T/2)*2 == 0"} <= set(outline.assertions)


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_symbols_that_are_equal_become_one(tmp_path: Path) -> None:
    subgraph = Subgraph("pair", Pair(), (torch.randn(5), torch.randn(5)), dynamic_axes={"x": {0: "A"}, "y": {0: "C"}})
    plan = plan_for("pair", constraints={"C": SymbolConstraint(equals="A", max=64)})
    cases = [(full, full) for full in ((torch.randn(n), torch.randn(n)) for n in (3, 40))]
    outline = check(subgraph, plan, tmp_path, cases, lambda out: [out])
    assert shapes(outline) == {"x": ["A"], "y": ["A"]}
    assert "A <= 64" in outline.assertions


class Halves(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.cumsum(0), y * y.shape[0]


def test_an_equality_of_sizes_reaches_the_archive(tmp_path: Path) -> None:
    subgraph = Subgraph(
        "halves", Halves(), (torch.randn(8), torch.randn(4)), dynamic_axes={"x": {0: "T"}, "y": {0: "S"}}
    )
    plan = plan_for("halves", constraints={"T": SymbolConstraint(equals="2*S", max=100)}, assertions=("S / 2 >= 1",))
    cases = [(full, full) for full in ((torch.randn(2 * n), torch.randn(n)) for n in (3, 10))]
    outline = check(subgraph, plan, tmp_path, cases, tuple)
    assert {"T == 2 * S", "S / 2 >= 1", "T <= 100"} <= set(outline.assertions)


def test_one_axis_gets_a_symbol_of_its_own(tmp_path: Path) -> None:
    subgraph = Subgraph(
        "halves", Halves(), (torch.randn(4), torch.randn(4)), dynamic_axes={"x": {0: "N"}, "y": {0: "N"}}
    )
    plan = plan_for("halves", inputs={"x": InputPlan(axes={-1: "LONG"})})
    cases = [(full, full) for full in ((torch.randn(9), torch.randn(2)), (torch.randn(3), torch.randn(6)))]
    outline = check(subgraph, plan, tmp_path, cases, tuple)
    assert shapes(outline) == {"x": ["LONG"], "y": ["N"]}


def test_the_archive_says_which_plan_made_it(tmp_path: Path) -> None:
    plan = parse_plan(
        """
        encoder:
          inputs:
            length: {bind: audio.T}
          aliases: {B: [AUDIO_BATCH, LENGTH_BATCH]}
          constraints: {T: {max: 4000}}
          assertions: ["T <= 4*1000"]
        """
    )
    archive = export_remodelled([encoder(2)], plan, tmp_path, compression_level=1)["encoder"]
    assert archive.name == "encoder.nnef.tgz"
    assert plan_of_archive(archive) == plan
    properties = dict(read_outline(read_contents(archive).graph_text).properties)
    assert properties["remodelled_module"] == "Encoder"
    pair = Subgraph("pair", Pair(), (torch.randn(5), torch.randn(5)))
    assert plan_of_archive(export_remodelled([pair], plan_for("pair"), tmp_path)["pair"]) == plan_for("pair")
    assert plan_of_archive(export_remodelled([pair], RemodelPlan(), tmp_path)["pair"]) is None


def test_several_subgraphs_by_one_plan_and_none_when_one_does_not_fit(tmp_path: Path) -> None:
    pair = Subgraph("pair", Pair(), (torch.randn(5), torch.randn(5)), dynamic_axes={"x": {0: "N"}, "y": {0: "N"}})
    plan = RemodelPlan(
        {
            "encoder": SubgraphPlan(aliases={"B": ("AUDIO_BATCH", "LENGTH_BATCH")}, outputs_keep=("pooled",)),
            "pair": SubgraphPlan(inputs={"x": InputPlan(rename="left")}),
        }
    )
    archives = export_remodelled([encoder(2), pair], plan, tmp_path / "both", TractNNEF(), compression_level=0)
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"encoder.nnef.tar", "pair.nnef.tar"}
    assert list(archives) == ["encoder", "pair"]
    wrong = RemodelPlan({**plan.subgraphs, "pair": SubgraphPlan(outputs_keep=("nothing",))})
    with pytest.raises(OptionError, match="nothing"):
        export_remodelled([encoder(2), pair], wrong, tmp_path / "none")
    assert not (tmp_path / "none").exists()


class Odd(nn.Module):
    """A model whose children and buffers are called as an adapter's own things might be."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.boundary = nn.Linear(3, 3)
        self.register_buffer("module", torch.ones(3), persistent=False)
        self.drop = nn.Dropout(0.9)
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.boundary(self.inner(x) * self.module) * self.weight)


def test_the_module_comes_back_untouched_and_its_names_stay(tmp_path: Path) -> None:
    module = Odd().train()
    module.inner.eval()
    state = {name: (id(value), value.clone()) for name, value in module.state_dict(keep_vars=True).items()}
    known = dict(vars(module))
    subgraph = Subgraph("odd", module, (torch.randn(1, 3),), dynamic_axes={"x": {0: "B"}})
    plan = plan_for("odd", inputs={"x": InputPlan(collapse=("B",))}, outputs={"output": OutputPlan(collapse=(0,))})
    adapter = remodel(subgraph, plan).module
    assert [name for name, _ in adapter.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert adapter.state_dict().keys() == module.state_dict().keys()
    archive = export_remodelled([subgraph], plan, tmp_path, compression_level=None)["odd"]
    labels = {path.relative_to(archive).as_posix() for path in archive.rglob("*.dat")}
    assert {"inner.weight.dat", "boundary.weight.dat", "weight.dat", "module.dat"} <= labels
    assert module.training and module.drop.training and not module.inner.training
    assert vars(module).keys() == known.keys() and module.forward.__func__ is Odd.forward
    after = module.state_dict(keep_vars=True)
    assert {name: id(value) for name, value in after.items()} == {name: ident for name, (ident, _) in state.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in state.items())
    adapter.eval()
    assert not module.training


class Scripted(nn.Module):
    """A ScriptModule behind a module: what the error about ScriptModules advises."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Linear(3, 4))

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return self.scripted(x) * count


def test_a_script_module_that_is_wrapped(tmp_path: Path) -> None:
    subgraph = Subgraph("scripted", Scripted(), (torch.randn(2, 3), torch.tensor(2.0)), dynamic_axes={"x": {0: "B"}})
    plan = plan_for("scripted", inputs={"count": InputPlan(bind=BindSize("x", "B"))})
    cases = [([x], (x, torch.tensor(float(len(x))))) for x in (torch.randn(3, 3), torch.randn(7, 3))]
    outline = check(subgraph, plan, tmp_path, cases, lambda out: [out])
    assert shapes(outline) == {"x": ["B", "3"]}
