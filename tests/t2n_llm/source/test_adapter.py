"""Adapters: merged as PEFT itself merges them, checked through the engine, exported alone, and refused with reasons."""

from __future__ import annotations

import copy
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from generic_export.errors import AdapterError, CorruptCheckpointError, SourceError, T2NError
from generic_export.files import sha256
from generic_export.weights.source import InMemoryTensor
from generic_export.weights.values import read_tensor
from t2n_llm.check.reference import plan_check, run_reference
from t2n_llm.export.pipeline import export_llm
from t2n_llm.source import adapter_merge
from t2n_llm.source.adapter import Adapter, LoraConfig, open_adapter
from t2n_llm.source.adapter_merge import LoraModule, LowRankUpdate, MergedTensor
from t2n_llm.source.empty_model import meta_model
from t2n_llm.weights.placement import Placement, plan_residency
from tests.families import FAMILIES, save_tiny_model
from tests.t2n_llm.command_line import call, refused, strict_json
from tests.t2n_llm.source.test_hub import COMMIT
from tests.t2n_llm.weights.test_names import archived

peft = pytest.importorskip("peft")

# name -> (family, LoraConfig of peft)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("qwen3", {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 3}),
    "all-linear": ("olmo2", {"target_modules": "all-linear"}),
    "rslora": ("qwen3", {"target_modules": ["v_proj"], "use_rslora": True}),
    "dora": ("qwen3", {"target_modules": ["o_proj", "gate_proj"], "use_dora": True}),
    "patterns": (
        "qwen3",
        {
            "target_modules": ["q_proj", "k_proj"],
            "rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.q_proj": 5},
            "alpha_pattern": {r"layers\.2\..*": 7},
        },
    ),
    "conv1d": ("gpt2_untied", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "conv1d-dora": ("gpt2_untied", {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True}),
    "embedding": ("qwen3", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding-dora": ("qwen3", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "head": ("qwen3", {"target_modules": ["lm_head"]}),
    "modules-to-save": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "lora-bias": ("llama3_rope", {"target_modules": ["q_proj", "up_proj"], "lora_bias": True}),
    "trained-biases": ("llama3_rope", {"target_modules": ["q_proj"], "bias": "all"}),
    "bfloat16": ("qwen3", {"target_modules": ["q_proj"]}),
}


def _gpt2_untied() -> Any:
    config = FAMILIES["gpt2"]()
    config.tie_word_embeddings = False
    return config


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a random untied model of a family."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp("bases") / family
            if family == "gpt2_untied":
                from transformers import AutoModelForCausalLM

                torch.manual_seed(0)
                AutoModelForCausalLM.from_config(_gpt2_untied()).save_pretrained(path)
            else:
                save_tiny_model(family, path)
            made[family] = path
        return made[family]

    return folder


def load(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def train(model_folder: Path, target: Path, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """Save an adapter whose every tensor is away from its start, as after a training."""
    torch.manual_seed(1)
    model = peft.get_peft_model(load(model_folder), peft.LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                scale = 0.02 if "magnitude" in name else 0.1
                parameter.add_(torch.randn_like(parameter) * scale)
    model.save_pretrained(target)
    if dtype is not torch.float32:
        path = target / "adapter_model.safetensors"
        save_file({name: value.to(dtype) for name, value in load_file(path).items()}, path)
    return target


@pytest.fixture
def trained(base: Callable[[str], Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def make(kind: str = "lora", **changes: Any) -> tuple[Path, Path]:
        family, options = KINDS[kind]
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        return base(family), train(base(family), tmp_path / f"adapter-{kind}", options | changes, dtype)

    return make


def rewrite_config(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- merging ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1 << 24, 1000], ids=["whole", "chunks"])
def test_merged_sources_are_what_peft_merges(
    kind: str, chunk: int, trained: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_merge, "CHUNK_BYTES", chunk)
    model_folder, adapter_folder = trained(kind)
    model = load(model_folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = peft.PeftModel.from_pretrained(copy.deepcopy(model), adapter_folder).merge_and_unload().state_dict()
    updates = open_adapter(str(adapter_folder)).updates(model)
    assert updates
    for name, value in before.items():
        merged = read_tensor(updates[name].apply(InMemoryTensor(name, value))) if name in updates else value
        torch.testing.assert_close(
            merged.float(), expected[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        if name in updates:
            assert not torch.allclose(merged.float(), value, atol=1e-4), f"{name} is unchanged"
    changed = {name for name in before if not torch.equal(before[name], expected[name])}
    assert changed == set(updates)


@pytest.mark.parametrize("kind", ["dora", "conv1d", "modules-to-save", "lora-bias"])
def test_an_export_agrees_with_pytorch_through_the_engine(
    kind: str, trained: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    model_folder, adapter_folder = trained(kind)
    result = export_llm(
        str(model_folder),
        tmp_path / "x",
        adapter=str(adapter_folder),
        dtype="f32",
        decode_steps=6,
        require_tokenizer=False,
    )
    assert result.validation is not None
    assert result.validation.passed
    assert result.manifest["adapter"] == {
        "name": adapter_folder.name,
        "revision": None,
        "sha256": sha256(adapter_folder / "adapter_model.safetensors"),
    }
    merged = peft.PeftModel.from_pretrained(load(model_folder), adapter_folder).merge_and_unload().state_dict()
    stored = archived(result.archive)
    for name, value in stored.items():
        if name in merged:
            torch.testing.assert_close(value, merged[name], rtol=1e-6, atol=1e-6)


def test_the_reference_is_another_one_than_the_base(trained: Callable[..., tuple[Path, Path]]) -> None:
    model_folder, adapter_folder = trained("lora")
    plan = plan_check(load(model_folder).config, None, 3)
    adapter = open_adapter(str(adapter_folder))
    with_it = run_reference(model_folder, plan, adapter=adapter)
    without = run_reference(model_folder, plan)
    assert abs(with_it.text_logits - without.text_logits).max() > 0.05


@pytest.mark.parametrize("kind", ["dora", "conv1d-dora", "embedding", "lora-bias", "modules-to-save"])
def test_the_reference_without_peft_and_from_disk(
    kind: str, trained: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder, adapter_folder = trained(kind)
    config = load(model_folder).config
    plan = plan_check(config, None, 6, teacher_forced=True)
    adapter = open_adapter(str(adapter_folder))
    by_peft = run_reference(model_folder, plan, adapter=adapter)
    monkeypatch.setattr("t2n_llm.weights.placement._ALWAYS_RESIDENT_BYTES", 0)
    residency = plan_residency(meta_model(config), Placement("disk"))
    assert residency.offloaded
    from_disk = run_reference(model_folder, plan, adapter=adapter, residency=residency)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    by_us = run_reference(model_folder, plan, adapter=adapter)
    for other in (from_disk, by_us):
        torch.testing.assert_close(
            torch.tensor(other.text_logits), torch.tensor(by_peft.text_logits), rtol=1e-4, atol=1e-4
        )
        assert other.greedy_ids == by_peft.greedy_ids


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([4, 36, 1 << 20]),
)
def test_any_shape_in_any_chunks(out: int, inner: int, rank: int, transposed: bool, dora: bool, chunk: int) -> None:
    generator = torch.Generator().manual_seed(out * 100 + inner)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((rank, inner), (out, rank)))
    weight = torch.randn((inner, out) if transposed else (out, inner), generator=generator).to(torch.bfloat16)
    magnitude = torch.rand(out, generator=generator) + 0.5
    lora = LoraModule(
        "m",
        InMemoryTensor("a", a),
        InMemoryTensor("b", b),
        False,
        0.5,
        magnitude=InMemoryTensor("m", magnitude) if dora else None,
    )
    plain = (weight.T if transposed else weight).double() + 0.5 * (b.double() @ a.double())
    if dora:
        plain *= (magnitude.double() / plain.norm(dim=1)).unsqueeze(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_merge, "CHUNK_BYTES", chunk)
        merged = read_tensor(MergedTensor(InMemoryTensor("w", weight), LowRankUpdate(lora, transposed)))
    torch.testing.assert_close(merged.double(), plain.T if transposed else plain, rtol=1e-4, atol=1e-5)


def test_scaling_and_patterns() -> None:
    config = LoraConfig(8, 16.0, {"q_proj": 4, r"layers\.0\..*": 2}, {"v_proj": 3.0})
    assert (config.rank("model.layers.1.q_proj"), config.scaling("model.layers.1.q_proj")) == (4, 4.0)
    assert (config.rank("model.layers.0.v_proj"), config.scaling("model.layers.0.v_proj")) == (2, 1.5)
    assert config.rank("model.layers.1.xq_proj") == 8  # the pattern must match a whole part of the path
    assert LoraConfig(4, 8.0, rslora=True).scaling("x") == 4.0


# --- refusals ---------------------------------------------------------------------------------


def opened(adapter: Path) -> Adapter:
    return open_adapter(str(adapter))


@pytest.mark.parametrize("kind", ["IA3", "PROMPT_TUNING", "LOHA", None])
def test_other_types_are_named(kind: str | None, trained: Callable[..., tuple[Path, Path]]) -> None:
    _, adapter = trained()
    rewrite_config(adapter, peft_type=kind)
    with pytest.raises(AdapterError, match=f"type {kind} cannot be merged"):
        opened(adapter)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_replication": [[0, 2], [1, 3]]},
        {"alora_invocation_tokens": [1, 2]},
        {"target_parameters": ["experts.weight"]},
        {"trainable_token_indices": [1]},
        {"init_lora_weights": "pissa_niter_4"},
        {"use_qalora": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_no_sum_of_weights_is_refused(
    change: dict[str, Any], trained: Callable[..., tuple[Path, Path]]
) -> None:
    _, adapter = trained()
    rewrite_config(adapter, **change)
    with pytest.raises(AdapterError, match=str(change.get("init_lora_weights", next(iter(change))))):
        opened(adapter)


def test_another_width_names_the_module_and_the_size(
    trained: Callable[..., tuple[Path, Path]], base: Callable[[str], Path]
) -> None:
    _, adapter = trained("lora")
    config = FAMILIES["qwen3"]()
    config.hidden_size = 32
    with pytest.raises(AdapterError, match=r"model\.layers\.0\.mlp\.down_proj .*expects \[4, 96\] and \[32, 4\]"):
        opened(adapter).updates(meta_model(config))


def test_another_architecture_names_the_module(trained: Callable[..., tuple[Path, Path]]) -> None:
    _, adapter = trained("lora")
    with pytest.raises(AdapterError, match=r"adapts module model\.layers\.0\.mlp\.down_proj"):
        opened(adapter).updates(meta_model(FAMILIES["gpt2"]()))


def test_a_larger_vocabulary_names_both_shapes(trained: Callable[..., tuple[Path, Path]]) -> None:
    _, adapter = trained("modules-to-save")
    config = FAMILIES["qwen3"]()
    config.vocab_size = 200
    with pytest.raises(AdapterError, match=r"lm_head\.weight has shape \[160, 64\], but the model's has \[200, 64\]"):
        opened(adapter).updates(meta_model(config))


def test_one_of_two_tied_tensors_is_not_changed_alone(tmp_path: Path, base: Callable[[str], Path]) -> None:
    adapter = train(base("llama"), tmp_path / "a", {"target_modules": ["embed_tokens"]})
    with pytest.raises(AdapterError, match=r"model\.embed_tokens\.weight, which the model shares with lm_head\.weight"):
        opened(adapter).updates(load(base("llama")))


def test_a_rank_that_contradicts_the_config(trained: Callable[..., tuple[Path, Path]]) -> None:
    _, adapter = trained()
    rewrite_config(adapter, r=8)
    with pytest.raises(AdapterError, match="expected rank 8"):
        opened(adapter)


def test_files_that_are_damaged_or_missing(trained: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    _, adapter = trained()
    with pytest.raises(SourceError, match="no such folder"):
        opened(tmp_path / "nowhere")
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        opened(adapter)
    weights.unlink()
    with pytest.raises(SourceError, match="no adapter_model"):
        opened(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(SourceError, match="not the config"):
        opened(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(SourceError, match="no adapter_config"):
        opened(adapter)


def test_half_a_module(trained: Callable[..., tuple[Path, Path]]) -> None:
    _, adapter = trained()
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({key: value for key, value in tensors.items() if "layers.1.mlp.down_proj.lora_B" not in key}, path)
    with pytest.raises(AdapterError, match=r"model\.layers\.1\.mlp\.down_proj has no lora_B"):
        opened(adapter)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora", "target_modules"]),
        st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
        | st.dictionaries(st.text(max_size=3), st.integers(-2, 9), max_size=2),
    )
)  # fmt: skip
def test_any_config_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("fuzzed")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2} | changes))
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{prefix}.lora_A.weight": torch.ones(2, 64), f"{prefix}.lora_B.weight": torch.ones(96, 2)},
        folder / "adapter_model.safetensors",
    )
    try:
        open_adapter(str(folder)).updates(meta_model(FAMILIES["qwen3"]()))
    except T2NError:
        pass
    finally:
        shutil.rmtree(folder)


# --- the command line -------------------------------------------------------------------------


def test_adapter_option_and_validation(trained: Callable[..., tuple[Path, Path]], parent: Path) -> None:
    model_folder, adapter_folder = trained("lora")
    folder = parent / "x"
    options = ("--no-tokenizer", "--dtype", "f32", "--decode-steps", 4)
    outcome = call("export", model_folder, "-o", folder, *options, "--adapter", adapter_folder)
    assert outcome.code == 0, outcome
    assert json.loads((folder / "export.json").read_text())["adapter"]["name"] == adapter_folder.name
    checking = ("validate", folder, "--reference", model_folder, "--decode-steps", 4)
    refused(call(*checking), adapter_folder.name)
    unnamed = call("validate", folder)
    refused(unnamed, f"with a local adapter ({adapter_folder.name})")
    assert "--reference PATH --adapter PATH" in unnamed.line("hint")
    # The summary ends with the command that names both.
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("check it")]
    tool, *words = shlex.split(line.removeprefix("check it"))
    assert tool == "t2n-llm" and words[-2:] == ["--adapter", str(adapter_folder)]
    agrees = call(*words, "--decode-steps", 4, "--json")
    assert agrees.code == 0, agrees
    assert strict_json(agrees.out)["passed"] is True
    path = adapter_folder / "adapter_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path)
    refused(call(*checking, "--adapter", adapter_folder), "checksum")


def test_an_adapter_that_does_not_fit_leaves_nothing_behind(
    trained: Callable[..., tuple[Path, Path]], base: Callable[[str], Path], parent: Path
) -> None:
    _, adapter_folder = trained("conv1d")
    words = ("export", base("qwen3"), "-o", parent / "x", "--no-tokenizer", "--dtype", "f32")
    outcome = call(*words, "--adapter", adapter_folder)
    refused(outcome, "transformer.h.0")
    assert list(parent.iterdir()) == []


def test_an_adapter_of_the_hub(trained: Callable[..., tuple[Path, Path]], parent: Path, tmp_path: Path) -> None:
    """By its id, from the hub's cache; its commit is recorded, so that validation finds it again."""
    model_folder, adapter_folder = trained("lora")
    repository = tmp_path / "hub" / "models--org--tuned"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(adapter_folder, repository / "snapshots" / COMMIT)
    options = ("--decode-steps", 2, "--json")
    words = ("export", model_folder, "--no-tokenizer", "--dtype", "f32")
    variables = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    commands: list[list[object]] = [
        [*words, "-o", parent / "x", "--adapter", "org/tuned", *options],
        ["validate", parent / "x", "--reference", model_folder, *options],
        [*words, "-o", parent / "y", "--adapter", "org/absent"],
    ]
    exported, checked, absent = (call(*command, variables=variables) for command in commands)
    assert exported.code == 0, exported
    recorded = strict_json(exported.out)["adapter"]
    assert (recorded["name"], recorded["revision"]) == ("org/tuned", COMMIT)
    assert checked.code == 0, checked
    refused(absent, "org/absent")
