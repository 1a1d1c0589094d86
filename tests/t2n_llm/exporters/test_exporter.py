# ruff: noqa: E402 - an older transformers has none of what these import
"""`TractExporter` and what runs its exports, held against the model; manifests that nobody should load."""

from tests.exporter_backends import skip_without_backends

skip_without_backends()

import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification
from transformers.exporters import AutoHfExporter, ExportedModel

from generic_export.errors import ArchiveError, OptionError
from quant import QTensor
from t2n_llm.exporters import TractConfig, TractExporter

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def bert() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=40, **SIZES)).eval()


def texts(batch: int, steps: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(batch * steps).remainder(60).reshape(batch, steps)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def answer(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    with torch.no_grad():
        return model(**inputs)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def saved(bert: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    with pytest.warns(UserWarning, match="at most 40"):
        exported = TractExporter().export(bert, texts(2, 8), TractConfig(dynamic=True))
    exported.save_pretrained(folder)
    return folder


def test_an_export_loads_and_runs_at_other_sizes(bert: Any, saved: Path) -> None:
    loaded = ExportedModel.from_pretrained(saved)
    assert loaded.device == torch.device("cpu")
    assert loaded.dtype is torch.float32
    for inputs in (texts(2, 8), texts(1, 5), texts(3, 17)):
        found, wanted = loaded(**inputs), answer(bert, inputs)
        assert type(found) is type(wanted)
        assert close(found.logits, wanted.logits)


def test_arguments_that_were_not_in_the_example_are_dropped(bert: Any, saved: Path) -> None:
    found = ExportedModel.from_pretrained(saved)(**texts(2, 8), token_type_ids=torch.zeros(2, 8).long())
    assert close(found.logits, answer(bert, texts(2, 8)).logits)


def test_a_static_export_by_its_config(bert: Any) -> None:
    config = TractConfig()
    exported = AutoHfExporter.from_config(config).export(bert, texts(2, 8), config)
    assert close(exported(**texts(2, 8)).logits, answer(bert, texts(2, 8)).logits)


def test_named_axes(bert: Any, tmp_path: Path) -> None:
    shapes = {name: {0: Dim("B"), 1: Dim.AUTO} for name in texts(2, 8)}
    exported = TractExporter().export(bert, texts(2, 8), TractConfig(dynamic_shapes=shapes))
    assert close(exported(**texts(4, 6)).logits, answer(bert, texts(4, 6)).logits)


def test_axes_of_an_argument_that_the_example_does_not_have(bert: Any) -> None:
    with pytest.raises(OptionError, match="'pixels'"):
        TractExporter().export(bert, texts(2, 8), TractConfig(dynamic_shapes={"pixels": {0: Dim.AUTO}}))


def test_an_image_has_the_size_of_its_table_of_positions() -> None:
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **SIZES)).eval()
    with pytest.warns(UserWarning, match=r"pixel_values: 1 \(3\), 2 \(16\), 3 \(16\)"):
        exported = TractExporter().export(model, {"pixel_values": torch.randn(2, 3, 16, 16)}, TractConfig(dynamic=True))
    pixels = torch.randn(5, 3, 16, 16)
    assert close(exported(pixel_values=pixels).logits, answer(model, {"pixel_values": pixels}).logits)


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 2e-2), ("f16", 2e-2), ("f32", 2e-2)])
def test_a_model_in_bfloat16(bert: Any, dtype: str | None, tolerance: float) -> None:
    model = BertForSequenceClassification(bert.config)
    model.load_state_dict(bert.state_dict())
    model = model.to(torch.bfloat16).eval()
    exported = TractExporter().export(model, texts(2, 8), TractConfig(dtype=dtype))
    assert exported.dtype is torch.float32
    assert next(model.parameters()).dtype is torch.bfloat16
    assert close(exported(**texts(2, 8)).logits, answer(bert, texts(2, 8)).logits, tolerance)


def test_options_that_are_refused() -> None:
    for options in ({"dtype": "bf16"}, {"tolerance": "near"}):
        with pytest.raises(OptionError):
            TractConfig(**options)


@pytest.mark.parametrize(
    "context",
    [
        '{"_t": "seq", "p": "os.system", "v": ["true"]}',
        '{"_t": "obj", "p": "transformers.utils.import_utils.os", "s": {}}',
        '{"_t": "seq", "p": "transformers.pipelines.pipeline", "v": []}',
        "[" * 200 + "]" * 200,
    ],
)
def test_a_treespec_that_would_run_code(saved: Path, tmp_path: Path, context: str) -> None:
    manifest = json.loads((saved / "export.json").read_text())
    spec = json.loads(manifest["components"]["model"]["metadata"]["out_spec"])
    spec[1]["context"] = context
    manifest["components"]["model"]["metadata"]["out_spec"] = json.dumps(spec)
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "export.json").write_text(json.dumps(manifest))
    with pytest.raises(ArchiveError, match="treespec"):
        ExportedModel.from_pretrained(tmp_path)


def test_an_older_transformers_is_named(tmp_path: Path) -> None:
    package = tmp_path / "transformers" / "exporters"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text('__version__ = "5.22.0"\n')
    (package / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import t2n_llm.exporters"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "transformers 5.22.0 has no register_backend" in ended.stderr
    assert "transformers 5.23 or later" in ended.stderr


def test_the_model_is_handed_back_as_it_was(bert: Any) -> None:
    before = {name: tensor.clone() for name, tensor in bert.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        TractExporter().export(bert, texts(2, 8), TractConfig(dtype="f16"))
    assert "forward" not in vars(bert)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bert.state_dict().items())


def test_linear_layers_in_blocks_of_4_bits(bert: Any, tmp_path: Path) -> None:
    layers = {name: module for name, module in bert.named_modules() if isinstance(module, torch.nn.Linear)}
    own = {name: module.weight for name, module in layers.items()}
    TractExporter().export(bert, texts(2, 8), TractConfig(compress="q4_0")).save_pretrained(tmp_path)
    assert all(module.weight is own[name] for name, module in layers.items())

    quantized = copy.deepcopy(bert)
    for module in quantized.modules():
        if isinstance(module, torch.nn.Linear) and module.in_features % 32 == 0:
            module.weight = torch.nn.Parameter(QTensor.from_float(module.weight).dequantize(), requires_grad=False)
    found = ExportedModel.from_pretrained(tmp_path)(**texts(2, 8)).logits
    assert close(found, answer(quantized, texts(2, 8)).logits)
    assert not close(found, answer(bert, texts(2, 8)).logits)


def test_a_compression_that_has_nothing_to_do_is_refused(bert: Any) -> None:
    with pytest.raises(OptionError, match=r"compress is .q8_0."):
        TractConfig(compress="q8_0")  # type: ignore[arg-type]
    narrow = BertForSequenceClassification(
        BertConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(OptionError, match="no linear layer with a multiple of 32 inputs"):
        TractExporter().export(narrow.eval(), texts(2, 8), TractConfig(compress="q4_0"))
