"""Images or sound, and text: three archives that `export.json` connects; the batch is 1, the last position's logits are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from generic_export.errors import OptionError
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.check.cache_range import largest_of_all
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.interface import interface, text_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.prefill import prefill_chunks, recorded_chunks
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.adapter import CONFIG_NAME as ADAPTER_CONFIG
from t2n_llm.source.empty_model import MULTIMODAL_MODEL, instantiate
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.frontends.frontend import frontend_graphs
from t2n_llm.tasks.multimodal.check import check_multimodal, plan_prompts, run_multimodal_reference
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.multimodal.family import FRAME_MASK, PER_LAYER, POSITIONS, TOKEN_TYPES, Family
from t2n_llm.tasks.multimodal.model import DECODER, EMBED, build_multimodal, typical_inputs
from t2n_llm.tasks.names import AUDIO_TEXT_TO_TEXT, IMAGE_TEXT_TO_TEXT
from t2n_llm.tasks.protocol import CheckSubject, ReferenceAnswers, Task

_POSITIONS = (
    "int64 [3, 1, S], time, row, column: text positions count on in all three; an image that starts at p has "
    "p, p + row, p + column, and the text after it continues at p + the larger of its rows and columns"
)
_DEEPSTACK = (
    "row i of all images' deepstack_embeds_n is placed at the i-th image_token_id of the decoder's "
    "deepstack_embeds_n [1, S, D], which is zero elsewhere and in calls without images"
)
_CROSS_ATTENTION = (
    "every call of the decoder takes cross_key_n and cross_value_n of all images of the text. cross_attention_mask [1, S, rows] is "
    "image_rows where a token sees an image: from its image_token_id up to the next image's, images side by side up to the end "
    "of the last one; a new token sees what the token before it does. A text without images takes one row of zeros, unseen"
)
_TOKEN_TYPES = {
    False: "1 at rows of images, 0 elsewhere; an image must be in one call",
    True: "0 in the prompt, which must be in one call, 1 after it",
}
"""By whether prompts are bidirectional."""

_FRAME_MASK = (
    "int64 [N, frames]: 1 before the end of a recording, 0 after it; of n frames, the first (n + 1) / 4 rows "
    "are used, rounded down"
)


class MultimodalTask(Task):
    """`input_ids -> embeddings`, `pixels | features -> embeddings`, and a decoder that takes embeddings."""

    def refuse(
        self, source: ModelSource, options: GraphOptions, compression: CompressionOptions, adapter: str | None
    ) -> None:
        """See `Task.refuse`."""
        super().refuse(source, options, compression, adapter)
        if compression.calibrates():
            raise OptionError(
                f"--task {self.name} does not support calibration, which would need images or sound with each text.",
                "Use --compress q4_0, or a recipe whose algorithms are search or min_max.",
            )
        if options.batch or options.num_logits_to_keep != 1:
            raise OptionError(
                f"--task {self.name} supports a batch of 1 and the last position's logits only.",
                "Omit --batch and --num-logits-to-keep.",
            )
        if source.is_quantized:
            raise OptionError(
                f"{source.name}: multimodal models need an unquantized checkpoint.",
                "Use the original bf16, f16 or f32 checkpoint.",
            )
        if (source.folder / ADAPTER_CONFIG).is_file():
            raise OptionError(
                f"{source.name}: the checkpoint has an adapter ({ADAPTER_CONFIG}), which --task {self.name} does not merge.",
                "Merge it with peft.PeftModel.merge_and_unload(), save the model, and export that folder.",
            )
        self._family(source, options)  # refuses what it does not know

    def graphs(self, source: ModelSource, options: GraphOptions) -> tuple[ModelGraph, ...]:
        """See `Task.graphs`."""
        family = self._family(source, options)
        parts = build_multimodal(
            source.config,
            family,
            options,
            name=source.public_name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
        )
        is_resized = bool(family.free_axes) and not family.medium.hears
        # A front end makes images of one size, and one picture of each.
        front = () if is_resized or family.pictures else frontend_graphs(source, options, family.medium.input_name)
        return (*front, *parts)

    def typical_inputs(
        self, graph: ModelGraph, tokens: Sequence[int], given: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Task.typical_inputs`."""
        return typical_inputs(graph, tokens, given)

    def network(self, source: ModelSource) -> nn.Module:
        """See `Task.network`."""
        network: nn.Module = instantiate(
            MULTIMODAL_MODEL, source.config, torch.float32, "eager", "eager", source.trust_remote_code
        )
        return network

    def reference(self, subject: CheckSubject) -> ReferenceAnswers:
        """Answer prompts with and without images; see `multimodal.check`."""
        family = self._family(subject.source, subject.options)
        subject.reporter.stage("Running PyTorch in f32 for reference")
        model = subject.reference_model(MULTIMODAL_MODEL)
        answers = run_multimodal_reference(model, family, plan_prompts(family))
        return ReferenceAnswers(answers, largest_of_all(answer.largest_states for answer in answers))

    def check(
        self, subject: CheckSubject, reference: ReferenceAnswers, original: ReferenceAnswers | None = None
    ) -> ValidationReport:
        """Compare the answers to those prompts; see `multimodal.check`."""
        del original
        family = self._family(subject.source, subject.options)
        return check_multimodal(
            subject.archives,
            family,
            subject.states,
            subject.options.dtype,
            plan_prompts(family),
            reference.answers,
            engine=subject.checking,
            tolerance=subject.tolerance,
            on_check=subject.announce,
        )

    def interface(self, source: ModelSource, graphs: Sequence[ModelGraph], options: GraphOptions) -> dict[str, Any]:
        """See `Task.interface`."""
        decoder = graphs[-1]
        variables = {variable.label: variable for part in graphs for variable in part.document.variables}
        return {
            "graph": interface(decoder.document, decoder.states, options.dtype)
            | {"prefill": recorded_chunks(prefill_chunks(source.config, decoder.document, options))},
            "multimodal": connection(self._family(source, options)),
            "model": text_model(source.config, variables.values()),
        }

    def _family(self, source: ModelSource, options: GraphOptions) -> Family:
        return family_of(source.config, options.image_size, self.name, source.trust_remote_code, folder=source.folder)


