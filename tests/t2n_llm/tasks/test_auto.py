"""`--task auto`: the architecture in a config decides, and language models stay what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from generic_export.errors import OptionError
from t2n_llm.export.options import ExportOptions
from t2n_llm.tasks import names
from t2n_llm.tasks.auto import form_of, task_of_config
from t2n_llm.tasks.heads.table import HEADS
from t2n_llm.tasks.models import TASK_MODELS, classes_of
from t2n_llm.tasks.registry import task_of


def config(kind: str, *architectures: str) -> Any:
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]()
    made.architectures = list(architectures) or None
    return made


@pytest.mark.parametrize(
    ("kind", "architecture", "task"),
    [
        ("llama", "LlamaForCausalLM", names.TEXT_GENERATION),
        ("gpt2", "GPT2LMHeadModel", names.TEXT_GENERATION),
        ("gemma3", "Gemma3ForConditionalGeneration", names.TEXT_GENERATION),
        ("llama", "OursForCausalLM", names.TEXT_GENERATION),
        ("llama", "SomebodysModel", names.TEXT_GENERATION),
        ("llama", "LlamaForSequenceClassification", names.TEXT_CLASSIFICATION),
        ("llama", "LlamaModel", names.TEXT_GENERATION),
        ("bert", "BertModel", names.FEATURE_EXTRACTION),
        ("bert", "BertForMaskedLM", names.FILL_MASK),
        ("bert", "BertForTokenClassification", names.TOKEN_CLASSIFICATION),
        ("bert", "BertForQuestionAnswering", names.QUESTION_ANSWERING),
        ("vit", "ViTForImageClassification", names.IMAGE_CLASSIFICATION),
        ("dinov2", "Dinov2Model", names.IMAGE_FEATURE_EXTRACTION),
        ("clip", "CLIPModel", names.ZERO_SHOT_IMAGE_CLASSIFICATION),
        ("wav2vec2", "Wav2Vec2ForCTC", names.CTC),
        ("patchtst", "PatchTSTForPrediction", names.TIME_SERIES),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", names.IMAGE_TEXT_TO_TEXT),
        ("voxtral", "VoxtralForConditionalGeneration", names.AUDIO_TEXT_TO_TEXT),
    ],
)
def test_the_architecture_decides(kind: str, architecture: str, task: str) -> None:
    assert task_of_config(config(kind, architecture)) == task


def test_a_config_without_architecture_is_a_language_model_where_there_is_one() -> None:
    assert task_of_config(config("llama")) == names.TEXT_GENERATION
    assert task_of_config(config("bert")) == names.TEXT_GENERATION
    with pytest.raises(OptionError, match="image-classification or image-feature-extraction"):
        task_of_config(config("vit"))


def test_what_is_ambiguous_names_the_choices() -> None:
    with pytest.raises(OptionError) as caught:
        task_of_config(config("bert", "BertForPreTraining"))
    assert "BertForPreTraining may be exported for" in caught.value.message
    assert "--task fill-mask" in str(caught.value.hint)


def test_a_folder_of_sentence_transformers_makes_sentence_vectors(tmp_path: Path) -> None:
    assert task_of_config(config("bert", "BertModel"), tmp_path) == names.FEATURE_EXTRACTION
    (tmp_path / "modules.json").write_text("[]")
    assert task_of_config(config("bert", "BertModel"), tmp_path) == names.SENTENCE_SIMILARITY


@pytest.mark.parametrize("name", names.TASKS)
def test_every_task_is_somewhere_and_has_models(name: str) -> None:
    assert task_of(name).name == name
    assert name in TASK_MODELS and classes_of(name)
    assert (name in HEADS) == (type(task_of(name)).__name__ == "HeadTask")


@pytest.mark.parametrize(
    ("given", "task"),
    [
        ("semantic-segmentation", names.IMAGE_SEGMENTATION),
        ("text-generation-with-past", names.TEXT_GENERATION),
        ("automatic-speech-recognition-with-past", names.SPEECH_RECOGNITION),
        ("text2text-generation-with-past", names.TEXT_TO_TEXT),
        ("translation_en_to_fr", names.TEXT_TO_TEXT),
        ("sentiment-analysis", names.TEXT_CLASSIFICATION),
        ("ner", names.TOKEN_CLASSIFICATION),
        ("fill-mask", names.FILL_MASK),
    ],
)
def test_names_of_pipelines_and_of_optimum(given: str, task: str) -> None:
    assert ExportOptions(task=given).task == task


def test_an_unknown_name_is_refused_as_it_was_given() -> None:
    with pytest.raises(OptionError, match="task 'nothing-with-past' is unknown"):
        ExportOptions(task="nothing-with-past")


@pytest.mark.parametrize(
    ("given", "kind", "architecture", "form"),
    [
        (names.SPEECH_RECOGNITION, "wav2vec2", "Wav2Vec2ForCTC", names.CTC),
        (names.SPEECH_RECOGNITION, "whisper", "WhisperForConditionalGeneration", names.SPEECH_RECOGNITION),
        (names.SPEECH_RECOGNITION, "qwen2_audio", "Qwen2AudioForConditionalGeneration", names.AUDIO_TEXT_TO_TEXT),
        (names.IMAGE_SEGMENTATION, "segformer", "SegformerForSemanticSegmentation", names.IMAGE_SEGMENTATION),
        (names.IMAGE_SEGMENTATION, "mask2former", "Mask2FormerForUniversalSegmentation", names.UNIVERSAL_SEGMENTATION),
        (names.IMAGE_TO_TEXT, "llava", "LlavaForConditionalGeneration", names.IMAGE_TEXT_TO_TEXT),
        (names.IMAGE_TO_TEXT, "git", "GitForCausalLM", names.IMAGE_TO_TEXT),
    ],
)
def test_a_task_has_the_form_that_a_models_class_has(given: str, kind: str, architecture: str, form: str) -> None:
    assert form_of(given, config(kind, architecture)) == form
    assert form_of(given, config(kind)) == form
