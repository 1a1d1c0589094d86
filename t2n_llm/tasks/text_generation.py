"""`export_llm`: a Hugging Face causal LM in, a folder with a checked tract archive out.

source -> graph (no weights) -> weights streamed into the archive -> validated in the engine -> renamed into place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from generic_export.errors import NotEnoughMemoryError, OptionError
from generic_export.weights.checkpoint import Checkpoint
from t2n_llm.check.bundles import bundles_size, make_bundles
from t2n_llm.check.causal_lm import Tolerance, ValidationReport, validate_archive
from t2n_llm.check.reference import DEFAULT_DECODE_STEPS, plan_check, run_reference, run_reference_apart
from t2n_llm.check.runner import open_runner
from t2n_llm.compress.options import DEFAULT_CALIBRATION
from t2n_llm.compress.stored_form import StoredForm, stored_form
from t2n_llm.explain.next_step import suggested_diagnosis
from t2n_llm.export.folder import TESTS_FOLDER
from t2n_llm.export.manifest import Manifest, interface, origin, text_model
from t2n_llm.export.options import ExportOptions, Reporter, parse_options
from t2n_llm.export.pipeline import ExportResult, Stages, open_stages
from t2n_llm.export.plan import ExportPlan
from t2n_llm.graph.document import build_graph
from t2n_llm.graph.skeleton import Skeleton
from t2n_llm.source.adapter import Adapter, open_adapter
from t2n_llm.weights.f32_model import require_resident
from t2n_llm.weights.names import graph_sources
from t2n_llm.weights.placement import Residency, plan_residency


def export_llm(
    source: str,
    output_dir: str | Path | None = None,
    *,
    dtype: str = "f16",
    compress: str | None = None,
    recipe: str | Path | None = None,
    target_size: str | int | None = None,
    quantizers: str | None = None,
    calibration: str = DEFAULT_CALIBRATION,
    imatrix: str | Path | None = None,
    save_imatrix: str | Path | None = None,
    check: bool = True,
    archive: str = "tar",
    force: bool = False,
    resume: bool = False,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    num_logits_to_keep: int = 1,
    batch: bool = False,
    f32_linear_accumulation: bool = False,
    f32_attention: bool = False,
    f32_norm: bool = False,
    stateful: bool = False,
    kv_cache: str | None = None,
    window_cache: bool = False,
    keep_f32: Sequence[str] = (),
    low_memory: bool = False,
    decode_steps: int = DEFAULT_DECODE_STEPS,
    require_tokenizer: bool = True,
    engine: str = "wheel",
    tract_binary: str | Path | None = None,
    adapter: str | None = None,
    device_map: str = "auto",
    max_memory: str | None = None,
    reporter: Reporter | None = None,
) -> ExportResult[ValidationReport]:
    """Export a Hugging Face causal language model for tract, and prove it token by token.

    Args:
        source: hub id (`meta-llama/Llama-3.1-8B`), local folder with config and safetensors, or a `.gguf` file.
        output_dir: folder to make; None takes the model's name, in the current folder.
        dtype: `f16` or `f32`: weights, activations and caches.
        compress: a recipe by name, `NAME` or `NAME:ALGORITHM`, such as `q4_0` or `q4_0+embeddings:gptq`; see
            docs/quantization.md.
        recipe: a recipe file (YAML), instead of a name.
        target_size: bytes that the weights may take (`900MB`), for recipes that fill a size.
        quantizers: `module:attribute` of a dict of further algorithms.
        calibration: text for the calibrated algorithms; see `CompressionOptions`.
        imatrix: file of input statistics, instead of calibrating, for the algorithm `imatrix`.
        save_imatrix: `*.imatrix.safetensors` to keep the statistics of this calibration in.
        check: validate in the pip-installed engine, and write test bundles.
        archive: `tar`, `tgz` or `dir`.
        force: replace an earlier export of that name.
        resume: continue an export to `output_dir` that was killed or interrupted; tensors that are there already are
            verified and kept. What was left behind by an export with other weights or options is not used.
        revision, token, trust_remote_code: see `open_source`.
        num_logits_to_keep: positions whose logits are given, from the end; 0 for all (speculative decoding).
        batch: make the batch a symbol `B`.
        f32_linear_accumulation, f32_attention, f32_norm: f32 islands in an f16 graph, see `TractNNEF`.
        stateful: keys and values are the engine's own state: `input_ids` is the only input, in every run time.
        kv_cache: `int8` or `int4` has the engine keep them quantised (as `stateful`); the checks report what that costs.
        window_cache: sliding layers keep their window only; these states are fed back, never the engine's own.
        keep_f32: shell patterns of parameters that stay in f32, for values that f16 cannot hold.
        low_memory: run the PyTorch reference in a process that ends before the engine starts.
        decode_steps: tokens decoded by the check.
        require_tokenizer: refuse a source without tokenizer.
        engine: what checks: `wheel` (pip-installed tract) or `cli` (the `tract` command).
        tract_binary: the command to check with; implies `cli`.
        adapter: hub id or folder of a LoRA or DoRA to merge into the weights.
        device_map, max_memory: where the weights of the PyTorch reference may stay, see `Placement.parse`.
        reporter: told what happens; None logs.

    Returns:
        The archive, the manifest and the validation report.

    Raises:
        T2NError: see `generic_export.errors`; nothing is left behind, except that an archive which fails its
            validation is kept beside the target as `<output_dir>.failed`, with its report.
    """
    options = parse_options(
        dtype=dtype,
        compress=compress,
        recipe=recipe,
        target_size=target_size,
        quantizers=quantizers,
        calibration=calibration,
        imatrix=imatrix,
        save_imatrix=save_imatrix,
        archive=archive,
        check=check,
        force=force,
        resume=resume,
        num_logits_to_keep=num_logits_to_keep,
        batch=batch,
        f32_linear_accumulation=f32_linear_accumulation,
        f32_attention=f32_attention,
        f32_norm=f32_norm,
        stateful=stateful,
        kv_cache=kv_cache,
        window_cache=window_cache,
        keep_f32=keep_f32,
        low_memory=low_memory,
        decode_steps=decode_steps,
        require_tokenizer=require_tokenizer,
        engine=engine,
        tract_binary=tract_binary,
        device_map=device_map,
        max_memory=max_memory,
    )
    with suggested_diagnosis(source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code):
        stages = open_stages(
            source, output_dir, options, reporter, revision=revision, token=token, trust_remote_code=trust_remote_code
        )
        return _Export(stages, _opened(adapter, token)).run()


def plan_llm_export(
    source: str,
    output_dir: str | Path | None = None,
    *,
    options: ExportOptions | None = None,
    adapter: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> ExportPlan:
    """Say what `export_llm` would write; the graph is captured, no weight is read and no file is made.

    Args:
        source, output_dir, adapter, revision, token, trust_remote_code, reporter: as for `export_llm`.
        options: the other choices of `export_llm`; None takes the defaults.

    Raises:
        T2NError: what `export_llm` would refuse as well, as far as it does not depend on the weights' values.
    """
    options = options or ExportOptions()
    with suggested_diagnosis(source, dtype=options.dtype, revision=revision, trust_remote_code=trust_remote_code):
        stages = open_stages(
            source,
            output_dir,
            options,
            reporter,
            revision=revision,
            token=token,
            trust_remote_code=trust_remote_code,
            dry=True,
        )
        return _Export(stages, _opened(adapter, token)).plan()


def _opened(adapter: str | None, token: str | None) -> Adapter | None:
    return open_adapter(adapter, token=token) if adapter is not None else None


@dataclass(frozen=True)
class _Prepared:
    """Everything that is known of an export before a weight is read."""

    checkpoint: Checkpoint
    skeleton: Skeleton
    stored: StoredForm
    unused: tuple[str, ...]
    residency: Residency


class _Export:
    """One export, stage by stage; each stage reads what the one before made."""

    def __init__(self, stages: Stages, adapter: Adapter | None = None) -> None:
        self.stages = stages
        self.source = stages.source
        self.adapter = adapter
        self.options = stages.options
        self.reporter = stages.reporter

    @contextmanager
    def prepared(self, *, dry: bool = False) -> Iterator[_Prepared]:
        """Capture the graph and find its weights; unless a recipe calibrates, no weight is read.

        Args:
            dry: calibrate nothing; sizes are the same.
        """
        checkpoint = self.source.checkpoint()
        if not dry:
            self.options.compression.prepare(self.reporter)
        self.reporter.stage("Capturing the graph")
        skeleton, graph = build_graph(
            self.source.config,
            self.options.graph_options(self.source.trust_remote_code),
            name=self.source.public_name,
            revision=self.source.revision,
        )
        updates = self.adapter.updates(skeleton.network) if self.adapter is not None else None
        sources = graph_sources(graph, skeleton, checkpoint, self.stages.casts, updates)
        residency = plan_residency(skeleton.network, self.options.placement) if self.options.check else Residency()
        self._check_combination(residency)
        with stored_form(
            self.options.compression, self.source, checkpoint, skeleton, graph, sources, self.reporter, dry=dry
        ) as stored:
            yield _Prepared(checkpoint, skeleton, stored, sources.unused, residency)

    def _check_combination(self, residency: Residency) -> None:
        """Refuse what compression cannot be combined with."""
        if self.options.check:
            require_resident(self.source, residency.offloaded)
        if self.options.compression.recipe() is None:
            return
        if self.options.check and residency.offloaded:
            raise NotEnoughMemoryError(
                "the check of a compressed export needs the PyTorch model in memory in f32, and it does not fit.",
                "Pass --no-check, and run t2n-llm validate on a larger machine.",
            )
        if self.adapter is not None and self.options.compression.calibrates():
            raise OptionError(
                "calibrated algorithms run the base model, without its adapter.",
                "Use an algorithm without calibration (--compress q4_0), or merge the adapter with peft first.",
            )

    def plan(self) -> ExportPlan:
        """Say what `run` would do."""
        with self.prepared(dry=True) as ready:
            parameters = sum(prod(variable.shape) for variable in ready.stored.graph.variables)
            reference, engine = 4 * parameters - ready.residency.disk_bytes, ready.stored.plan.total_bytes
            checking = max(reference, engine) if self.options.low_memory else reference + engine
            return self.stages.plan(ready.stored.plan, checking)

    def run(self) -> ExportResult[ValidationReport]:
        """Export."""
        adapter = self.adapter.recorded() if self.adapter is not None else None
        with self.prepared() as ready:
            return self.stages.make(
                ready.stored,
                ready.unused,
                self.stages.identity(ready.checkpoint, adapter=adapter),
                bundle_bytes=lambda: self._bundle_bytes(ready),
                validate=lambda staging, archive: self._validate(staging, archive, ready),
                describe=lambda: self._described(ready) | {"adapter": adapter},
            )

    def _bundle_bytes(self, ready: _Prepared) -> int:
        # At its longest: whether weights stay on disk is not known yet.
        plan = plan_check(ready.skeleton.config, None, self.options.decode_steps, teacher_forced=True)
        return bundles_size(ready.skeleton, len(plan.text_ids), self.options.num_logits_to_keep)

    def _validate(self, staging: Path, archive: Path, ready: _Prepared) -> ValidationReport:
        tokenizer = self.source.tokenizer() if self.options.require_tokenizer else None
        skeleton, offloaded = ready.skeleton, ready.residency.offloaded
        plan = plan_check(skeleton.config, tokenizer, self.options.decode_steps, teacher_forced=offloaded)
        about = f": {ready.residency.summary(self.source.folder, plan.passes)}" if offloaded else ""
        self.reporter.stage(f"Running PyTorch in f32 for reference{about}")
        run = run_reference_apart if self.options.low_memory else run_reference
        reference = run(
            self.source.weights,
            plan,
            trust_remote_code=self.source.trust_remote_code,
            residency=ready.residency,
            adapter=self.adapter,
            overrides=ready.stored.overrides(archive),
        )
        tests = staging / TESTS_FOLDER
        tests.mkdir()
        fed_back = {state.input_name: state.output_name for state in skeleton.states}
        for bundle in make_bundles(reference, skeleton.states, self.options.num_logits_to_keep):
            bundle.write(tests, fed_back)
        options = self.options
        with open_runner(
            archive, skeleton.states, options.dtype, engine=options.engine, tract_binary=options.tract_binary
        ) as runner:
            return validate_archive(
                runner,
                reference,
                options.dtype,
                tolerance=Tolerance.for_export(options.dtype, options.kv_cache),
                on_check=lambda name: self.reporter.stage(f"Checking in tract: {name}"),
            )

    def _described(self, ready: _Prepared) -> Manifest:
        skeleton, graph = ready.skeleton, ready.stored.graph
        return {
            **origin(self.source, self.options, skeleton.network),
            "graph": interface(graph, skeleton.states, self.options.dtype)
            | {"engine_states": [asdict(state) for state in skeleton.engine_states]},
            "model": text_model(skeleton.config, graph.variables),
        }


__all__ = ["ExportResult", "export_llm", "plan_llm_export"]
