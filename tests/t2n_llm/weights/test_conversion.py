"""Weight conversions: what is recorded and streamed is what transformers makes of the same tensors."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from generic_export.errors import MissingTensorError, WeightError
from generic_export.weights import FileTensor, InMemoryTensor, TensorSource, open_checkpoint
from generic_export.weights.checkpoint import Checkpoint
from t2n_llm.source.wrapped_names import unwrapped
from t2n_llm.weights import expressions
from t2n_llm.weights.conversion import ConvertedTensor, record
from t2n_llm.weights.names import ParameterMatch, match_parameters

ROOT = Path(__file__).resolve().parents[3]


def values(source: TensorSource) -> torch.Tensor:
    """Read a source whole."""
    data = bytearray(b"".join(source.chunks()))
    assert len(data) == source.nbytes
    flat = torch.frombuffer(data, dtype=source.dtype) if data else torch.empty(0, dtype=source.dtype)
    return flat.reshape(source.shape)


# --- against transformers ---------------------------------------------------------------------

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 12,  # beyond 9: experts must come in the order of numbers, not of letters
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_GROUPED = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}

# family -> what its config needs besides, and whether its checkpoint is stored in another form than its parameters.
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "mixtral": ({}, True),
    "qwen2_moe": ({"shared_expert_intermediate_size": 24}, True),
    "qwen3_moe": ({}, True),
    "qwen3_next": ({}, True),
    "deepseek_v2": (_LATENT | {"n_group": 1}, True),
    "deepseek_v3": (_LATENT, True),
    "gpt_oss": ({}, False),
    "llama4_text": ({"intermediate_size_mlp": 32}, False),
    "phimoe": ({}, True),
    "olmoe": ({}, True),
    "jamba": ({}, True),
    "glm4_moe": (_GROUPED, True),
    "dots1": (_GROUPED, True),
    "minimax": ({}, True),
    "hunyuan_v1_moe": ({"moe_topk": 2}, True),
    "nemotron_h": ({}, True),
    "granitemoe": ({}, False),
    "kimi_linear": ({}, True),  # joined convolutions
    "olmo_hybrid": ({}, True),
    "hrm_text": ({}, False),  # one tensor split in several: regions of the file
    "inkling2_text": ({"unpadded_vocab_size": 96}, True),  # interleaved rows
    "deepseek_v4": ({}, True),
    "gpt_neox": ({}, False),
}


def config(family: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **(_COMMON | FAMILIES[family][0]))


def saved(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a random model as its vendor would: `save_pretrained` undoes the conversions."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(family), dtype=dtype).save_pretrained(folder)
    return folder


def skeleton(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(family), dtype=dtype)


def matched(family: str, folder: Path) -> ParameterMatch:
    return match_parameters(skeleton(family), unwrapped(open_checkpoint(folder)).tensors)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Return what transformers itself makes of a checkpoint."""
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())


