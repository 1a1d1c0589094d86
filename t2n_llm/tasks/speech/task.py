"""Speech models: archives that a short loop connects; noise is an input, so that the same noise gives the same waveform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from generic_export.errors import OptionError
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.check.cache_range import largest_of_all
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.interface import interface
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.runtime.sampling.settings import generation_settings, processor_settings
from t2n_llm.source.empty_model import instantiate
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.names import TEXT_TO_AUDIO
from t2n_llm.tasks.protocol import CheckSubject, ReferenceAnswers, Task
from t2n_llm.tasks.speech.check import check_speech, plan_texts, run_speech_reference
from t2n_llm.tasks.speech.families import family_of
from t2n_llm.tasks.speech.family import SpeechFamily
from t2n_llm.tasks.speech.model import build_speech


class TextToAudio(Task):
    """`input_ids -> rows, durations` and `frames -> waveform`, or archives of steps and of a spectrogram between them."""

    name = TEXT_TO_AUDIO

    def refuse(
        self, source: ModelSource, options: GraphOptions, compression: CompressionOptions, adapter: str | None
    ) -> None:
        """See `Task.refuse`."""
        super().refuse(source, options, compression, adapter)
        if source.gguf is not None or source.is_quantized:
            raise OptionError(
                f"{source.name}: speech models need an unquantized checkpoint.",
                "Use the original bf16, f16 or f32 checkpoint, a folder or a hub id.",
            )
        if compression.calibrates():
            raise OptionError(
                f"--task {self.name} does not support calibration.",
                "Use an algorithm without calibration, such as --compress q4_0.",
            )
        if options.batch:
            raise OptionError(f"--task {self.name} speaks one text at a time.", "Omit --batch.")
        if options.computes_in == "f16":
            raise OptionError(
                f"--task {self.name} computes in f32.", "Omit --activations f16; --dtype f16 stores the weights in f16."
            )
        _ = _family(source).plan  # refuses what it does not support

    def graphs(self, source: ModelSource, options: GraphOptions) -> tuple[ModelGraph, ...]:
        """See `Task.graphs`."""
        return build_speech(
            _family(source),
            options,
            name=source.public_name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
        )

    def network(self, source: ModelSource) -> nn.Module:
        """See `Task.network`."""
        kind = _family(source).kind
        network: nn.Module = instantiate(kind, source.config, torch.float32, "eager", "eager", source.trust_remote_code)
        return network

    def reference(self, subject: CheckSubject) -> ReferenceAnswers:
        """Speak texts of two lengths; see `speech.check`."""
        family = _family(subject.source)
        texts = plan_texts(family, subject.tokenizer)
        subject.reporter.stage("Running PyTorch in f32 for reference")
        answers = run_speech_reference(family, subject.reference_model(family.kind), texts)
        return ReferenceAnswers(answers, largest_of_all(each.largest_states for each in answers))

    def check(
        self, subject: CheckSubject, reference: ReferenceAnswers, original: ReferenceAnswers | None = None
    ) -> ValidationReport:
        """Compare the waveforms of those texts; see `speech.check`."""
        del original
        family = _family(subject.source)
        return check_speech(
            subject.archives,
            family.plan,
            subject.options.dtype,
            plan_texts(family, subject.tokenizer),
            reference.answers,
            engine=subject.checking,
            tolerance=subject.tolerance,
            on_text=subject.announce,
        )

    def interface(self, source: ModelSource, graphs: Sequence[ModelGraph], options: GraphOptions) -> dict[str, Any]:
        """See `Task.interface`."""
        variables = {variable.label: variable for part in graphs for variable in part.document.variables}
        family = _family(source)
        return {
            "graph": interface(graphs[-1].document, (), options.dtype),
            "speech": family.plan.recorded() | {"order": [graph.role for graph in graphs]},
            "vocoder": source.vocoder.recorded() if source.vocoder is not None else None,
            "model": {
                "vocab_size": family.vocabulary,
                "parameters": sum(variable.values for variable in variables.values()),
            },
        }


def _family(source: ModelSource) -> SpeechFamily:
    return family_of(
        source.config, source.vocoder, processor_settings(source.folder) | generation_settings(source.folder)
    )
