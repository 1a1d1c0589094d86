"""A fault planted in a tiny language model: exactly that piece is blamed, with file and line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.diagnose import Diagnosis, Outcome, Stage, diagnose, diagnosis_text, state_adapters
from kvcache import explicit_operators, fuse_rotary_embedding
from kvcache.states.state_adapters import cache_adapters
from t2n_llm.debug.call_sets import calls_of
from tests.families import FAMILIES
from tests.generic_export.debug.planted import (
    DataDependentBranch,
    FrozenAxis,
    RmsNorm,
    UnsupportedOperator,
    WithFaultBehind,
    WrongEpsilon,
    line_of,
)
from tests.generic_export.debug.test_search import reproduced


@dataclass(frozen=True)
class Family:
    """A tiny model and where faults are planted in it.

    Attributes:
        config: makes its config.
        leaf: a module that a fault takes the place of; a path that ends in `.1` is put behind the module before it.
        norm: a norm of the last layer.
        layers: class of its layers.
        state: an input that a layer writes to, a tensor of its cache, and the axes of it.
    """

    config: Callable[[], Any]
    leaf: str
    norm: str
    layers: str
    state: tuple[str, tuple[str, ...]]


def _config(model_type: str, **sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(model_type, vocab_size=160, hidden_size=32, **sizes)

    return build


_MOE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48} | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MODELS = {
    "llama": Family(
        FAMILIES["llama"],
        "model.layers.1.mlp.act_fn",
        "model.layers.1.post_attention_layernorm",
        "LlamaDecoderLayer",
        ("key_0", ("1", "2", "P", "16")),
    ),
    "qwen3_moe": Family(
        _config("qwen3_moe", **_MOE),
        "model.layers.1.mlp.experts.act_fn",
        "model.layers.1.self_attn.q_norm",
        "Qwen3MoeDecoderLayer",
        ("key_0", ("1", "1", "P", "16")),
    ),
    "mamba": Family(
        _config("mamba", state_size=4),
        "backbone.layers.1.mixer.x_proj.1",
        "backbone.layers.1.norm",
        "MambaBlock",
        ("recurrent_0", ("1", "64", "4")),
    ),
}
OPERATOR = "aten.linalg_ldl_factor_ex.default"


@pytest.fixture(autouse=True)
def adapters() -> Iterator[None]:
    with state_adapters(*cache_adapters()):
        yield


def diagnosed(name: str, plant: Callable[[nn.Module], None] = lambda _model: None, **options: Any) -> Diagnosis:
    """Diagnose a tiny model of two layers on prefill, decode and a chunk."""
    from transformers import AutoModelForCausalLM

    config = MODELS[name].config()
    config.num_hidden_layers = 2
    with explicit_operators() as operators:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, **operators.options)
        plant(model)
        calls = calls_of(model.eval())
        assert calls.names == ("prefill", "decode", "chunk")
        fusions = (fuse_rotary_embedding,)
        return diagnose(
            model,
            TractNNEF(),
            calls.keywords,
            fusions=fusions,
            torchscript=False,
            axes=calls.axes,
            context=calls.code,
            **options,
        )


def cpu_seconds() -> float:
    """Return the processor time of this process and its workers: what a diagnosis takes on a machine that is not busy."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def replaced(path: str, make: Callable[[nn.Module], nn.Module], model: nn.Module) -> None:
    """Put a module in another one's place, or behind it."""
    parent, _, name = path.rpartition(".")
    if name == "1":
        replaced(parent, lambda before: nn.Sequential(before, make(before)), model)
    else:
        setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))


def failed_paths(found: Diagnosis) -> set[str]:
    return {found.piece(verdict.key).path for verdict in found.verdicts if verdict.failed}


def ancestors(found: Diagnosis, path: str) -> set[str]:
    """Return a piece and those that it is part of."""
    parts = path.split(".")
    prefixes = {".".join(parts[:length]) for length in range(len(parts) + 1)}
    return prefixes & {piece.path for piece in found.pieces}


def inside(found: Diagnosis, whole: str) -> set[str]:
    """Return the paths of a piece and of those in it."""
    return {piece.path for piece in found.pieces if f"{piece.path}.".startswith(f"{whole}.") or not whole}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_exports_is_tried_once_and_has_no_fault(name: str) -> None:
    found = diagnosed(name)
    assert found.ok and not found.culprits()
    assert [verdict.outcome for verdict in found.verdicts].count(Outcome.OK) == 1
    assert {verdict.outcome for verdict in found.verdicts} == {Outcome.OK, Outcome.COVERED}
    assert len(found.pieces) <= 20
    (layers,) = [piece for piece in found.pieces if piece.class_name == MODELS[name].layers]
    assert len(layers.paths) == 2
    state, axes = MODELS[name].state
    (leaf,) = [leaf for leaf in layers.inputs if leaf.name.partition(".")[2] == state]
    assert leaf.axes == axes
    assert leaf.written


