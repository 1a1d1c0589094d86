"""Tiny configs: every architecture of the installed transformers has one, and it keeps what makes the family different."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from t2n_llm.source.small_sizes import WINDOW
from t2n_llm.tasks.names import DEPTH_ESTIMATION, MASK_GENERATION
from t2n_llm.zoo.configs import TinyConfigError, tiny_config
from t2n_llm.zoo.overrides import OVERRIDES, TASK_OVERRIDES
from t2n_llm.zoo.tasks import architectures
from t2n_llm.zoo.tiny_model import build_tiny_model

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

MOST_PARAMETERS = 4_000_000


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    return {name: tiny_config(name) for name in architectures()}


def text(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def test_every_architecture_has_a_config(configs: dict[str, Any]) -> None:
    assert len(configs) >= 180
    for name, config in configs.items():
        assert config.model_type == name or name == "gpt-sw3", name  # which is another name of gpt2


def test_models_are_tiny(configs: dict[str, Any]) -> None:
    """Those with most parameters, and a few of other kinds."""
    names = ("got_ocr2", "phi4_multimodal", "bailing_hybrid", "deepseek_v4", "llama", "xlstm", "zamba2")
    assert _built_tiny({name: configs[name] for name in names}) == len(names)


@pytest.mark.nightly
def test_all_models_are_tiny(configs: dict[str, Any]) -> None:
    assert _built_tiny(configs) >= 180


def _built_tiny(configs: dict[str, Any]) -> int:
    """Return how many models can be built; each must be tiny."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    built = 0
    for name, config in configs.items():
        try:
            with init_empty_weights():
                model = AutoModelForCausalLM.from_config(config)
        except Exception:  # the zoo's own business: such a cell is "not runnable"
            continue
        built += 1
        assert sum(parameter.numel() for parameter in model.parameters()) <= MOST_PARAMETERS, name
    return built


def test_every_kind_of_layer_is_kept(configs: dict[str, Any]) -> None:
    """What the family's own default has, the tiny one has."""
    from transformers import CONFIG_MAPPING

    compared = 0
    for name, config in configs.items():
        try:
            whole = CONFIG_MAPPING[name]()
        except Exception:
            continue
        for field in ("layer_types", "mlp_layer_types"):
            kinds = getattr(text(whole), field, None)
            if kinds:
                compared += 1
                assert set(kinds) <= set(getattr(text(config), field)), (name, field)
                assert len(getattr(text(config), field)) <= 6, (name, field)
    assert compared >= 60


def test_windows_are_left_behind_by_the_checks(configs: dict[str, Any]) -> None:
    sliding = [name for name, config in configs.items() if getattr(text(config), "sliding_window", None)]
    assert {"mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen2", "phi3", "cohere2", "exaone4"} <= set(sliding)
    for name in sliding:
        assert text(configs[name]).sliding_window <= WINDOW, name


def test_the_random_text_holds_no_special_id(configs: dict[str, Any]) -> None:
    """A padding token in the text would move the positions of those after it, in transformers itself."""
    from t2n_llm.check.reference import plan_check

    for name in ("roberta", "opt", "llama", "mistral", "gpt2"):
        config = configs[name]
        drawn = set(plan_check(config, None, 16).text_ids)
        assert not drawn & {config.pad_token_id, config.bos_token_id}, name
    assert len(drawn) > 20


def test_features_that_defaults_leave_off_are_on(configs: dict[str, Any]) -> None:
    assert "sliding_attention" in configs["qwen2"].layer_types
    assert configs["gemma3n_text"].num_kv_shared_layers == 2
    assert configs["bamba"].layer_types.count("full_attention") == 1
    assert configs["bert"].is_decoder
    assert configs["deepseek_v3"].kv_lora_rank == 32
    assert (configs["mixtral"].num_local_experts, configs["mixtral"].num_experts_per_tok) == (4, 2)
    assert configs["llama"].num_key_value_heads < configs["llama"].num_attention_heads


def test_an_architecture_of_tomorrow_is_shrunk_by_its_field_names() -> None:
    """A family that no table knows."""
    from huggingface_hub.dataclasses import strict
    from transformers import CONFIG_MAPPING, PretrainedConfig

    @strict
    class TomorrowConfig(PretrainedConfig):
        model_type = "tomorrow"
        vocab_size: int = 400_000
        hidden_size: int = 8192
        num_hidden_layers: int = 90
        num_attention_heads: int = 64
        num_key_value_heads: int | None = None
        swa_head_dim: int = 192
        expert_intermediate_size: int = 3000
        num_new_experts: int = 512
        sliding_window: int | None = None
        image_token_id: int = 399_999
        layer_types: list[str] | None = None

        def __post_init__(self, **kwargs: Any) -> None:
            if self.layer_types is None:
                pattern = ["chunked_attention", "chunked_attention", "full_attention", "linear_attention"]
                self.layer_types = [pattern[i % 4] for i in range(self.num_hidden_layers)]
            super().__post_init__(**kwargs)

    CONFIG_MAPPING.register("tomorrow", TomorrowConfig)
    try:
        config = tiny_config("tomorrow")
    finally:
        CONFIG_MAPPING._extra_content.pop("tomorrow")
    assert config.layer_types == ["chunked_attention", "full_attention", "linear_attention", "chunked_attention"]
    assert config.num_hidden_layers == 4
    assert (config.vocab_size, config.hidden_size, config.num_attention_heads) == (160, 64, 4)
    assert (config.num_key_value_heads, config.swa_head_dim, config.num_new_experts) == (2, 16, 4)
    assert (config.expert_intermediate_size, config.sliding_window) == (96, 8)
    assert config.image_token_id == 399_999


def test_a_backbone_has_the_stages_that_its_whole_reads() -> None:
    config = tiny_config("chmv2", DEPTH_ESTIMATION)
    assert len(config.backbone_config.out_indices) == len(config.reassemble_factors) == 4
    assert config.backbone_config.num_hidden_layers == 4
    assert config.backbone_config.key_bias  # what the whole says of it, its own class does not


def test_overrides_belong_to_architectures() -> None:
    from transformers import CONFIG_MAPPING

    unknown = {name for name in (*OVERRIDES, *TASK_OVERRIDES) if name not in CONFIG_MAPPING}
    assert unknown <= {"dory"}  # transformers 5.24 and later


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(TinyConfigError, match="no-such-model"):
        tiny_config("no-such-model")


@pytest.mark.parametrize("name", ["llama", "mixtral", "jetmoe", "deepseek_v3", "bert"])
def test_weights_are_worth_comparing(name: str) -> None:
    import torch

    from t2n_llm.zoo.tiny_model import build_tiny_model, decode_in_transformers

    model = build_tiny_model(name)
    for path, parameter in model.named_parameters():
        assert float(parameter.detach().std()) > 0.02, path
        if parameter.ndim > 1:
            assert not bool((parameter == 0).all(-1).any()), f"{path} has a row of zeros"
    ids = torch.tensor([np.random.default_rng(0).integers(0, 160, size=20).tolist()])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert float(logits.std()) > 0.3
    assert decode_in_transformers(model, 3) == "DynamicCache"
    again = build_tiny_model(name)
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), again.parameters(), strict=True))


def test_wide_models_are_not_left_with_rounding_alone() -> None:
    """SAM's widths are tied to each other; with weights for narrow layers its masks in f32 are not those of float64."""
    model = build_tiny_model("sam", 0, MASK_GENERATION)
    assert model.config.vision_config.hidden_size > 64
    assert model.config.vision_config.initializer_range == 0.02
