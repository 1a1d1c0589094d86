"""Encoder-decoder models: two archives, the first asked once a source, the second once a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from generic_export.errors import OptionError
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.check.cache_range import largest_of_all
from t2n_llm.compress.calibration import Calibration, PassCalibration
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.interface import interface, text_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.empty_model import ModelKind, instantiate
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.frontends.frontend import frontend_graphs
from t2n_llm.tasks.names import IMAGE_TO_TEXT, SPEECH_RECOGNITION, TEXT_TO_TEXT
from t2n_llm.tasks.protocol import CheckSubject, ReferenceAnswers, Task
from t2n_llm.tasks.seq2seq.calibration import TaughtPass, examples, prepared
from t2n_llm.tasks.seq2seq.check import (
    PaddedCase,
    SourceCase,
    check_seq2seq,
    plan_padded,
    plan_sources,
    run_seq2seq_reference,
)
from t2n_llm.tasks.seq2seq.model import DECODER, DECODER_MASK, ENCODER, build_seq2seq, first_token, typical_inputs
from t2n_llm.tasks.seq2seq.sources import BATCH, SourceForm, source_form

_CROSS = (
    "the encoder's outputs cross_* are the decoder's inputs of the same names in every call: compute them once "
    "per source"
)


class Seq2SeqTask(Task):
    """`source -> (cross_key_0, cross_value_0, ...)`, and `(input_ids, *cross, *past) -> (logits, *present)`."""

    kind: ModelKind

    def refuse(
        self, source: ModelSource, options: GraphOptions, compression: CompressionOptions, adapter: str | None
    ) -> None:
        """See `Task.refuse`."""
        super().refuse(source, options, compression, adapter)
        if source.gguf is not None or source.is_quantized:
            raise OptionError(
                f"{source.name}: encoder-decoders need an unquantized checkpoint.",
                "Use the original bf16, f16 or f32 checkpoint, a folder or a hub id.",
            )
        if compression.calibrates():
            examples(self.name, compression.calibration)  # refuses what is no data of this task

    def graphs(self, source: ModelSource, options: GraphOptions) -> tuple[ModelGraph, ...]:
        """See `Task.graphs`."""
        parts = build_seq2seq(
            source.config,
            self.kind,
            options,
            name=source.public_name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
        )
        return (*frontend_graphs(source, options, self._form(parts[-1].network).inputs[0].name), *parts)

    def typical_inputs(
        self, graph: ModelGraph, tokens: Sequence[int], given: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Task.typical_inputs`."""
        return typical_inputs(graph, tokens, given)

    def network(self, source: ModelSource) -> nn.Module:
        """See `Task.network`."""
        network: nn.Module = instantiate(
            self.kind, source.config, torch.float32, "eager", "eager", source.trust_remote_code
        )
        return network

    def calibration(self, source: ModelSource, data: str) -> Calibration:
        """See `Task.calibration`; the whole model is in memory, as its check wants it too."""
        return PassCalibration(partial(self._prepared, source, data))

    def _prepared(self, source: ModelSource, data: str) -> tuple[Any, list[TaughtPass]]:
        network = self.network(source)
        return prepared(self.name, self.kind, source, self._form(network), network, data)

    def reference(self, subject: CheckSubject) -> ReferenceAnswers:
        """Read sources of two lengths, and generate from them; see `seq2seq.check`."""
        cases, padded = self._questions(subject)
        subject.reporter.stage("Running PyTorch in f32 for reference")
        answers = run_seq2seq_reference(subject.reference_model(self.kind), cases, padded)
        return ReferenceAnswers(answers, largest_of_all(run.largest_states for run in answers.runs))

    def check(
        self, subject: CheckSubject, reference: ReferenceAnswers, original: ReferenceAnswers | None = None
    ) -> ValidationReport:
        """Run the four checks for each source; see `seq2seq.check`."""
        del original
        cases, padded = self._questions(subject)
        return check_seq2seq(
            subject.archives,
            subject.states,
            subject.options.dtype,
            cases,
            padded,
            reference.answers,
            engine=subject.checking,
            tolerance=subject.tolerance,
            on_check=subject.announce,
        )

    def _questions(self, subject: CheckSubject) -> tuple[tuple[SourceCase, ...], PaddedCase | None]:
        """Return the sources, and a batch of them where the archives take several."""
        config, form = subject.source.config, self._form(subject.network)
        cases = plan_sources(config, form, subject.tokenizer, subject.checking.decode_steps)
        return cases, plan_padded(cases, form, _padding(config)) if BATCH in subject.symbols else None

    def interface(self, source: ModelSource, graphs: Sequence[ModelGraph], options: GraphOptions) -> dict[str, Any]:
        """See `Task.interface`."""
        decoder = graphs[-1]
        variables = {variable.label: variable for part in graphs for variable in part.document.variables}
        form = self._form(decoder.network)
        return {
            "graph": interface(decoder.document, decoder.states, options.dtype)
            | {"engine_states": [asdict(state) for state in decoder.engine_states]},
            "encoder_decoder": connection(source.config, form, masked=DECODER_MASK in decoder.document.inputs),
            "model": text_model(source.config, variables.values()),
        }

    def _form(self, network: Any) -> SourceForm:
        return source_form(network.config, main_input=network.main_input_name)


class TextToText(Seq2SeqTask):
    """Translation, summarisation, and whatever else makes a text of a text."""

    name = TEXT_TO_TEXT
    kind = ModelKind(
        "AutoModelForSeq2SeqLM", "encoder-decoder language model", "Choose another --task, such as text-generation"
    )


class SpeechRecognition(Seq2SeqTask):
    """Text of sound."""

    name = SPEECH_RECOGNITION
    kind = ModelKind(
        "AutoModelForSpeechSeq2Seq",
        "speech recognition model with an encoder and a decoder",
        "Choose another --task, such as audio-text-to-text",
    )


class ImageToText(Seq2SeqTask):
    """Text of images."""

    name = IMAGE_TO_TEXT
    kind = ModelKind(
        "AutoModelForImageTextToText",
        "image captioning model with an encoder and a decoder",
        "Choose another --task, such as image-text-to-text",
    )


def connection(config: Any, form: SourceForm, *, masked: bool) -> dict[str, Any]:
    """Return what `export.json` says of how the archives connect.

    Args:
        config: transformers config.
        form: how sources enter.
        masked: whether sources of several lengths can be in one batch.
    """
    return {
        "order": [ENCODER, DECODER],
        "encoder_inputs": {
            each.name: {"shape": list(each.shape), "dtype": "f32" if each.vocabulary is None else "i64"}
            for each in form.inputs
        },
        "cross_attention": _CROSS,
        "encoder_mask": f"the encoder's attention_mask [B, T] is the decoder's {DECODER_MASK}" if masked else None,
        "decoder_start_token_id": first_token(config),
    }


def _padding(config: Any) -> int:
    padding = getattr(config, "pad_token_id", None)
    return int(padding) if padding is not None else 0
