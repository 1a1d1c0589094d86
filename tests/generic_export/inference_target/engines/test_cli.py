"""The real tract command on tiny archives: what it accepts, what it refuses, and what it does not look at."""

import json
import shlex
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generic_export.errors import (
    EngineCrashError,
    EngineError,
    EngineLoadError,
    EngineMissingError,
    EngineRunError,
    EngineTimeoutError,
    OptionError,
)
from generic_export.inference_target.tract.engines.cli import CommandOptions, TractCli, write_bundle
from generic_export.inference_target.tract.releases.install import TRACT_CLI_VERSION, find_tract_cli, installed_path

CLI = find_tract_cli()
pytestmark = pytest.mark.skipif(CLI is None, reason="tract command not installed: run scripts/install_tract_cli")

VOCABULARY, WIDTH = 16, 8
HEADER = """version 1.0;
extension tract_registry tract_core;
extension tract_registry tract_transformers;
extension tract_symbol S;
extension tract_symbol P;
"""
ADD = "graph net(x) -> (y) { x = external<scalar>(shape=[S, 3]); y = x + 1.0; }"

# One attention layer over a key and a value cache, the way exported language models are written.
DECODER = """graph net(input_ids, in_cache_key_0, in_cache_value_0) -> (outputs, out_cache_key_0, out_cache_value_0) {
  input_ids = tract_core_external(shape=[1, S], datum_type="i64");
  in_cache_key_0 = tract_core_external(shape=[1, 2, P, 4], datum_type="DTYPE");
  in_cache_value_0 = tract_core_external(shape=[1, 2, P, 4], datum_type="DTYPE");
  w = variable<scalar>(label="w", shape=[16, 8]);
  x = tract_core_gather(w, input_ids, axis=0);
  q = transpose(reshape(x, shape=[1, S, 2, 4]), axes=[0, 2, 1, 3]);
  out_cache_key_0 = concat([in_cache_key_0, q], axis=2);
  out_cache_value_0 = concat([in_cache_value_0, q], axis=2);
  h = tract_transformers_sdpa(q, out_cache_key_0, out_cache_value_0,
                              datum_type="DTYPE", acc_datum_type="f32", is_causal=true);
  m = reshape(transpose(h, axes=[0, 2, 1, 3]), shape=[1, S, 8]);
  outputs = tract_core_einsum([m, w], expr="bsk,nk->bsn", acc="DTYPE");
}"""
CACHES = {"in_cache_key_0": "out_cache_key_0", "in_cache_value_0": "out_cache_value_0"}


def write_archive(folder: Path, graph: str, w: np.ndarray | None = None) -> Path:
    """Write graph.nnef and, when given, the float weight `w` by hand (docs/contributing/engine-facts.md#tensor-files)."""
    folder.mkdir(exist_ok=True)
    (folder / "graph.nnef").write_text(HEADER + graph)
    if w is not None:
        dims, bits = [*w.shape, *[0] * (8 - w.ndim)], 8 * w.itemsize
        header = struct.pack(
            "<BBBBII8IIHH32s11I", 0x4E, 0xEF, 1, 0, w.nbytes, w.ndim, *dims, bits, 0, 0, bytes(32), *[0] * 11
        )
        (folder / "w.dat").write_bytes(header + w.tobytes())
    return folder


