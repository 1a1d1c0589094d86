"""`--task auto`: the task of the architecture that a model's config names.

In: a transformers config. Out: the name of a task, or a message that names the choices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from generic_export.errors import OptionError
from t2n_llm.reporter import Reporter
from t2n_llm.source.hub import is_gguf, open_config
from t2n_llm.source.reference import SourceRef
from t2n_llm.tasks import names
from t2n_llm.tasks.heads.pooling import MODULES_FILE
from t2n_llm.tasks.models import TASK_MODELS, classes_of, mapping_of

_CAUSAL_SUFFIX = "ForCausalLM"  # of models that bring their own code, too
_WITH_TEXT = (names.IMAGE_TEXT_TO_TEXT, names.AUDIO_TEXT_TO_TEXT)
# Other names of a task that has one already, or of what is made of the same class.
_NEVER_CHOSEN = (names.SEQUENCE_CLASSIFICATION, names.FEATURE_EXTRACTION, names.SENTENCE_SIMILARITY)
_ENCODERS = "FOR_MASKED_LM"
_BACKBONES = ""  # the mapping without a middle


def choose_task(task: str, ref: SourceRef, reporter: Reporter) -> str:
    """Return the task of an export: the one that is asked for in the form that the model has, or that of its architecture.

    Args:
        task: a name, or `auto`.
        ref: the source, whose config is read where it decides.
        reporter: receives a task that is not the one asked for.

    Raises:
        OptionError: several tasks are possible, or none is known; the message names them.
        SourceError: the source has no config.
    """
    if task not in (names.AUTO, *names.FORMS):
        return task
    if is_gguf(ref.name):
        return names.TEXT_GENERATION if task == names.AUTO else task
    config = open_config(ref).config
    if task != names.AUTO:
        form = form_of(task, config)
        if form != task:
            reporter.stage(f"Exporting for {form}, which is the form of {task} that this model has")
        return form
    folder = Path(ref.name).expanduser()
    found = task_of_config(config, folder if folder.is_dir() else None)
    if found != names.TEXT_GENERATION:
        reporter.stage(f"Exporting for the task {found}, read from the architecture")
    return found


def task_of_config(config: Any, folder: Path | None = None) -> str:
    """Return the task of a model.

    A config that names no architecture, or one that transformers does not know, is a language model where transformers has one
    for its model type.

    Args:
        config: transformers config.
        folder: of the checkpoint, where the files of sentence-transformers may be.

    Raises:
        OptionError: several tasks are possible, or none is known; the message names them.
    """
    kind, named = str(config.model_type), [str(name) for name in getattr(config, "architectures", None) or ()][:1]
    language_model = kind in classes_of(names.TEXT_GENERATION)
    if not named:
        return _without_architecture(kind, language_model=language_model)
    (architecture,) = named
    found = _tasks_with(architecture)
    if names.TEXT_GENERATION in found or architecture.endswith(_CAUSAL_SUFFIX):
        return names.TEXT_GENERATION
    if language_model and set(found) & set(_WITH_TEXT):
        return names.TEXT_GENERATION  # its text part, unless somebody asks for the rest
    if not found and architecture in mapping_of(_BACKBONES).get(kind, ()):
        return _of_backbone(kind, folder, decodes=language_model and kind not in mapping_of(_ENCODERS))
    if not found and language_model and not _is_known(architecture):
        return names.TEXT_GENERATION
    possible = found or _tasks_of(kind)
    if len(possible) == 1:
        return possible[0]
    raise _ambiguous(architecture, possible)


def form_of(task: str, config: Any) -> str:
    """Return a task, or the form of it that a model's class has: `automatic-speech-recognition` of a CTC model is `ctc`."""
    architectures = {str(name) for name in getattr(config, "architectures", None) or ()}
    kind, forms = str(config.model_type), (task, *names.FORMS.get(task, ()))
    for form in forms:
        if architectures & {name for classes in classes_of(form).values() for name in classes}:
            return form
    return next((form for form in forms if not architectures and kind in classes_of(form)), task)


def _tasks_with(architecture: str) -> list[str]:
    """Return the tasks that a class is for."""
    return [
        task
        for task in TASK_MODELS
        if task in names.TASKS
        and task not in _NEVER_CHOSEN
        and any(architecture in classes for classes in classes_of(task).values())
    ]


def _tasks_of(kind: str) -> list[str]:
    """Return the tasks that a model type has a class for."""
    return [task for task in TASK_MODELS if task in names.TASKS and kind in classes_of(task)]


def _without_architecture(kind: str, *, language_model: bool) -> str:
    if language_model:
        return names.TEXT_GENERATION
    found = [task for task in _tasks_of(kind) if task not in _NEVER_CHOSEN]
    if len(found) == 1:
        return found[0]
    raise _ambiguous(f"a model of type {kind!r}, whose config names no architecture,", found or _tasks_of(kind))


def _of_backbone(kind: str, folder: Path | None, *, decodes: bool) -> str:
    """Return the task of a model without a head; a decoder's head may be its table of embeddings.

    Args:
        kind: model type.
        folder: of the checkpoint.
        decodes: it is a language model that does nothing else.
    """
    if folder is not None and (folder / MODULES_FILE).is_file():
        return names.SENTENCE_SIMILARITY
    if decodes:
        return names.TEXT_GENERATION
    if kind in classes_of(names.IMAGE_FEATURE_EXTRACTION):
        return names.IMAGE_FEATURE_EXTRACTION
    return names.FEATURE_EXTRACTION


def _is_known(architecture: str) -> bool:
    import transformers

    return hasattr(transformers, architecture)


def _ambiguous(subject: str, found: list[str]) -> OptionError:
    choices = found or list(names.TASKS)
    return OptionError(
        f"--task auto: {subject} may be exported for {' or '.join(found) if found else 'no known task'}.",
        f"Choose one: --task {', --task '.join(choices)}.",
    )


__all__ = ["form_of", "task_of_config"]
