"""`export_multimodal`: a Hugging Face vision-language or speech model in, a folder with three checked archives out.

source -> three graphs (no weights) -> weights streamed into the archives -> compared in the engine -> renamed into place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from generic_export.errors import OptionError
from generic_export.nnef.graph import NnefGraph
from generic_export.weights.checkpoint import Checkpoint
from generic_export.write.document import ArchivePlan, WrittenArchive, plan_document
from t2n_llm.check.causal_lm import ValidationReport
from t2n_llm.export.manifest import Manifest, interface, origin, stored_tensors, text_model
from t2n_llm.export.options import ExportOptions, Reporter
from t2n_llm.export.pipeline import ExportResult, Stages, open_stages
from t2n_llm.tasks.multimodal.check import check_multimodal, plan_prompts, run_multimodal_reference
from t2n_llm.tasks.multimodal.families import FRAME_MASK, POSITIONS, TOKEN_TYPES, Family, family_of
from t2n_llm.tasks.multimodal.model import DECODER, EMBED, BuiltPart, Part, build_parts
from t2n_llm.tasks.names import IMAGE_TEXT_TO_TEXT
from t2n_llm.weights.names import GraphSources, graph_sources

_POSITIONS = (
    "int64 [3, 1, S], time, row, column: text counts on from the position before in all three; an image that starts at p has "
    "p, p + row, p + column, and the text after it goes on at p + side (side = sqrt(rows_per_image))"
)
_DEEPSTACK = (
    "row i of all images' deepstack_embeds_n is at the i-th image_token_id of the decoder's deepstack_embeds_n [1, S, D], "
    "which is zero everywhere else and in every call without images"
)
_FRAME_MASK = (
    "int64 [N, frames]: 1 before the end of a recording, 0 after it; the first (n + 1) / 4 rows of n frames are used, "
    "rounded down"
)


MultimodalResult: TypeAlias = ExportResult[ValidationReport]


def export_multimodal(
    source: str,
    output_dir: str | Path | None = None,
    *,
    options: ExportOptions | None = None,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> MultimodalResult:
    """Export a vision-language or speech model as three archives, and compare it with PyTorch: images or sound, text, decoding.

    Args:
        source: hub id or local folder.
        output_dir: folder to make; None takes the model's name, in the current folder.
        options: every choice, with one of `MULTIMODAL_TASKS`; None takes the defaults for images. The batch is 1, and the decoder
            gives the last position's logits.
        revision, token, trust_remote_code: see `open_source`.
        reporter: told what happens; None logs.

    Raises:
        T2NError: see `generic_export.errors`; nothing is left behind, except that archives which fail their comparison are
            kept beside the target as `<output_dir>.failed`, with their report.
    """
    options = options or ExportOptions(task=IMAGE_TEXT_TO_TEXT)
    _check_options(options)
    stages = open_stages(
        source, output_dir, options, reporter, revision=revision, token=token, trust_remote_code=trust_remote_code
    )
    if stages.source.is_quantized:
        raise OptionError(
            f"{stages.source.name}: multimodal models are exported from plain checkpoints only.",
            "Give the original bf16, f16 or f32 checkpoint.",
        )
    return _MultimodalExport(stages).run()


def _check_options(options: ExportOptions) -> None:
    if options.compression.recipe() is not None:
        raise OptionError(
            f"--task {options.task} does not compress weights.",
            "Leave --compress, --recipe and --target-size out.",
        )
    if options.batch or options.num_logits_to_keep != 1:
        raise OptionError(
            f"--task {options.task} exports a batch of 1 and the last position's logits.",
            "Leave --batch and --num-logits-to-keep out.",
        )


@dataclass(frozen=True)
class _Ready:
    """One archive before its weights are read."""

    part: Part
    graph: NnefGraph
    sources: GraphSources
    plan: ArchivePlan


class _MultimodalExport:
    """One export, stage by stage."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.source = stages.source
        self.options = stages.options
        self.family = family_of(stages.source.config, stages.options.image_size, stages.options.task)

    def run(self) -> MultimodalResult:
        """Export."""
        checkpoint = self.source.checkpoint()
        self.stages.reporter.stage("Capturing the graphs")
        built = build_parts(
            self.source.config,
            self.family,
            self.options.graph_options(self.source.trust_remote_code),
            name=self.source.public_name,
            revision=self.source.revision,
        )
        ready = {role: self._ready(part, checkpoint) for role, part in built.items()}
        stages, unused = self.stages, ready[DECODER].sources.unused
        stages.warn_of_unused(unused)
        with stages.staging({role: part.plan for role, part in ready.items()}) as staging:
            archives = {role: self._write(staging, role, part, checkpoint) for role, part in ready.items()}
            stages.report_overflows()
            stages.copy_companions(staging)
            paths = {role: archive.path for role, archive in archives.items()}
            validation = self._validate(paths, ready) if self.options.check else None
            return stages.complete(staging, archives, validation, unused, lambda: self._described(ready, archives))

    def _ready(self, built: BuiltPart, checkpoint: Checkpoint) -> _Ready:
        sources = graph_sources(built.graph, built.part, checkpoint, self.stages.casts)
        return _Ready(built.part, built.graph, sources, plan_document(built.graph, sources))

    def _write(self, staging: Path, role: str, ready: _Ready, checkpoint: Checkpoint) -> WrittenArchive:
        identity = self.stages.identity(checkpoint, role=role)
        return self.stages.write_archive(staging, ready.graph, ready.sources, identity, role=role)

    def _validate(self, archives: Mapping[str, Path], ready: Mapping[str, _Ready]) -> ValidationReport:
        options, reporter, decoder = self.options, self.stages.reporter, ready[DECODER].part
        prompts = plan_prompts(self.source.config, self.family)
        needed = frozenset(variable.parameter for part in ready.values() for variable in part.graph.variables)
        reporter.stage("Running PyTorch in f32 for reference")
        expected = run_multimodal_reference(
            self.source, self.family, decoder.network, needed, prompts, options.placement
        )
        return check_multimodal(
            archives,
            self.family,
            self.source.config,
            decoder.states,
            options.dtype,
            prompts,
            expected,
            engine=options.engine,
            tract_binary=options.tract_binary,
            on_check=lambda name: reporter.stage(f"Checking in tract: {name}"),
        )

    def _described(self, ready: Mapping[str, _Ready], archives: Mapping[str, WrittenArchive]) -> Manifest:
        decoder = archives[DECODER]
        variables = {variable.label: variable for part in ready.values() for variable in part.graph.variables}
        return {
            **origin(self.source, self.options, ready[DECODER].part.network),
            "archive": decoder.path.name,
            "graph": self._interface(ready[DECODER]),
            "parts": {role: self._part(ready[role], archives[role]) for role in ready},
            "multimodal": connection(self.source.config, self.family),
            "model": text_model(self.source.config, variables.values()),
            "compression": None,
            "tensors": stored_tensors(decoder),
        }

    def _interface(self, ready: _Ready) -> dict[str, Any]:
        return interface(ready.graph, ready.part.states, self.options.dtype)

    def _part(self, ready: _Ready, archive: WrittenArchive) -> dict[str, Any]:
        return {
            "archive": archive.path.name,
            "graph": self._interface(ready),
            "tensors": stored_tensors(archive),
        }


def connection(config: Any, family: Family) -> dict[str, Any]:
    """Return what `export.json` says of how the archives connect.

    Args:
        config: transformers config.
        family: of the config.
    """
    stack = ["N"] if family.stacks_images else []
    medium, further = family.medium, family.decoder_input
    return {
        "order": [EMBED, medium.role, DECODER],
        medium.token_field: family.image_token_id(config),
        f"rows_per_{medium.noun}": family.rows_per_image(config),
        medium.input_name: {
            "shape": [*stack, *family.pixel_shape(config)],
            f"{medium.noun}s": "as the model's processor gives them, in order",
        },
        "scatter": f"row i of all {medium.output_name} replaces inputs_embeds at the i-th {medium.token_field}",
        "deepstack": _DEEPSTACK if family.deepstack_layers(config) else None,
        FRAME_MASK: _FRAME_MASK if family.masked else None,
        "token_type_ids": "1 at rows of images, 0 elsewhere; an image is in one call"
        if further == TOKEN_TYPES
        else None,
        "positions": _POSITIONS if further == POSITIONS else "counted by the decoder from its cache",
    }
