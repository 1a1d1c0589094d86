"""The archive `frontend`: which one a source has, its graph, and what `export.json` says of it.

In: a source with its preprocessor config. Out: a captured `ModelGraph` whose tensors are constants of its own. It computes in f32
whatever the model computes in; only its outputs have the model's element type.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from t2n_llm.graph.capture import capture_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.empty_model import take_buffers
from t2n_llm.source.hub import ModelSource
from t2n_llm.tasks.frontends.channel import channel, channel_of_hops
from t2n_llm.tasks.frontends.clap import clap_decibels
from t2n_llm.tasks.frontends.gemma import gemma_3n_log_mel, gemma_4_log_mel
from t2n_llm.tasks.frontends.kaldi import joined_bank, spectrogram_transformer_bank, utterance_bank
from t2n_llm.tasks.frontends.kind import FrontEnd
from t2n_llm.tasks.frontends.nemo import streaming_log_mel, utterance_log_mel
from t2n_llm.tasks.frontends.numbered_patches import numbered_patches
from t2n_llm.tasks.frontends.patches import flattens_patches, patch_rows
from t2n_llm.tasks.frontends.pixels import plain_pixels
from t2n_llm.tasks.frontends.unit_variance import unit_variance_channel, unit_variance_waveform
from t2n_llm.tasks.frontends.whisper import whisper_log_mel

FRONTEND = "frontend"
"""Its role, and the entry of `export.json` that describes it."""

_Maker = Callable[[Any, Any, GraphOptions], FrontEnd | None]
"""Makes a front end of a processor, the model's config and the choices of an export; None where it has no graph."""

_KINDS: Mapping[str, _Maker] = {
    "WhisperFeatureExtractor": whisper_log_mel,
    "Wav2Vec2FeatureExtractor": unit_variance_waveform,
    "SpeechT5FeatureExtractor": unit_variance_waveform,
    "OmniASRFeatureExtractor": unit_variance_channel,
    "ASTFeatureExtractor": spectrogram_transformer_bank,
    "Speech2TextFeatureExtractor": utterance_bank,
    "SeamlessM4TFeatureExtractor": joined_bank,
    "ParakeetFeatureExtractor": utterance_log_mel,
    "NemotronAsrStreamingFeatureExtractor": streaming_log_mel,
    "Gemma3nAudioFeatureExtractor": gemma_3n_log_mel,
    "Gemma4AudioFeatureExtractor": gemma_4_log_mel,
    "ClapFeatureExtractor": clap_decibels,
    "EncodecFeatureExtractor": channel,
    "DacFeatureExtractor": channel_of_hops,
    "Pix2StructImageProcessor": numbered_patches,
    "Pix2StructImageProcessorPil": numbered_patches,
}
"""By the class of transformers' feature extractor or image processor."""


class FrontEndModule(nn.Module):
    """A front end whose floating-point results have the element type that the model takes."""

    def __init__(self, front_end: FrontEnd, dtype: torch.dtype) -> None:
        """Wrap a front end."""
        super().__init__()
        self.front_end = front_end
        self.network = front_end.module()
        self.dtype = dtype

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the front end gives, cast."""
        results = self.network(*given)
        results = (results,) if isinstance(results, torch.Tensor) else results
        return tuple(each.to(self.dtype) if each.dtype.is_floating_point else each for each in results)


def frontend_of(source: ModelSource, options: GraphOptions, input_name: str) -> FrontEnd | None:
    """Return what makes an input of a model, as the source's own feature extractor or image processor does.

    Args:
        source: the model.
        options: whether there is one, and the size of images.
        input_name: of the model's inputs: `input_features`, `input_values`, `pixel_values`.

    Returns:
        None where it is not wanted, where the source says nothing of it, or something that has no graph here.
    """
    for processor in own_processors(source) if options.frontend else ():
        maker = _KINDS.get(type(processor).__name__) or _of_pictures(processor)
        front = maker(processor, source.config, options) if maker is not None else None
        if front is not None and input_name in front.output_names:
            return front
    return None


def _of_pictures(processor: Any) -> _Maker | None:
    """Return what tries an image processor, whatever its class: its settings say what it might do, its answers whether it does."""
    if "pixel_values" not in getattr(processor, "model_input_names", ()):
        return None
    return patch_rows if flattens_patches(processor) else plain_pixels


def frontend_graphs(source: ModelSource, options: GraphOptions, input_name: str) -> tuple[ModelGraph, ...]:
    """Capture the front end of a source: one graph, or none.

    Args:
        source: the model.
        options: whether there is one, and the element type of its outputs.
        input_name: see `frontend_of`.

    Raises:
        CaptureError: it cannot be captured; the message says where.
    """
    front = frontend_of(source, options, input_name)
    if front is None:
        return ()
    module = FrontEndModule(front, options.torch_dtype).eval()
    graph = ModelGraph(
        role=FRONTEND,
        network=module.network,
        module=module,
        buffers=take_buffers(module.network),
        tied={},
        inputs=front.inputs(),
        output_names=front.output_names,
        dynamic_axes=front.dynamic_axes,
        source_name=source.public_name,
        revision=source.revision,
        graph_name=FRONTEND,
        properties={"role": FRONTEND},
        from_checkpoint=False,
    )
    return (capture_model(graph, options).with_parameters(),)


def front_of(graphs: Sequence[ModelGraph]) -> FrontEnd | None:
    """Return what the front end among some graphs was made of; None where there is none."""
    return next((graph.module.front_end for graph in graphs if isinstance(graph.module, FrontEndModule)), None)


def described_with(front: FrontEnd | None, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `export.json` says of a task's archives, with its front end.

    Args:
        front: None leaves everything as it is.
        described: by the task; wherever a section of it says an `order` of archives, the front end comes first.
    """
    if front is None:
        return dict(described)
    ordered = {
        name: {**section, "order": [FRONTEND, *section["order"]]}
        for name, section in described.items()
        if isinstance(section, Mapping) and "order" in section
    }
    record = {"role": FRONTEND, "kind": front.kind, "outputs": list(front.output_names), **front.described()}
    return {**described, **ordered, FRONTEND: record}


# --- processors of a source --------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_CONFIGS = ("preprocessor_config.json", "processor_config.json")
_AUTO_CLASSES = ("AutoFeatureExtractor", "AutoImageProcessor")


def own_processors(source: ModelSource) -> Iterator[Any]:
    """Yield the feature extractor, then the image processor of a source, those that there are."""
    import transformers

    if source.gguf is not None or not any((source.folder / name).is_file() for name in _CONFIGS):
        return
    for auto_class in _AUTO_CLASSES:
        try:
            yield getattr(transformers, auto_class).from_pretrained(
                source.folder, local_files_only=True, trust_remote_code=source.trust_remote_code
            )
        except (OSError, ValueError, ImportError, AttributeError, TypeError, KeyError) as error:
            # The config is of the other kind, or its class needs a package that is not installed.
            logger.debug("%s: %s: %s", source.name, auto_class, error)


__all__ = ["FRONTEND", "described_with", "front_of", "frontend_graphs", "frontend_of", "own_processors"]
