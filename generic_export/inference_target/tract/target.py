"""`TractNNEF`: the tract dialect, its options, and the check of an archive in the engine."""

from __future__ import annotations

import getpass
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from generic_export.errors import MismatchError, OptionError
from generic_export.inference_target.base import ExampleRun, InferenceTarget
from generic_export.inference_target.tract.check import TractCheckTolerance, compare
from generic_export.inference_target.tract.dialect import RELEASES, in_dialect, parse_version
from generic_export.inference_target.tract.wheel import TractWheel
from generic_export.inference_target.tract.wheels import wheel_python
from generic_export.nnef.graph import NnefGraph
from generic_export.ops.builder import Numerics

LATEST_VERSION = RELEASES[-1]


@dataclass(frozen=True, kw_only=True)
class TractNNEF(InferenceTarget):
    """Export for tract.

    Args:
        version: tract release that will read the archive, 0.21.14 or later; an operation that it does not have is written
            with older ones, or refused with a `DialectError`.
        check_io_tolerance: how close the engine's outputs must be to PyTorch's.
        specific_properties: further key/value pairs for the document.
        dump_identity_properties: also record user and host name; off, since archives are shared.
        force_attention_inner_in_f32: widen query, key and value of attention to f32.
        force_linear_accumulation_in_f32: matrix products of f16 accumulate and leave in f32, then are rounded.
        force_norm_in_f32: widen a norm's input, scale and shift, and round once at its end.

    Raises:
        OptionError: the version is not one this dialect is written for.
    """

    version: str = LATEST_VERSION
    check_io_tolerance: TractCheckTolerance = TractCheckTolerance.APPROXIMATE
    specific_properties: Mapping[str, str | float] = field(default_factory=dict)
    dump_identity_properties: bool = False
    force_attention_inner_in_f32: bool = False
    force_linear_accumulation_in_f32: bool = False
    force_norm_in_f32: bool = False

    def __post_init__(self) -> None:
        if parse_version(self.version) < parse_version(RELEASES[0]):
            raise OptionError(
                f"tract {self.version} does not know the operators written here.", f"Use {RELEASES[0]} or later."
            )

    @classmethod
    def latest(cls) -> TractNNEF:
        """Return the target for the newest tract release this project knows."""
        return cls()

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        """Return the document as the release reads it.

        Raises:
            DialectError: an operation is younger than the release and has no older form.
        """
        return in_dialect(graph, self.version)

    @property
    def numerics(self) -> Numerics:
        return Numerics(
            f32_linear_accumulation=self.force_linear_accumulation_in_f32,
            f32_attention=self.force_attention_inner_in_f32,
            f32_norm=self.force_norm_in_f32,
        )

    @property
    def properties(self) -> Mapping[str, str | float]:
        properties: dict[str, str | float] = {"tract_target_version": self.version}
        if self.dump_identity_properties:
            properties |= {"user": getpass.getuser(), "host": platform.node(), "os": platform.platform()}
        return properties | dict(self.specific_properties)

    def post_export(self, archive: Path, example: ExampleRun) -> None:
        """Run the archive in the pip-installed engine on the example inputs and compare every output.

        An archive for an older release is run in that release's own wheel.
        """
        python = None if self.version == LATEST_VERSION else wheel_python(self.version)
        with TractWheel(python=python).load(archive) as model:
            answers = model.run(list(example.inputs))
        comparisons = [
            compare(name, answer, reference, self.check_io_tolerance.limits(reference.dtype))
            for name, answer, reference in zip(example.output_names, answers, example.outputs, strict=True)
        ]
        failed = [str(comparison) for comparison in comparisons if not comparison.passed]
        if failed:
            raise MismatchError(
                f"{archive}: tract differs from PyTorch beyond tolerance {self.check_io_tolerance.value!r}: "
                + "; ".join(failed),
                "Export in float32, or choose a wider check_io_tolerance if the difference is expected.",
            )