def check_equal(found: ParameterMatch, expected: dict[str, torch.Tensor]) -> None:
    assert found.unclaimed == ()
    assert found.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        source = found.tensors[name]
        assert (source.name, source.shape) == (name, tuple(tensor.shape))
        assert torch.equal(values(source).to(tensor.dtype), tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_values_that_transformers_loads(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    found = matched(family, folder)
    is_converted = any(isinstance(source, ConvertedTensor) for source in found.tensors.values())
    assert is_converted is FAMILIES[family][1]
    check_equal(found, loaded(folder))


@pytest.mark.parametrize("chunk_bytes", [2, 1000])
def test_the_size_of_chunks_does_not_matter(chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from generic_export.weights import source as source_module

    folder = saved("mixtral", tmp_path)
    expected = loaded(folder)
    for module in (expressions, source_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    found = matched("mixtral", folder)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert all(len(chunk) <= chunk_bytes for chunk in found.tensors[name].chunks())
    check_equal(found, expected)


def test_experts_in_another_order_and_in_a_torch_file(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    expected = loaded(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(dict(reversed(tensors.items())), folder / "pytorch_model.bin")
    check_equal(matched("mixtral", folder), expected)


# --- names ------------------------------------------------------------------------------------


def renamed(folder: Path, rename: Callable[[str], str | None]) -> None:
    """Rename the tensors of a checkpoint; None drops one."""
    tensors = load_file(folder / "model.safetensors")
    new = {rename(name): value for name, value in tensors.items()}
    save_file({name: value for name, value in new.items() if name}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace(".layers.", "._orig_mod.layers."),
        lambda name: name.replace(".mlp.", "._fsdp_wrapped_module.mlp._checkpoint_wrapped_module."),
        lambda name: name.removeprefix("model."),
    ],
    ids=["compiled", "ddp", "compiled in ddp", "compiled inside", "fsdp", "base model"],
)
@pytest.mark.parametrize("family", ["mixtral", "gpt_neox"])
def test_wrappers_and_prefixes_come_off(family: str, rename: Callable[[str], str], tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    expected = loaded(folder)
    renamed(folder, rename)
    check_equal(matched(family, folder), expected)


def test_one_name_under_two_wrappers(tmp_path: Path) -> None:
    tensors = {
        name: InMemoryTensor(name, torch.ones(96, 32)) for name in ("lm_head.weight", "_orig_mod.lm_head.weight")
    }
    with pytest.raises(WeightError, match=r"lm_head\.weight: .* contains it twice, as lm_head.* and as _orig_mod"):
        unwrapped(Checkpoint(tensors, (), 0))


def test_tensors_without_a_parameter_are_told(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.9.extra.weight": torch.ones(2)}, folder / "model.safetensors")
    assert matched("mixtral", folder).unclaimed == ("model.layers.9.extra.weight",)


# --- damaged groups ---------------------------------------------------------------------------

_EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_a_missing_expert_is_named(part: str, number: int, tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    missing = _EXPERT.format(number, part)
    assert missing in load_file(folder / "model.safetensors")
    renamed(folder, lambda name: None if name == missing else name)
    with pytest.raises(MissingTensorError, match=f"no tensor '{missing}', a part of model.layers.1.mlp.experts"):
        matched("mixtral", folder)


def test_a_whole_kind_of_expert_missing_is_named(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    renamed(folder, lambda name: None if ".w3." in name else name)
    with pytest.raises(MissingTensorError, match=r"experts\.\*\.w3\.weight'"):
        matched("mixtral", folder)


def test_fewer_experts_than_the_config_says(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    renamed(folder, lambda name: None if ".experts.11." in name else name)
    with pytest.raises(WeightError, match=r"shape \[12, 96, 32\] cannot be built from 22 .*they make \[11, 96, 32\]"):
        matched("mixtral", folder)


def test_an_expert_of_another_shape(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[_EXPERT.format(3, "w1")] = torch.ones(5, 5, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightError, match=r"gate_up_proj of shape .* cannot be built from 24 checkpoint tensors"):
        matched("mixtral", folder)


def test_experts_of_several_dtypes(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[_EXPERT.format(3, "w1")] = tensors[_EXPERT.format(3, "w1")].float()
    save_file(tensors, folder / "model.safetensors")
    found = matched("mixtral", folder)
    assert found.tensors["model.layers.1.mlp.experts.gate_up_proj"].dtype is torch.float32
    check_equal(found, loaded(folder))


# --- expressions ------------------------------------------------------------------------------


def _shared_axis(draw: st.DrawFn, tensor: torch.Tensor) -> int:
    return draw(st.integers(0, tensor.dim() - 1))


def _split(draw: st.DrawFn, held: list[torch.Tensor]) -> list[torch.Tensor]:
    axis = _shared_axis(draw, held[0])
    pieces = draw(st.integers(1, 4))
    return [piece.contiguous() if draw(st.booleans()) else piece for piece in held[0].chunk(pieces, dim=axis)] + held[
        1:
    ]


def _cat(draw: st.DrawFn, held: list[torch.Tensor]) -> list[torch.Tensor]:
    same = [tensor for tensor in held if tensor.shape == held[0].shape]
    return [torch.cat(same, dim=_shared_axis(draw, held[0]))]


def _stack(draw: st.DrawFn, held: list[torch.Tensor]) -> list[torch.Tensor]:
    same = [tensor for tensor in held if tensor.shape == held[0].shape]
    return [torch.stack(same, dim=draw(st.integers(-held[0].dim(), held[0].dim())))] if held[0].dim() < 5 else held


def _transpose(draw: st.DrawFn, held: list[torch.Tensor]) -> list[torch.Tensor]:
    first, second = _shared_axis(draw, held[0]), _shared_axis(draw, held[0])
    return [held[0].transpose(first, second - held[0].dim()), *held[1:]]


def _interleave(draw: st.DrawFn, held: list[torch.Tensor]) -> list[torch.Tensor]:
    axis, tensor = _shared_axis(draw, held[0]), held[0]
    shape = list(tensor.shape)
    if shape[axis] % 2:
        return held
    shape[axis : axis + 1] = [shape[axis] // 2, 2]
    return [tensor.reshape(shape).transpose(axis, axis + 1).reshape(tensor.shape), *held[1:]]


def _reshape(draw: st.DrawFn, held: list[torch.Tensor]) -> list[torch.Tensor]:
    rows = draw(st.sampled_from([1, 2, 3, held[0].shape[0]]))
    return [held[0].reshape(rows, -1), *held[1:]] if held[0].numel() and held[0].numel() % rows == 0 else held


def _pick(draw: st.DrawFn, held: list[torch.Tensor]) -> list[torch.Tensor]:
    axis = _shared_axis(draw, held[0])
    if held[0].dim() < 2 or not held[0].shape[axis]:
        return held
    index = draw(st.integers(0, held[0].shape[axis] - 1))
    picked = draw(st.sampled_from(["select", "unbind", "slice"]))
    if picked == "select":
        return [held[0].select(axis, index), *held[1:]]
    if picked == "unbind":
        return [held[0].unbind(axis)[index], *held[1:]]
    return [held[0].narrow(axis, index, held[0].shape[axis] - index), *held[1:]]


def _add(draw: st.DrawFn, held: list[torch.Tensor]) -> list[torch.Tensor]:
    del draw
    return [held[0] + 1, *held[1:]]


_OPERATIONS = (_split, _cat, _stack, _transpose, _interleave, _reshape, _pick, _add)


@dataclass
class _Replay:
    """Gives the same draws twice: once for real tensors, once for recorded ones."""

    drawn: Iterator[Any]

    def __call__(self, strategy: Any) -> Any:
        del strategy
        return next(self.drawn)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([8, 24, 40, 1 << 20]))
def test_any_chain_of_operations_streams_its_values(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, from_file: bool, chunk_bytes: int
) -> None:
    count, shape = data.draw(st.integers(1, 3)), data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    real = [torch.arange(torch.Size(shape).numel()).reshape(shape) + 100 * index for index in range(count)]
    sources: list[TensorSource] = [InMemoryTensor(f"t{index}", tensor) for index, tensor in enumerate(real)]
    if from_file:
        path = tmp_path_factory.mktemp("c") / "m.safetensors"
        save_file({f"t{index}": tensor for index, tensor in enumerate(real)}, path)
        sources = list(open_checkpoint(path).tensors.values())
        assert all(isinstance(source, FileTensor) for source in sources)
    recorded: list[torch.Tensor] = [record(source) for source in sources]
    for operation in data.draw(st.lists(st.sampled_from(_OPERATIONS), max_size=5)):
        log: list[Any] = []

        def draw(strategy: Any, log: list[Any] = log) -> Any:
            log.append(data.draw(strategy))
            return log[-1]

        real = operation(draw, real)
        recorded = operation(_Replay(iter(log)), recorded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expressions, "CHUNK_BYTES", chunk_bytes)
        for index, (expected, found) in enumerate(itertools.zip_longest(real, recorded)):
            source = ConvertedTensor(f"out{index}", found, ("t0",))
            assert torch.equal(values(source), expected)
            assert (source.shape, source.dtype) == (tuple(expected.shape), expected.dtype)


def test_an_operation_that_writes_is_refused() -> None:
    with pytest.raises(RuntimeError, match="writes into a tensor of the checkpoint"):
        record(InMemoryTensor("w", torch.ones(2))).add_(1)


_STREAM = """
import resource, sys, torch
from pathlib import Path
from generic_export.weights import open_checkpoint
from t2n_llm.weights.conversion import ConvertedTensor, record
sources = open_checkpoint(Path(sys.argv[1])).tensors
stack = lambda part: torch.stack([record(s) for n, s in sources.items() if part in n], dim=0)
whole = ConvertedTensor("gate_up", torch.cat([stack("w1"), stack("w3")], dim=1), tuple(sources))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
done = sum(len(chunk) for chunk in whole.chunks())
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_fusing_experts_takes_little_memory(tmp_path: Path) -> None:
    """A group of 256 MiB, each expert of it 32 MiB."""
    path, header, offset = tmp_path / "m.safetensors", {}, 0
    for expert, part in itertools.product(range(8), ("w1", "w3")):
        header[f"{expert}.{part}"] = {
            "dtype": "BF16",
            "shape": [4096, 2048],
            "data_offsets": [offset, offset + (16 << 20)],
        }
        offset += 16 << 20
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    done = subprocess.run(
        [sys.executable, "-c", _STREAM, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    streamed, grown = map(int, done.stdout.split())
    assert streamed == 256 << 20
    assert grown < 100 * 1024