def embedding(dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((VOCABULARY, WIDTH)).astype(dtype)


def decode(w: np.ndarray, ids: list[int], key: np.ndarray, value: np.ndarray) -> dict[str, np.ndarray]:
    """Compute in numpy what DECODER computes."""
    w = w.astype(np.float64)
    q = w[ids].reshape(len(ids), 2, 4).transpose(1, 0, 2)[None]
    keys, values = np.concatenate([key, q], axis=2), np.concatenate([value, q], axis=2)
    scores = q @ keys.transpose(0, 1, 3, 2) / 2.0
    past = key.shape[2]
    scores += np.where(np.arange(keys.shape[2]) > past + np.arange(len(ids))[:, None], -np.inf, 0.0)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ values
    outputs = mixed.transpose(0, 2, 1, 3).reshape(1, len(ids), WIDTH) @ w.T
    result = {"outputs": outputs, "out_cache_key_0": keys, "out_cache_value_0": values}
    return {name: array.astype(np.float32) for name, array in result.items()}


def turn(ids: list[int], key: np.ndarray | None = None, value: np.ndarray | None = None) -> dict[str, np.ndarray]:
    inputs = {"input_ids": np.array([ids]), "in_cache_key_0": key, "in_cache_value_0": value}
    return {name: array for name, array in inputs.items() if array is not None}


EMPTY = np.zeros((1, 2, 0, 4), np.float32)


@pytest.fixture(scope="module")
def cli() -> TractCli:
    return TractCli(CLI, timeout_seconds=60)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archive(tmp_path_factory.mktemp("f32") / "decoder", DECODER.replace("DTYPE", "f32"), embedding())


@pytest.fixture(scope="module")
def decoder_f16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("f16") / "decoder"
    return write_archive(folder, DECODER.replace("DTYPE", "f16"), embedding(np.float16))


@pytest.fixture
def add(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "add", ADD)


@pytest.fixture
def past() -> tuple[np.ndarray, np.ndarray]:
    key, value = np.random.default_rng(1).standard_normal((2, 1, 2, 3, 4)).astype(np.float16).astype(np.float32)
    return key, value


# --- one turn ---------------------------------------------------------------------------------


def test_bundle_with_past_passes_and_its_command_can_be_pasted(
    cli: TractCli, decoder: Path, past: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    bundle = tmp_path / "with a space.npz"
    write_bundle(bundle, [turn([1, 5, 2], *past)], decode(embedding(), [1, 5, 2], *past), caches=CACHES)
    check = cli.check_bundle(decoder, bundle, CommandOptions(approximation="approximate"))
    assert check.passed and check.checked_outputs == 3 and not check.unchecked_outputs
    assert "Checked output #2, ok." in check.output
    assert check.command == cli.assert_io_cmd_str(decoder, bundle, CommandOptions(approximation="approximate"))
    assert "--llm --transform unfold-kv-cache -O run" in check.command
    assert subprocess.run(check.command, shell=True, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", ["outputs", "out_cache_key_0"])
def test_planted_wrong_output_fails(
    cli: TractCli, decoder: Path, past: tuple[np.ndarray, np.ndarray], tmp_path: Path, name: str
) -> None:
    expected = decode(embedding(), [1, 5, 2], *past)
    expected[name].flat[3] += 0.1
    write_bundle(tmp_path / "wrong.npz", [turn([1, 5, 2], *past)], expected, caches=CACHES)
    check = cli.check_bundle(decoder, tmp_path / "wrong.npz", CommandOptions(approximation="approximate"))
    assert not check.passed
    assert "Mismatch. First outlier" in check.output
    assert cli.check_bundle(decoder, tmp_path / "wrong.npz", CommandOptions(atol=0.2, rtol=0)).passed
    assert not cli.check_bundle(decoder, tmp_path / "wrong.npz", CommandOptions(atol=0.05)).passed


def test_unfolded_cache_is_compared_only_under_its_concat_name(
    cli: TractCli, decoder: Path, past: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    expected = decode(embedding(), [1], *past)
    expected["out_cache_key_0"] += 1
    write_bundle(tmp_path / "unseen.npz", [turn([1], *past)], expected)  # caches= not given
    check = cli.check_bundle(decoder, tmp_path / "unseen.npz", CommandOptions(approximation="approximate"))
    assert check.passed and check.checked_outputs == 1
    assert check.unchecked_outputs == ("in_cache_key_0_concat", "in_cache_value_0_concat")


def test_folded_model_starts_without_past(
    cli: TractCli, decoder: Path, past: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    def passes(name: str, key: np.ndarray, value: np.ndarray) -> bool:
        write_bundle(tmp_path / name, [turn([1, 2], key, value)], decode(embedding(), [1, 2], key, value))
        return cli.check_bundle(decoder, tmp_path / name, CommandOptions(atol=1e-4, unfold_kv_cache=False)).passed

    assert passes("empty.npz", EMPTY, EMPTY)
    assert not passes("past.npz", *past)


def test_f16_archive_takes_f32_bundle_with_float_casts_only(
    cli: TractCli, decoder_f16: Path, past: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle.npz"
    inputs = {name: a.astype(np.float16) if "cache" in name else a for name, a in turn([1, 5], *past).items()}
    write_bundle(bundle, [inputs], decode(embedding(np.float16), [1, 5], *past), caches=CACHES)
    with np.load(bundle) as stored:
        assert stored["in_cache_key_0"].dtype == np.float32
    check = cli.check_bundle(
        decoder_f16, bundle, CommandOptions(approximation="approximate", atol=1e-2, allow_float_casts=True)
    )
    assert check.passed and check.checked_outputs == 3
    with pytest.raises(EngineRunError, match=r"can not reconcile model input fact 1,2,P,4,F16"):
        cli.check_bundle(decoder_f16, bundle)
    outputs = cli.run_bundle(decoder_f16, bundle, CommandOptions(allow_float_casts=True))
    assert {array.dtype for array in outputs.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(outputs["outputs"], outputs["outputs"].astype(np.float16))


def test_f16_npz_is_refused_before_running(cli: TractCli, decoder_f16: Path, tmp_path: Path) -> None:
    half: dict[str, Any] = {**turn([1]), "in_cache_key_0": EMPTY.astype(np.float16)}
    np.savez(tmp_path / "half.npz", **half)
    with pytest.raises(OptionError, match=r"in_cache_key_0\.npy is float16.*allow_float_casts=True"):
        cli.check_bundle(decoder_f16, tmp_path / "half.npz")


def test_rank_biased_overlap_and_prompt_chunks(cli: TractCli, decoder: Path, tmp_path: Path) -> None:
    bundle, ids = tmp_path / "bundle.npz", [1, 5, 2, 7, 3]
    expected = decode(embedding(), ids, EMPTY, EMPTY)
    write_bundle(bundle, [turn(ids, EMPTY, EMPTY)], expected)
    assert cli.check_bundle(decoder, bundle, CommandOptions(rank_biased_overlap=0.9)).passed
    expected["outputs"] = expected["outputs"][:, 4:]
    write_bundle(bundle, [turn(ids, EMPTY, EMPTY)], expected, caches=CACHES)
    chunked = cli.check_bundle(decoder, bundle, CommandOptions(prompt_chunk_size=2, atol=1e-4))
    assert chunked.passed and chunked.checked_outputs == 3
    write_bundle(bundle, [turn(ids, EMPTY, EMPTY)], {"outputs": -expected["outputs"]})
    check = cli.check_bundle(decoder, bundle, CommandOptions(prompt_chunk_size=2, rank_biased_overlap=0.5))
    assert not check.passed and "RBO criteria not met" in check.output


# --- several turns ----------------------------------------------------------------------------


@pytest.mark.parametrize("unfold", [True, False])
def test_multi_turn_bundle_feeds_the_cache_back(
    cli: TractCli, decoder: Path, decoder_f16: Path, tmp_path: Path, unfold: bool
) -> None:
    w, bundle = embedding(np.float16), tmp_path / "turns.npz"
    first = decode(w, [1, 5, 2], EMPTY, EMPTY)
    last = decode(w, [7], first["out_cache_key_0"], first["out_cache_value_0"])
    write_bundle(bundle, [turn([1, 5, 2], EMPTY, EMPTY), turn([7])], last, caches=CACHES)
    with np.load(bundle) as stored:
        assert {"turn_0/input_ids", "turn_1/input_ids", "turn_0/in_cache_key_0", "outputs"} <= set(stored)
    check = cli.check_bundle(
        decoder_f16, bundle, CommandOptions(atol=2e-2, unfold_kv_cache=unfold, allow_float_casts=True)
    )
    assert check.passed and check.checked_outputs == (3 if unfold else 1)
    outputs = cli.run_bundle(decoder_f16, bundle, CommandOptions(unfold_kv_cache=unfold, allow_float_casts=True))
    np.testing.assert_allclose(outputs["turn_0/outputs"], first["outputs"], atol=2e-2)
    np.testing.assert_allclose(outputs["turn_1/outputs"], last["outputs"], atol=2e-2)
    assert ("turn_1/in_cache_key_0_concat" in outputs) is unfold
    last["outputs"][0, 0, 0] += 1
    write_bundle(bundle, [turn([1, 5, 2], EMPTY, EMPTY), turn([7])], last)
    assert not cli.check_bundle(
        decoder_f16, bundle, CommandOptions(atol=2e-2, unfold_kv_cache=unfold, allow_float_casts=True)
    ).passed


def test_bundles_that_tract_misreads_are_refused(cli: TractCli, decoder: Path, tmp_path: Path) -> None:
    turns = [turn([1, 5, 2], EMPTY, EMPTY), turn([7])]
    interleaved: dict[str, Any] = {
        f"turn_{i}/{name}": array for i, inputs in enumerate(turns) for name, array in inputs.items()
    }
    np.savez(tmp_path / "interleaved.npz", **interleaved)
    with pytest.raises(OptionError, match="turns of input_ids are not adjacent"):
        cli.check_bundle(decoder, tmp_path / "interleaved.npz")
    outputs: dict[str, Any] = {f"turn_{i}/outputs": np.zeros((1, 1, VOCABULARY), np.float32) for i in range(2)}
    inputs: dict[str, Any] = {f"turn_{i}/input_ids": np.array([[i]]) for i in range(2)}
    np.savez(tmp_path / "all.npz", **inputs, **outputs, in_cache_key_0=EMPTY, in_cache_value_0=EMPTY)
    with pytest.raises(OptionError, match=r"several turns of outputs.*last turn with the first value"):
        cli.check_bundle(decoder, tmp_path / "all.npz")
    (tmp_path / "text.npz").write_text("no zip")
    with pytest.raises(OptionError, match="not a readable npz"):
        cli.run_bundle(decoder, tmp_path / "text.npz")


def test_float_inputs_of_several_turns_are_known_as_inputs_when_cast(cli: TractCli, tmp_path: Path) -> None:
    graph = 'graph net(x) -> (y) { x = tract_core_external(shape=[S, 3], datum_type="f16"); y = x + 1.0; }'
    archive, x = write_archive(tmp_path / "add", graph), np.ones((2, 3), np.float32)
    write_bundle(tmp_path / "b.npz", [{"x": x}, {"x": x + 1}], {"y": x + 2})
    assert cli.check_bundle(archive, tmp_path / "b.npz", CommandOptions(llm=False, allow_float_casts=True)).passed


# --- models without caches, and failures -------------------------------------------------------


def test_plain_model(cli: TractCli, add: Path, tmp_path: Path) -> None:
    x = np.arange(6, dtype=">f4").reshape(3, 2).T
    write_bundle(tmp_path / "good.npz", [{"x": x}], {"y": x + 1})
    check = cli.check_bundle(add, tmp_path / "good.npz", CommandOptions(llm=False, approximation="exact"))
    assert check.passed and "--llm" not in check.command and "--allow-missing" not in check.command
    write_bundle(tmp_path / "unnamed.npz", [{"x": x}], {"z": x + 1})
    assert not cli.check_bundle(add, tmp_path / "unnamed.npz", CommandOptions(llm=False)).passed
    vacuous = cli.check_bundle(add, tmp_path / "unnamed.npz", CommandOptions(llm=False, allow_missing_outputs=True))
    assert not vacuous.passed and "nothing was compared" in vacuous.output
    np.testing.assert_array_equal(cli.run_bundle(add, tmp_path / "good.npz", CommandOptions(llm=False))["y"], x + 1)


def test_steps_returns_every_node(cli: TractCli, decoder: Path, tmp_path: Path) -> None:
    write_bundle(tmp_path / "in.npz", [turn([1, 5], EMPTY, EMPTY)], {})
    steps = cli.run_bundle(decoder, tmp_path / "in.npz", steps=True)
    np.testing.assert_array_equal(steps["x_0" if "x_0" in steps else "x"][0], embedding()[[1, 5]])
    assert {"input_ids", "q", "outputs"} <= set(steps)


def test_failures_of_the_engine_are_exceptions(cli: TractCli, add: Path, decoder: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "b.npz"
    write_bundle(bundle, [turn([VOCABULARY], EMPTY, EMPTY)], {"outputs": np.zeros((1, 1, 16), np.float32)})
    with pytest.raises(EngineCrashError, match=r"^decoder: tract died \(panic\): tract-core-\S*gather\.rs"):
        cli.check_bundle(decoder, bundle)
    with pytest.raises(EngineRunError, match=r"^add: tract refused the run: Unmatched tensor x"):
        cli.run_bundle(add, bundle, CommandOptions(llm=False))
    bad = write_archive(tmp_path / "bad", "graph net(x) -> (y) { x = external(shape=[2]); y = tract_core_no_such(x); }")
    with pytest.raises(EngineLoadError, match=r"^bad: tract refused the load: No definition for operator"):
        cli.check_bundle(bad, bundle)
    with pytest.raises(EngineLoadError, match="Could not find transform named no_such"):
        cli.operators(add, ["no_such"])
    with pytest.raises(EngineTimeoutError, match="did not finish within"):
        TractCli(CLI, timeout_seconds=0.001).check_bundle(decoder, bundle)


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="choose one of"):
        CommandOptions(approximation="near")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="from 0 to 1"):
        CommandOptions(rank_biased_overlap=90)


def test_write_bundle_refuses_what_tract_cannot_read(tmp_path: Path) -> None:
    x = np.zeros(2, np.float32)
    with pytest.raises(OptionError, match="both inputs and outputs"):
        write_bundle(tmp_path / "b.npz", [{"x": x}], {"x": x})
    with pytest.raises(OptionError, match="no turn"):
        write_bundle(tmp_path / "b.npz", [], {"x": x})
    with pytest.raises(OptionError, match="complex64"):
        write_bundle(tmp_path / "b.npz", [{"x": x.astype(np.complex64)}], {})
    assert list(tmp_path.iterdir()) == []


# --- graph ------------------------------------------------------------------------------------


def test_operators_and_dump_command(cli: TractCli, decoder: Path) -> None:
    operators = cli.operators(decoder, llm=True)
    assert operators["InPlaceKvSdpa"] == 1 and operators["Source"] == 1
    assert cli.operators(decoder)["FlashSDPA"] == 1
    command = cli.dump_command(decoder, llm=True)
    text = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True).stdout
    assert "InPlaceKvSdpa" in text


def test_operators_agree_with_the_wheel(cli: TractCli, decoder: Path) -> None:
    tract = pytest.importorskip("tract", reason="the tract wheel is not installed")
    if tract.version() != cli.version:
        pytest.skip(f"wheel {tract.version()} and command {cli.version} differ")
    nodes = json.loads(tract.nnef().with_tract_transformers().load(decoder).into_runnable().profile_json(None))["nodes"]
    assert cli.operators(decoder) == Counter(node["op_name"] for node in nodes)


# --- finding ----------------------------------------------------------------------------------


def test_find_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CLI is not None
    explicit, named, on_path, unrelated = (tmp_path / name for name in ("explicit", "named", "on_path", "unrelated"))
    for folder in (explicit, named, on_path, unrelated):
        folder.mkdir()
    for folder in (explicit, named, on_path):
        (folder / "tract").symlink_to(CLI)
    shutil.copy(shutil.which("true") or "/bin/true", unrelated / "tract")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached = installed_path(TRACT_CLI_VERSION)
    cached.parent.mkdir(parents=True)
    cached.symlink_to(CLI)

    monkeypatch.setenv("PATH", f"{unrelated}:{on_path}")
    monkeypatch.setenv("TRACT_BINARY", str(named / "tract"))
    assert TractCli(explicit / "tract").binary == explicit / "tract"
    assert TractCli().binary == named / "tract"
    monkeypatch.delenv("TRACT_BINARY")
    assert TractCli().binary == on_path / "tract"
    monkeypatch.setenv("PATH", str(unrelated))
    assert TractCli().binary == cached and TractCli().version == TRACT_CLI_VERSION
    cached.unlink()
    with pytest.raises(EngineMissingError, match=r"tract\.releases command"):
        TractCli()
    with pytest.raises(EngineMissingError, match="is not an executable tract"):
        TractCli(unrelated / "tract")
    monkeypatch.setenv("TRACT_BINARY", str(tmp_path / "nowhere"))
    with pytest.raises(EngineMissingError, match=r"\$TRACT_BINARY"):
        TractCli()


def test_threads(decoder: Path) -> None:
    assert "--threads" not in TractCli(CLI).dump_command(decoder)
    several = TractCli(CLI, threads=2)
    assert "--threads 2 -O dump" in several.dump_command(decoder)
    try:
        found = several.operators(decoder)
    except EngineError as error:  # the project's own releases have none
        assert "was built without threads, but --threads is 2" in str(error) and "multithread-mm" in str(error.hint)
    else:
        assert found == TractCli(CLI).operators(decoder)
    with pytest.raises(OptionError, match="threads is 0"):
        TractCli(CLI, threads=0)
