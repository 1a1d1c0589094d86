"""The check of an archive that exists already: its module is run again, and captured again when the check fails.

In: a module, its arguments, the archive. Out: how close they are, or an error and a debug bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from generic_export.capture import evaluation_mode, prepare
from generic_export.compare.comparison import Comparison
from generic_export.debug.archive.debug_bundle import BundleOptions, bundled_failure, write_failing_case
from generic_export.documents import translate_graph
from generic_export.errors import OptionError, T2NError
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.engine_target import EngineTarget
from generic_export.inference_target.tract.engines.npz_bundle import write_bundle
from generic_export.read.reading import read_graph_text, signature_of
from generic_export.torch_graph.naming import DEFAULT_VARNAME_SCHEME, VariableNamingScheme, identifier
from generic_export.torch_graph.sizes.declared_axes import check_names
from generic_export.translate.translate import TranslationOptions


@dataclass(frozen=True)
class ArchiveCheck:
    """An archive, the target it is for, and how its inputs and outputs are called.

    Attributes:
        archive: folder, `.tar` or `.tgz`.
        target: gives the engine and the tolerance.
        input_names, output_names: which of the archive's each tensor of the module is; None: they are in its order.
        io_npz_path: npz of inputs and PyTorch's outputs to write, for `assert_io_cmd_str`.
    """

    archive: Path
    target: EngineTarget
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    io_npz_path: Path | None = None

    def run(self, example: ExampleRun) -> list[Comparison]:
        """Run the archive on what the module was given, and compare.

        Raises:
            EngineError: the engine refuses or cannot run the archive.
            MismatchError: an output is beyond the tolerance; says which, where and how much.
            OptionError: names that the archive does not have.
        """
        signature = signature_of(read_graph_text(self.archive))
        inputs = _by_name("input", signature.inputs, example.inputs, self.input_names)
        outputs = _by_name("output", signature.outputs, example.outputs, self.output_names)
        names = example.output_names if self.output_names is None else signature.outputs
        if self.io_npz_path is not None:
            given = dict(zip(signature.inputs, inputs, strict=True))
            write_bundle(self.io_npz_path, [given], dict(zip(signature.outputs, outputs, strict=True)))
        return self.target.require_close(
            self.archive, ExampleRun(inputs, outputs, names), self.target.ask(self.archive, inputs)
        )

    def run_again(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        bundle_path: Path | None = None,
        naming_scheme: VariableNamingScheme | str = DEFAULT_VARNAME_SCHEME,
        options: BundleOptions | None = None,
    ) -> list[Comparison]:
        """Run the module, then the archive; what fails is captured again and written as one file, if a path is given.

        Args:
            model, args, kwargs: the module and its arguments.
            bundle_path: the `.tgz` to write; None writes none.
            naming_scheme: the one that was exported with.
            options: what goes into the bundle.

        Raises:
            EngineError, MismatchError, OptionError: as `run`; the hint says where the bundle is.
            ArchiveError: the bundle cannot be written.
        """

        def write(path: Path, error: T2NError) -> Path:
            target, signature = self.target, signature_of(read_graph_text(self.archive))
            check_names(target.dynamic_axes, signature.inputs, signature.outputs)
            names = self.input_names or signature.inputs, self.output_names or signature.outputs
            with evaluation_mode(model):
                prepared = prepare(model, args, target, *names, kwargs=kwargs, allow_same_io_names=True)
                document = translate_graph(
                    prepared.graph, target, TranslationOptions(naming_scheme=naming_scheme), model
                )
                example = ExampleRun.of(model, args, kwargs)
                return write_failing_case(path, self.archive, example, prepared, document, target, error, options)

        with bundled_failure(None if bundle_path is None else partial(write, bundle_path)):
            with evaluation_mode(model):
                example = ExampleRun.of(model, args, kwargs)
            return self.run(example)


def _by_name(
    what: str, archived: Sequence[str], arrays: Sequence[np.ndarray], names: Sequence[str] | None
) -> Sequence[np.ndarray]:
    """Return arrays in the order of the archive's inputs or outputs."""
    if names is None and len(arrays) == len(archived):
        return arrays
    named = [identifier(name) for name in (names or ())]
    if sorted(named) != sorted(archived) or len(named) != len(arrays):
        said = f", called {', '.join(names)}" if names is not None else ""
        raise OptionError(
            f"{len(arrays)} {what} tensors{said}; the archive has {len(archived)}.",
            f"Its {what}s are {', '.join(archived)}.",
        )
    found = dict(zip(named, arrays, strict=True))
    return [found[name] for name in archived]


__all__ = ["ArchiveCheck"]
