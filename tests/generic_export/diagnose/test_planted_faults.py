"""A fault planted in a tiny language model: exactly that piece is blamed, with file and line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.diagnose import Diagnosis, Outcome, Stage, diagnose, observe, state_adapters
from kvcache import explicit_operators, fuse_rotary_embedding
from kvcache.state_adapters import cache_adapters
from tests.families import FAMILIES
from tests.generic_export.diagnose.planted import (
    DataDependentBranch,
    FrozenAxis,
    RmsNorm,
    UnsupportedOperator,
    WrongEpsilon,
    line_of,
)

AXES = {"input_ids": {1: "S"}, "past_key_values.key_0": {2: "P"}}
GUILTY = "model.layers.1.mlp.act_fn"
GUILTY_NORM = "model.layers.1.post_attention_layernorm"


@pytest.fixture(autouse=True)
def adapters() -> Iterator[None]:
    with state_adapters(*cache_adapters()):
        yield


def diagnosed(plant: Callable[[nn.Module], None], family: str = "llama", **options: Any) -> Diagnosis:
    """Diagnose a tiny model of two layers on prefill, decode and a chunk."""
    from transformers import AutoModelForCausalLM, DynamicCache

    config = FAMILIES[family]()
    config.num_hidden_layers = 2
    with explicit_operators() as operators:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, **operators.options).eval()
        plant(model)
        model.eval()
        cache = DynamicCache()
        with observe(model) as recording, torch.no_grad():
            for steps in (5, 1, 7):
                model(input_ids=torch.randint(3, 160, (1, steps)), past_key_values=cache, use_cache=True)
        return diagnose(recording, TractNNEF(), fusions=(fuse_rotary_embedding,), axes=AXES, **options)


def cpu_seconds() -> float:
    """Return the processor time of this process and its workers: what a diagnosis takes on a machine that is not busy."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def replaced(path: str, make: Callable[[nn.Module], nn.Module], model: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))


def test_a_model_that_exports_is_tried_once_and_has_no_fault() -> None:
    found = diagnosed(lambda _model: None)
    assert found.ok
    assert not found.culprits()
    assert {verdict.outcome for verdict in found.verdicts} == {Outcome.OK, Outcome.COVERED}
    assert len(found.pieces) <= 20
    (layers,) = [piece for piece in found.pieces if piece.class_name == "LlamaDecoderLayer"]
    assert layers.paths == ("model.layers.0", "model.layers.1")
    (key,) = [leaf for leaf in layers.inputs if leaf.name == "past_key_values.key_0"]
    assert key.axes == ("1", "2", "P", "16")
    assert key.written


@pytest.mark.parametrize(
    ("family", "fault", "comment", "stage", "operator"),
    [
        ("llama", DataDependentBranch, "the branch", Stage.CAPTURE, ""),
        ("llama", UnsupportedOperator, "the operator", Stage.TRANSLATE, "aten._linalg_eigh.default"),
        ("llama", FrozenAxis, "the freeze", Stage.CAPTURE, ""),
        ("qwen3", UnsupportedOperator, "the operator", Stage.TRANSLATE, "aten._linalg_eigh.default"),
    ],
)
def test_exactly_the_planted_piece_is_blamed(
    family: str, fault: type[nn.Module], comment: str, stage: Stage, operator: str
) -> None:
    began = cpu_seconds()
    found = diagnosed(partial(replaced, GUILTY, lambda _: fault()), family)
    assert cpu_seconds() - began < 120
    (culprit,) = found.culprits()
    assert culprit.piece.path == GUILTY
    assert culprit.verdict.stage is stage
    assert culprit.verdict.operator == operator
    assert culprit.source == line_of(fault, comment)
    assert culprit.source in found.to_text()
    assert len(found.pieces) <= 20
    failed = {found.piece(verdict.key).path for verdict in found.verdicts if verdict.failed}
    assert failed == {"", "model", "model.layers.1", "model.layers.1.mlp", GUILTY}


def test_a_wrong_epsilon_in_one_norm_is_blamed_on_that_norm() -> None:
    def wrong(norm: nn.Module) -> nn.Module:
        return WrongEpsilon(norm.weight, norm.variance_epsilon)

    found = diagnosed(partial(replaced, GUILTY_NORM, wrong))
    (culprit,) = found.culprits()
    assert culprit.piece.path == GUILTY_NORM
    assert culprit.verdict.stage is Stage.COMPARE
    # A module that is translated as a whole has no line of its own but that of its forward.
    assert culprit.source == line_of(RmsNorm, "the forward")
    assert culprit.verdict.worst is not None
    assert not culprit.verdict.worst.passed
    assert found.ranking()[0][0].path == GUILTY_NORM


# Taken alone, with weights, these are not captured yet (an export captures them on shapes, and puts its own recurrence in):
# what matters here is that the planted fault is told beside them.
KNOWN_TO_FAIL = {"Qwen3MoeExperts", "MambaMixer"}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mamba"])
def test_a_planted_fault_is_told_beside_parts_that_have_no_translation_yet(model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2}
    options: dict[str, dict[str, Any]] = {
        "qwen3_moe": {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "intermediate_size": 48,
        },
        "mamba": {"state_size": 4},
    }
    guilty = {"qwen3_moe": "model.layers.1.input_layernorm", "mamba": "backbone.norm_f"}[model_type]
    cache_name = {"qwen3_moe": "past_key_values", "mamba": "cache_params"}[model_type]
    began = cpu_seconds()
    with explicit_operators() as operators:
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **sizes, **options[model_type])
        attentive = operators.options if model_type == "qwen3_moe" else {}
        model = AutoModelForCausalLM.from_config(config, **attentive).eval()
        replaced(guilty, lambda _: UnsupportedOperator(), model)
        cache: Any = None
        with observe(model) as recording, torch.no_grad():
            for steps in (5, 1, 1) if model_type == "mamba" else (5, 1, 7):
                result = model(input_ids=torch.randint(3, 160, (1, steps)), use_cache=True, **{cache_name: cache})
                cache = result[cache_name]
        found = diagnose(recording, TractNNEF(), fusions=(fuse_rotary_embedding,), axes={"input_ids": {1: "S"}})
    assert cpu_seconds() - began < 120
    planted = [culprit for culprit in found.culprits() if culprit.piece.path == guilty]
    assert [culprit.source for culprit in planted] == [line_of(UnsupportedOperator, "the operator")]
    others = {culprit.piece.class_name for culprit in found.culprits()} - {"UnsupportedOperator"}
    assert others <= KNOWN_TO_FAIL
    assert len(found.pieces) <= 20
