"""Every choice of an export, and of its check once more: what is made, of what, how it is checked, where it comes to lie."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from generic_export.devices import check_device
from generic_export.errors import OptionError
from t2n_llm.check.options import CheckingOptions
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.options import GraphOptions
from t2n_llm.option import Panel, made, option, options, refuse_invalid
from t2n_llm.tasks.names import AUTO, KEEPING_CACHES, TASKS, TEXT_GENERATION, TEXT_TO_AUDIO, task_named

# Options that decide what happens around the archive, and nothing in it.
_OUTSIDE_THE_ARCHIVE = (
    *("check", "force", "resume", "low_memory", "decode_steps", "require_tokenizer", "engine", "tract_binary"),
    *("placement", "allow_nonfinite", "prefill_chunk"),
)


@dataclass(frozen=True)
class ExportOptions:
    """All options of an export. Each field carries its description, here or in its group.

    Raises:
        OptionError: an option is invalid or contradicts another.
    """

    task: str = option(
        AUTO,
        "Task to export, such as text-classification. auto: read from the config.",
        choices=(AUTO, *TASKS),
        noun="task",
    )
    graph: GraphOptions = options(GraphOptions)
    compression: CompressionOptions = options(CompressionOptions)
    check: bool = option(True, "Compare tract with PyTorch.", flags=("--check/--no-check",))
    allow_nonfinite: bool = option(False, "Export NaN and infinite weights.", Panel.CHECK)
    force: bool = option(False, "Replace an existing export.")
    adapter: str | None = option(None, "LoRA or DoRA to merge: hub id or folder.", metavar="PATH")
    vocoder: str | None = option(
        None, "Vocoder of a spectrogram model: hub id or folder.", Panel.SOURCE, metavar="PATH"
    )
    require_tokenizer: bool = option(True, "Require a tokenizer.", Panel.SOURCE, flags=("--tokenizer/--no-tokenizer",))
    checking: CheckingOptions = options(CheckingOptions)
    archive: str = option(
        "tar", "Form of the archive: tar, tgz or dir.", choices=("dir", "tar", "tgz"), noun="archive form"
    )
    resume: bool = option(False, "Continue an interrupted export.", Panel.OUTPUT)

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", task_named(self.task))
        refuse_invalid(self)
        dtype = self.compression.dtype()
        if dtype is not None:  # a recipe may say the element type
            object.__setattr__(self, "graph", replace(self.graph, dtype=dtype))
        self._refuse_memory_without_use()
        if self.task not in (AUTO, *KEEPING_CACHES) and self.graph.engine_keeps_cache:
            raise OptionError(f"--stateful and --kv-cache do not apply to --task {self.task}.", "Omit them.")
        if self.task not in (AUTO, TEXT_TO_AUDIO) and self.vocoder is not None:
            raise OptionError(f"--vocoder applies to the task {TEXT_TO_AUDIO!r}, not to {self.task!r}.", "Omit it.")
        if self.task not in (AUTO, TEXT_GENERATION) and self.graph.window_cache:
            raise OptionError(
                f"--window-cache applies to the task {TEXT_GENERATION!r}, not to {self.task!r}.", "Omit it."
            )

    def _refuse_memory_without_use(self) -> None:
        if self.compression.weights_in_memory == "f32" and self.graph.computes_in == "f16":
            raise OptionError(
                "--weights-in-memory f32 with f16 activations would make matmuls slower.",
                "Omit --activations f16.",
            )

    @staticmethod
    def of(**choices: Any) -> ExportOptions:
        """Return the options for the keywords of `export_llm`.

        Args:
            choices: options by name.

        Raises:
            OptionError: an option is unknown, invalid or contradicts another.
        """
        return made(ExportOptions, choices)

    def recorded(self) -> dict[str, Any]:
        """Return the options as plain data, without paths of this machine."""
        checking = self.checking
        return {
            "task": self.task,
            "check": self.check,
            "allow_nonfinite": self.allow_nonfinite,
            "force": self.force,
            "resume": self.resume,
            "archive": self.archive,
            "require_tokenizer": self.require_tokenizer,
            **asdict(self.graph),
            "decode_steps": checking.decode_steps,
            "low_memory": checking.low_memory,
            "engine": checking.engine,
            "tract_binary": checking.tract_binary.name if checking.tract_binary else None,
            "placement": asdict(checking.placement),
            "compression": self.compression.recorded(),
        }

    def identity(self) -> dict[str, Any]:
        """Return the options that may change the bytes of an archive."""
        return {name: value for name, value in self.recorded().items() if name not in _OUTSIDE_THE_ARCHIVE}


@dataclass(frozen=True)
class ValidateOptions:
    """How an export is compared once more; each option is described where it is declared, here or in its group."""

    adapter: str | None = option(
        None, "The merged adapter; default: the recorded hub id.", Panel.SOURCE, metavar="PATH"
    )
    vocoder: str | None = option(None, "The vocoder; default: the recorded hub id.", Panel.SOURCE, metavar="PATH")
    checking: CheckingOptions = options(CheckingOptions)
    device: str = option("cpu", "Device: cpu, cuda or metal.", metavar="DEVICE")
    atol: float | None = option(None, "Absolute tolerance of logits.", Panel.CHECK, minimum=0.0)
    rtol: float | None = option(None, "Tolerance relative to the largest logit.", Panel.CHECK, minimum=0.0)

    def __post_init__(self) -> None:
        check_device(self.device)

    @staticmethod
    def of(**choices: Any) -> ValidateOptions:
        """Return the choices given as keywords, those of the check by their own names.

        Raises:
            OptionError: one of them is unknown, has no meaning, or contradicts another.
        """
        return made(ValidateOptions, choices)