class ImageTextToText(MultimodalTask):
    """Vision-language models."""

    name = IMAGE_TEXT_TO_TEXT


class AudioTextToText(MultimodalTask):
    """Speech models."""

    name = AUDIO_TEXT_TO_TEXT


def archive_shape(family: Family) -> list[int | str]:
    """Return the shape of what the encoder's archive takes; sizes that may be any are named."""
    names = {axis: size.name for axis, size in family.free_axes.items()}
    sizes = [names.get(axis, size) for axis, size in enumerate(family.pixel_shape)]
    return [*(["N"] if family.stacks_images else []), *sizes]


def connection(family: Family) -> dict[str, Any]:
    """Return what `export.json` says of how the archives connect.

    Args:
        family: of the model.
    """
    medium, further = family.medium, family.decoder_input
    return {
        "order": [EMBED, medium.role, DECODER],
        medium.token_field: family.image_token_id,
        f"rows_per_{medium.noun}": family.row_count,
        medium.input_name: {
            "shape": archive_shape(family),
            f"{medium.noun}s": family.input_description,
        },
        "scatter": None
        if family.cross_layers
        else f"row i of all {medium.output_name} replaces inputs_embeds at the i-th {medium.token_field}",
        "cross_attention": _CROSS_ATTENTION if family.cross_layers else None,
        "deepstack": _DEEPSTACK if family.deepstack_layers else None,
        FRAME_MASK: _FRAME_MASK if family.masked else None,
        "token_type_ids": _TOKEN_TYPES[family.bidirectional_prompts] if further == TOKEN_TYPES else None,
        "input_ids": "those of embed, for the decoder too" if family.takes_ids else None,
        "per_layer_inputs": "second output of embed" if further == PER_LAYER else None,
        "positions": _POSITIONS if further == POSITIONS else "counted by the decoder from its cache",
    }
