"""Which forms of a graph tract computes wrongly or slowly on a device, and which form to write instead.

In: a device and a release. Out: `forms_for`, what a target writes; `refuse_wrong_forms`, called before an archive is prepared.
The table is data: a row for each defect or slow form of the engine, and one for each device that was not measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from generic_export.devices import CPU
from generic_export.errors import ArchiveError, WrongOnDeviceError
from generic_export.inference_target.version import SemanticVersion
from generic_export.nnef.attention_forms import AttentionForm, attention_forms
from generic_export.nnef.graph import NnefOperation
from generic_export.read.outline import GraphOutline, read_outline
from generic_export.read.reading import read_graph_text

# What turns a softmax of scaled and masked scores into `scaled_masked_softmax`
# (docs/contributing/engine-facts.md#transforms).
DETECT_ALL = "transformers_detect_all"
_FUSING_TRANSFORMS = frozenset({DETECT_ALL, "detect_scaled_masked_softmax"})


class Effect(StrEnum):
    """What a form does on a device: a wrong one is refused there, a slow one is only not written."""

    WRONG = "wrong"
    SLOW = "slow"


@dataclass(frozen=True)
class FormRule:
    """A form that an engine computes wrongly, or slowly, on a device.

    Attributes:
        form: how the graph writes it.
        device: one of `generic_export.devices.DEVICES`.
        effect: what it does there.
        first: the oldest release whose source has the defect; older ones were not read, and count as having it.
        last: the newest release that has it; None while there is no later one.
        instead: what to write.
        reason: what goes wrong.
    """

    form: AttentionForm
    device: str
    effect: Effect
    first: str
    last: str | None
    instead: tuple[AttentionForm, ...]
    reason: str

    def holds_in(self, release: SemanticVersion) -> bool:
        """Say whether a release has the defect."""
        return self.last is None or release <= SemanticVersion.parse(self.last)


_ROW_OF_128 = "its CUDA kernel is wrong for rows of exactly 128 elements (nn.cu starts it with 126 threads)"
_EARLY_READ = "its CUDA kernel reads the last tile of the values before it has arrived (flash_attn.cu)"

_COPIED_SCORES = "it copies the scores twice, while a plain sum and softmax work in place"
_NO_VZEROUPPER = "on Intel CPUs, a cast from f32 to f16 after a matmul takes 106 ns per value instead of 0.94"


def _on_cuda(form: AttentionForm, instead: tuple[AttentionForm, ...], reason: str) -> FormRule:
    return FormRule(form, "cuda", Effect.WRONG, "0.23.0", None, instead, reason)


def _on_cpu(form: AttentionForm, instead: AttentionForm, reason: str) -> FormRule:
    return FormRule(form, CPU, Effect.SLOW, "0.23.0", None, (instead,), reason)


FORM_RULES: tuple[FormRule, ...] = (
    _on_cuda(AttentionForm.SCALED_MASKED_SOFTMAX, (AttentionForm.PLAIN_SOFTMAX,), _ROW_OF_128),
    _on_cuda(AttentionForm.FUSIBLE_SOFTMAX, (AttentionForm.PLAIN_SOFTMAX,), _ROW_OF_128),
    _on_cuda(AttentionForm.SDPA, (AttentionForm.PADDED_SDPA, AttentionForm.PLAIN_SOFTMAX), _EARLY_READ),
    _on_cpu(AttentionForm.SCALED_MASKED_SOFTMAX, AttentionForm.PLAIN_SOFTMAX, _COPIED_SCORES),
    _on_cpu(AttentionForm.CAST_CACHE, AttentionForm.ROUNDED_CACHE, _NO_VZEROUPPER),
)
"""CUDA: by measurement on an H200 with 0.23.9, and in the source of 0.23.0 and 0.23.9. CPU: by measurement of 0.23.9
(docs/contributing/engine-facts.md#attention-as-products)."""

DEVICES_PROPERTY = "target_devices"
"""The property of an archive that names the devices it was exported for, where there are others than the CPU."""

UNTESTED: Mapping[str, str] = {"metal": "results on Metal were not measured; graphs use the engine's own operators"}
"""Devices without a measurement."""


@dataclass(frozen=True)
class DeviceForms:
    """What a target writes for its devices.

    Attributes:
        operator: attention may be `tract_transformers_sdpa` as it is.
        padding: attention of suitable heads is that operator with padded keys and values.
        fused_softmax: a masked softmax is one operator.
        fusible_softmax: a transform may make it that operator.
        rounded_cache: products with an identity round keys and values, instead of casts.
    """

    operator: bool = True
    padding: bool = False
    fused_softmax: bool = True
    fusible_softmax: bool = True
    rounded_cache: bool = False


def forms_for(devices: Iterable[str], release: SemanticVersion) -> DeviceForms:
    """Return what to write so that a release computes it right on every one of some devices, and fast on each of them."""
    rows = [row for row in FORM_RULES if row.device in devices and row.holds_in(release)]
    avoided = {row.form for row in rows}
    return DeviceForms(
        operator=AttentionForm.SDPA not in avoided,
        padding=any(AttentionForm.PADDED_SDPA in row.instead for row in rows),
        fused_softmax=AttentionForm.SCALED_MASKED_SOFTMAX not in avoided,
        fusible_softmax=AttentionForm.FUSIBLE_SOFTMAX not in avoided,
        rounded_cache=AttentionForm.CAST_CACHE in avoided,
    )


# --- notes for people --------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceNote:
    """How a graph is written for a device, and why.

    Attributes:
        device: "cuda" or "metal".
        forms: how often each form occurs that was chosen for the device.
        reasons: why, one for each form; or that nothing was measured.
        role: of the archive, in an export of several.
    """

    device: str
    forms: Mapping[str, int]
    reasons: tuple[str, ...]
    role: str = ""

    def asdict(self) -> dict[str, Any]:
        """Return the note as plain data."""
        return {"device": self.device, "role": self.role, "forms": dict(self.forms), "reasons": list(self.reasons)}

    def __str__(self) -> str:
        forms = ", ".join(f"{count} x {form}" for form, count in self.forms.items())
        return f"{self.device}: {': '.join(filter(None, [forms, '; '.join(self.reasons)]))}"


def device_notes(operations: Iterable[NnefOperation], devices: Iterable[str], role: str = "") -> tuple[DeviceNote, ...]:
    """Return a note for each device but the CPU.

    Args:
        operations: of the graph.
        devices: what it was exported for.
        role: of the archive.
    """
    forms = attention_forms(operations)
    notes = []
    for device in devices:
        chosen = {
            row.instead[0]: row for row in reversed(FORM_RULES) if row.device == device and row.instead[0] in forms
        }
        reasons = tuple(f"{row.instead[0].value} instead of {row.form.value}: {row.reason}" for row in chosen.values())
        if device in UNTESTED:
            reasons = (UNTESTED[device],)
        if device != CPU:
            counts = {form.value: forms[form] for form in chosen}
            notes.append(DeviceNote(device, counts, reasons, role))
    return tuple(notes)


def notes_of(outline: GraphOutline) -> tuple[DeviceNote, ...]:
    """Return the notes of an archive: for the devices that it names itself."""
    devices = str(dict(outline.properties).get(DEVICES_PROPERTY, "")).split()
    return device_notes(_operations(outline), devices)


# --- archives -----------------------------------------------------------------------------------


def forms_of(outline: GraphOutline) -> Counter[AttentionForm]:
    """Count the forms of attention of an archive's graph."""
    return attention_forms(_operations(outline))


def wrong_forms(
    outline: GraphOutline, device: str, release: SemanticVersion, transforms: Sequence[str] = ()
) -> tuple[FormRule, ...]:
    """Return the defects that a graph meets on a device.

    Args:
        outline: of the graph.
        device: what it would be prepared for.
        release: of the engine.
        transforms: applied before; some of them fuse operators.
    """
    forms = forms_of(outline)
    if not any(transform in _FUSING_TRANSFORMS for transform in transforms):
        del forms[AttentionForm.FUSIBLE_SOFTMAX]
    return tuple(
        row
        for row in FORM_RULES
        if (row.device, row.effect) == (device, Effect.WRONG) and row.form in forms and row.holds_in(release)
    )


def refuse_wrong_forms(archive: Path, device: str, version: str, transforms: Sequence[str] = ()) -> None:
    """Refuse an archive whose results on a device would be wrong; on the CPU nothing is read.

    Args:
        archive: folder, `.tar` or `.tgz`; a file that is no NNEF archive is left to the engine.
        device: what it is to be prepared for.
        version: of the engine.
        transforms: applied before.

    Raises:
        WrongOnDeviceError: naming the form, the reason, and the export that is right.
    """
    if device == CPU or archive.suffix == ".onnx":
        return
    try:
        outline = read_outline(read_graph_text(archive))
    except ArchiveError:
        return  # the engine says what is wrong with it
    wrong = wrong_forms(outline, device, _release(version), transforms)
    if wrong:
        row = wrong[0]
        raise WrongOnDeviceError(
            f"{archive.name} has attention written as {row.form.value}, which tract {version} computes wrongly on {device}: "
            f"{row.reason}.",
            f"Export for that device: t2n-llm export MODEL --device {device}, or TractNNEF(device={device!r}).",
        )


def _release(version: str) -> SemanticVersion:
    """Return the release of an engine's version, `0.23.10` of `0.23.10.dev1`."""
    numbers = re.match(r"\d+\.\d+(\.\d+)?", version)
    return SemanticVersion.parse(numbers[0] if numbers else version)


def _operations(outline: GraphOutline) -> Iterable[NnefOperation]:
    for call in outline.invocations:
        inputs = tuple(value for name, value in call.arguments if name.isdigit())
        named = tuple((name, value) for name, value in call.arguments if not name.isdigit())
        yield NnefOperation(call.operator, inputs, named, call.outputs)


__all__ = [
    "DETECT_ALL",
    "DEVICES_PROPERTY",
    "FORM_RULES",
    "UNTESTED",
    "DeviceForms",
    "DeviceNote",
    "Effect",
    "FormRule",
    "device_notes",
    "forms_for",
    "forms_of",
    "notes_of",
    "refuse_wrong_forms",
    "wrong_forms",
]
