"""Recipes: names, files, patterns, typos."""

from __future__ import annotations

from pathlib import Path

import pytest

from generic_export.errors import OptionError
from quant.budget import Candidate, TargetSize, kept_plain
from quant.recipe import (
    NAMED_RECIPES,
    Choice,
    TensorName,
    choose,
    matches,
    named_recipe,
    parse_recipe,
    read_recipe,
    recipe_text,
)

ALGORITHMS = ("min_max", "search", "gptq")

TENSORS = [
    TensorName("model.embed_tokens.weight", "@embeddings"),
    TensorName("model.layers.1.mlp.down_proj.weight", "@linears"),
    TensorName("model.layers.10.mlp.down_proj.weight", "@linears"),
    TensorName("lm_head.weight", "@head"),
]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", {0, 1, 2, 3}),
        ("@linears", {1, 2}),
        ("embed_tokens", {0}),
        ("lm_head", {3}),
        ("layers.1", {1}),
        ("layers.1.*", {1}),
        ("layers.*.mlp", {1, 2}),
        ("*.down_proj", {1, 2}),
        ("model.layers.10.mlp.down_proj.weight", {2}),
        ("down_proj.bias", set()),
        ("down", set()),
    ],
)
def test_patterns_name_runs_of_dotted_parts(pattern: str, names: set[int]) -> None:
    assert {index for index, tensor in enumerate(TENSORS) if matches(pattern, tensor)} == names


def test_the_last_rule_wins_and_idle_rules_are_told() -> None:
    recipe = parse_recipe(
        {
            "algorithm": "gptq",
            "tensors": {"@linears": "q4_0", "layers.10": "f16", "layers.1": "q4_0:min_max", "layer.3": "f16"},
        },
        "r",
        ALGORITHMS,
    )
    choices, idle = choose(recipe, TENSORS)
    assert choices == {
        "model.layers.1.mlp.down_proj.weight": Choice("q4_0", "min_max"),
        "model.layers.10.mlp.down_proj.weight": Choice("f16"),
    }
    assert idle == ["layer.3"]
    assert recipe.algorithms() == {"gptq", "min_max"}


@pytest.mark.parametrize("name", NAMED_RECIPES)
def test_named_recipes_survive_their_file(tmp_path: Path, name: str) -> None:
    recipe = named_recipe(name, ALGORITHMS)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(recipe))
    assert read_recipe(file, ALGORITHMS) == recipe


def test_an_algorithm_after_the_name_is_for_every_rule() -> None:
    choices, _ = choose(named_recipe("q4_0+embeddings:gptq", ALGORITHMS), TENSORS)
    assert set(choices.values()) == {Choice("q4_0", "gptq")}
    assert len(choices) == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "a recipe must be a mapping"),
        ({"tensor": {}}, r"key 'tensor' is unknown.*Did you mean 'tensors'"),
        ({"tensors": ["*"]}, "must map patterns to schemes"),
        ({"tensors": {"*": "q4_O"}}, r"scheme 'q4_O' is unknown.*Did you mean 'q4_0'"),
        ({"tensors": {"*": "q4_0:gtpq"}}, r"algorithm 'gtpq' is unknown.*Did you mean 'gptq'"),
        ({"tensors": {"*": "f16:gptq"}}, "algorithms apply to q4_0"),
        ({"tensors": {"*": {"scheme": "q4_0", "algoritm": "gptq"}}}, r"key 'algoritm'.*Did you mean 'algorithm'"),
        ({"tensors": {"*": 4}}, "4 is not a scheme"),
        ({"tensors": {4: "q4_0"}}, "pattern 4 is not text"),
        ({"tensors": {"@linear": "q4_0"}}, r"role '@linear'.*Did you mean '@linears'"),
        ({"dtype": "bf16"}, "dtype 'bf16' is unknown"),
        ({"target_size": "big"}, "'big' is not a size"),
    ],
)
def test_mistakes_are_named(data: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_recipe(data, "r.yaml", ALGORITHMS)


def test_names_and_sizes_that_do_not_fit_together() -> None:
    with pytest.raises(OptionError, match=r"recipe 'q4-0' is unknown.*Did you mean 'q4_0'"):
        named_recipe("q4-0", ALGORITHMS)
    with pytest.raises(OptionError, match="has no q4_0 values"):
        named_recipe("f16:gptq", ALGORITHMS)
    with pytest.raises(OptionError, match="does not apply to recipe"):
        named_recipe("q4_0", ALGORITHMS, TargetSize(10**9))


def test_the_mixed_recipe_fills_a_tenth_more_than_the_least() -> None:
    assert named_recipe("q4_0-mixed", ALGORITHMS).target_size == TargetSize(growth=0.1)
    assert named_recipe("q4_0-mixed", ALGORITHMS, TargetSize(10**9)).target_size == TargetSize(10**9)


@pytest.mark.parametrize("content", [b"tensors: [", b"\xff\xfe\x00"])
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    with pytest.raises(OptionError, match=r"recipe\.yaml"):
        read_recipe(file, ALGORITHMS)
    with pytest.raises(OptionError, match="cannot be read"):
        read_recipe(tmp_path / "missing.yaml", ALGORITHMS)


# --- the size to fill ------------------------------------------------------------------------------


def candidates() -> list[Candidate]:
    return [
        Candidate("big", 1000, 250, 3.0),
        Candidate("small", 100, 25, 1.0),
        Candidate("dull", 100, 25, 0.01),
        Candidate("tied", 0, 25, 0.5),
    ]


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (335, {"tied"}),
        (410, {"tied", "small"}),
        (1085, {"tied", "big"}),
        (1250, {"tied", "small", "dull", "big"}),
    ],
)
def test_as_much_harm_is_avoided_as_fits(budget: int, kept: set[str]) -> None:
    assert kept_plain(candidates(), 10, TargetSize(budget)) == kept


def test_a_size_that_cannot_be_reached_says_which_can() -> None:
    with pytest.raises(OptionError, match=r"--target-size 0\.1MB or more"):
        kept_plain(candidates(), 10, TargetSize(100))