@pytest.mark.parametrize(
    ("name", "only", "classes"),
    [
        ("qwen3_moe", "model.layers.0.mlp", {"Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter", "Qwen3MoeExperts"}),
        ("mamba", "backbone.layers.0", {"MambaBlock", "MambaMixer", "MambaRMSNorm", "Linear"}),
    ],
)
def test_every_piece_of_a_layer_that_exports_passes_alone(name: str, only: str, classes: set[str]) -> None:
    found = diagnosed(name, strategy="leaves", only=only)
    tried = [verdict for verdict in found.verdicts if verdict.outcome is not Outcome.NOT_TRIED]
    assert {found.piece(verdict.key).class_name for verdict in tried} >= classes
    assert {verdict.outcome for verdict in tried} == {Outcome.OK}
    # Compared with what PyTorch computes, not captured only.
    assert {verdict.stage for verdict in tried} == {Stage.COMPARE}


@pytest.mark.parametrize(
    ("name", "only", "fault", "comment", "stage", "operator"),
    [
        ("llama", "", UnsupportedOperator, "the operator", Stage.TRANSLATE, OPERATOR),
        ("llama", "model.layers.1", FrozenAxis, "the freeze", Stage.CAPTURE, ""),
        ("llama", "model.layers.1", DataDependentBranch, "the branch", Stage.CAPTURE, ""),
        ("qwen3_moe", "model.layers.1", UnsupportedOperator, "the operator", Stage.TRANSLATE, OPERATOR),
        ("mamba", "backbone.layers.1", DataDependentBranch, "the branch", Stage.CAPTURE, ""),
    ],
)
def test_exactly_the_planted_piece_is_blamed(
    name: str, only: str, fault: type[nn.Module], comment: str, stage: Stage, operator: str
) -> None:
    guilty = MODELS[name].leaf
    began = cpu_seconds()
    found = diagnosed(name, partial(replaced, guilty, lambda _: fault()), only=only)
    assert cpu_seconds() - began < 120
    (culprit,) = found.culprits()
    assert culprit.piece.path == guilty
    assert culprit.verdict.stage is stage
    assert culprit.verdict.operator == operator
    assert culprit.source == line_of(fault, comment)
    assert culprit.source in diagnosis_text(found)
    assert len(found.pieces) <= 20
    assert failed_paths(found) == ancestors(found, guilty) & inside(found, only)


@pytest.mark.parametrize(("name", "layer"), [("llama", "model.layers.1"), ("mamba", "backbone.layers.1")])
def test_a_wrong_epsilon_in_one_norm_is_blamed_on_that_norm(name: str, layer: str) -> None:
    def wrong(norm: Any) -> nn.Module:
        return WrongEpsilon(norm.weight, norm.variance_epsilon)

    guilty = MODELS[name].norm
    began = cpu_seconds()
    found = diagnosed(name, partial(replaced, guilty, wrong), only=layer)
    assert cpu_seconds() - began < 120
    (culprit,) = found.culprits()
    assert culprit.piece.path == guilty
    assert culprit.verdict.stage is Stage.COMPARE
    # A module that is translated as a whole has no line of its own but that of its forward.
    assert culprit.source == line_of(RmsNorm, "the forward")
    assert culprit.verdict.worst is not None
    assert not culprit.verdict.worst.passed
    assert found.ranking()[0][0].path == guilty
    assert len(found.pieces) <= 20


def test_a_reproduction_of_a_recurrent_piece_runs_the_recurrence_of_an_export(tmp_path: Path) -> None:
    guilty = "backbone.layers.1.mixer"
    found = diagnosed("mamba", partial(replaced, guilty, WithFaultBehind), out=tmp_path, only=guilty, strategy="whole")
    (culprit,) = found.culprits()
    assert (culprit.piece.path, culprit.verdict.operator) == (guilty, OPERATOR)
    run = reproduced(Path(culprit.verdict.repro_path))
    # Transformers' own loop over the positions would not even be captured.
    assert run.returncode == 1, run.stderr
    assert "failed: translate" in run.stdout and OPERATOR in run.stdout
