"""`TractNNEF`: the tract dialect, its options, and the check of an archive in the engine."""

from __future__ import annotations

import getpass
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from generic_export.compare.comparison import ToleranceLimits, TractCheckTolerance, tolerance_of
from generic_export.devices import CPU, devices_of
from generic_export.errors import MismatchError, OptionError
from generic_export.inference_target.example import ExampleCall, ExampleRun
from generic_export.inference_target.tract.engine_target import EngineTarget
from generic_export.inference_target.tract.engines.asking import ask_cli, ask_wheel
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.device_forms import DEVICES_PROPERTY, DeviceForms, forms_for
from generic_export.inference_target.tract.engines.features import (
    DEFAULT_FEATURES,
    TractFeature,
    features_of,
    registry_names,
)
from generic_export.inference_target.tract.engines.streaming import FIRST_RELEASE, Streaming, known_by_then, open_stream
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.tract.releases.dialect import (
    ENDLESS_SQUARE_PRODUCTS,
    RELEASES,
    SINCE,
    has_operator,
    refuse_other_registries,
    refuse_younger,
    with_older_fragments,
)
from generic_export.inference_target.tract.releases.wheels import wheel_packages
from generic_export.inference_target.version import SemanticVersion
from generic_export.nnef.attention_forms import with_plain_softmax
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.request import DynamicAxes, declared_sizes, symbol_name
from generic_export.torch_graph.sizes.declared_axes import AnyDynamicAxes, dynamic_axes_of
from generic_export.translate.choices import Numerics, Spelling

LATEST_VERSION = RELEASES[-1]
IDENTITY_PROPERTIES = ("user", "host", "os")

_ATTENTION = "tract_transformers_sdpa"


@dataclass(frozen=True)
class TractNNEF(EngineTarget):
    """Exports for tract.

    Args:
        version: tract release that will read the archive, 0.21.13 or later. Operators that this release lacks are written with
            older ones, or refused with a `DialectError`.
        feature_flags: registries that the runtime includes besides tract's core (`TractFeature`, or their names). An archive that
            needs another registry is refused. None: tract_transformers and tract_extra.
        check_io: run the archive in tract and compare it with PyTorch before the export returns. If `version` is not the
            installed release, its wheel is downloaded once into the user's cache.
        dynamic_axes: axes that stay symbolic: `{name: {axis: symbol}}`, or `{name: [axis, ...]}`, which gives each axis a symbol
            of its own. A symbol is a name, a `torch.export.Dim`, or a `DynamicSize`. Axes of outputs are compared with the sizes
            that follow from the inputs.
        specific_tract_binary_path: the `tract` command of release `version` that runs the check; None for the wheel.
        check_io_tolerance: allowed difference from PyTorch: one of tract's levels, its name, or numeric limits.
        check_io_sizes: further sizes at which the archive is compared, such as `({"B": 1, "T": 9},)`. Symbols that are left out
            keep the example's size. () disables these checks. None selects 1, larger sizes, and sizes around the numbers at
            which the graph slices or compares, within the time of the example's own check.
        specific_properties: further key/value pairs to store in the document.
        dump_identity_properties: also store the user and host name. Off by default, since archives are shared.
        force_attention_inner_in_f32: compute attention in f32.
        force_linear_accumulation_in_f32: f16 matmuls accumulate in f32 and round their result.
        force_norm_in_f32: compute norms in f32 and round the result.
        reify_sdpa_operator: True writes attention as tract's operator (release 0.22.0, registry tract_transformers), False as
            primitive operators. None writes the operator if the release and `feature_flags` include it.
        streaming: the input arrives in pieces (docs/how-to/streaming.md). Loops along that axis keep their state, unsupported
            operators are refused, and the check runs piece by piece. The wheel supports it from release 0.23.0.
        upsample_with_debox: write nearest upsampling of floats by integer factors as `debox` (release 0.23.0).
        attention_as_products: write attention of language models as two grouped matmuls per KV head, which is fastest on CPUs
            with long caches.
        device: "cpu", "cuda" or "metal", or several of them. Forms that tract computes wrongly on a device are replaced
            (docs/how-to/gpu.md). The check runs on the CPU.
        attention_in_f16: round the heads to f16 where the attention operator of a device computes in f16 only.

    Raises:
        OptionError: the release is not supported, or does not support another option.
    """

    version: str | SemanticVersion = LATEST_VERSION
    # None is accepted for these by `__init__` below; `__post_init__` puts what it stands for in its place.
    feature_flags: Collection[TractFeature | str] = None  # type: ignore[assignment]
    check_io: bool = True
    dynamic_axes: DynamicAxes = None  # type: ignore[assignment]
    specific_tract_binary_path: str | Path | None = None
    check_io_tolerance: TractCheckTolerance | ToleranceLimits = TractCheckTolerance.APPROXIMATE
    specific_properties: Mapping[str, str | float] = None  # type: ignore[assignment]
    dump_identity_properties: bool = False
    force_attention_inner_in_f32: bool = False
    force_linear_accumulation_in_f32: bool = False
    force_norm_in_f32: bool = False
    reify_sdpa_operator: bool | None = None
    upsample_with_debox: bool = False
    streaming: Streaming | None = None
    attention_as_products: bool = False
    check_io_sizes: Sequence[Mapping[str, int]] | None = None
    device: str | Sequence[str] = CPU
    attention_in_f16: bool = False

    if TYPE_CHECKING:

        def __init__(
            self,
            version: str | SemanticVersion = LATEST_VERSION,
            feature_flags: Collection[TractFeature | str] | None = None,
            check_io: bool = True,
            dynamic_axes: AnyDynamicAxes | None = None,
            specific_tract_binary_path: str | Path | None = None,
            check_io_tolerance: TractCheckTolerance | ToleranceLimits | str = TractCheckTolerance.APPROXIMATE,
            specific_properties: Mapping[str, str | float] | None = None,
            dump_identity_properties: bool = False,
            force_attention_inner_in_f32: bool = False,
            force_linear_accumulation_in_f32: bool = False,
            force_norm_in_f32: bool = False,
            reify_sdpa_operator: bool | None = None,
            upsample_with_debox: bool = False,
            streaming: Streaming | None = None,
            attention_as_products: bool = False,
            check_io_sizes: Sequence[Mapping[str, int]] | None = None,
            device: str | Sequence[str] = CPU,
            attention_in_f16: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.release < SemanticVersion.parse(RELEASES[0]):
            raise OptionError(
                f"tract {self.version} is not supported; the oldest supported release is {RELEASES[0]}.",
                f"Use {RELEASES[0]} or later; all later releases are on PyPI.",
            )
        flags = DEFAULT_FEATURES if self.feature_flags is None else self.feature_flags
        features = features_of(flags)
        if not isinstance(self.specific_properties, (Mapping, NoneType)):
            raise OptionError(
                f"specific_properties is {self.specific_properties!r}.", "Use a dict of names and values."
            )
        self._set("feature_flags", features)
        self._set("dynamic_axes", dynamic_axes_of(self.dynamic_axes))
        self._set("specific_properties", dict(self.specific_properties or {}))
        self._set("check_io_tolerance", tolerance_of(self.check_io_tolerance))
        self._set("check_io_sizes", None if self.check_io_sizes is None else tuple(map(dict, self.check_io_sizes)))
        self._check_sizes()
        self._set("device", devices_of(self.device))
        if self.reify_sdpa_operator and not self._device_forms.operator:
            raise OptionError(
                f"reify_sdpa_operator writes {_ATTENTION}, which tract {self.version} computes wrongly on "
                f"{', '.join(self.devices)}.",
                "Omit it: attention is then written in a correct form.",
            )
        if self.reify_sdpa_operator:
            self._require("reify_sdpa_operator", _ATTENTION)
            if TractFeature.TRANSFORMERS not in features:
                raise OptionError(
                    "reify_sdpa_operator writes an operator of tract_transformers, which feature_flags does "
                    "not include.",
                    "Add tract_transformers to feature_flags, or set reify_sdpa_operator=False.",
                )
        if self.upsample_with_debox:
            self._require("upsample_with_debox", "debox")
        self._check_streaming()

    def _set(self, field: str, value: object) -> None:
        """Put a field into the one form that is used inside, while the target is made."""
        object.__setattr__(self, field, value)

    def _require(self, option: str, operator: str) -> None:
        if not has_operator(self.release, operator):
            raise OptionError(
                f"{option} writes {operator}, which tract {self.version} does not have.",
                f"Omit it, or export for tract {SINCE[operator]} or later.",
            )

    def _symbols(self) -> set[str]:
        return {symbol_name(symbol) for axes in self.dynamic_axes.values() for symbol in axes.values()}

    def _check_sizes(self) -> None:
        symbols = self._symbols()
        for sizes in self.check_io_sizes or ():
            for symbol, size in sizes.items():
                if symbol not in symbols:
                    raise OptionError(
                        f"check_io_sizes has {symbol!r}, which is not the symbol of a dynamic axis.",
                        f"Symbols of dynamic_axes: {', '.join(sorted(symbols)) or 'none'}.",
                    )
                if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                    raise OptionError(f"check_io_sizes has {symbol}={size!r}.", "Use an integer of 1 or more.")

    def _check_streaming(self) -> None:
        if self.streaming is None:
            return
        symbols = self._symbols()
        if self.streaming.symbol not in symbols:
            raise OptionError(
                f"streaming uses {self.streaming.symbol!r}, which is not the symbol of a dynamic axis.",
                f"Symbols of dynamic_axes: {', '.join(sorted(symbols)) or 'none'}.",
            )
        declared = next(iter(declared_sizes(self.dynamic_axes)), None)
        if declared is not None:
            raise OptionError(
                f"{declared} is a DynamicSize, whose constraints a stream cannot check.",
                "Use its name, or a torch.export.Dim.",
            )
        wheel = self.specific_tract_binary_path is None and self.release >= SemanticVersion.parse(FIRST_RELEASE)
        if self.check_io and not wheel:
            raise OptionError(
                f"streaming is checked with the wheel of tract {FIRST_RELEASE} or later.",
                "Use that release, or check_io=False and your own runtime.",
            )

    @classmethod
    def latest(cls) -> TractNNEF:
        """Return the target for the newest supported tract release."""
        return cls()

    @property
    def release(self) -> SemanticVersion:
        """The tract release that will read the archive."""
        return SemanticVersion.parse(self.version)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that the archive is written for."""
        return devices_of(self.device)

    @property
    def _device_forms(self) -> DeviceForms:
        return forms_for(self.devices, self.release)

    @property
    def registries(self) -> tuple[str, ...]:
        """Registries that an engine must enable besides its core."""
        return registry_names(features_of(self.feature_flags))

    @property
    def refuses_sizes(self) -> bool:
        """Whether the archive contains assertions about sizes; False for streams, whose length is unknown."""
        return self.streaming is None

    @property
    def numerics(self) -> Numerics:
        """See `InferenceTarget.numerics`."""
        return Numerics(
            f32_linear_accumulation=self.force_linear_accumulation_in_f32,
            f32_attention=self.force_attention_inner_in_f32,
            f32_norm=self.force_norm_in_f32,
        )

    @property
    def spelling(self) -> Spelling:
        """See `InferenceTarget.spelling`."""
        reified = self.reify_sdpa_operator
        if reified is None:
            reified = TractFeature.TRANSFORMERS.value in self.registries and has_operator(self.release, _ATTENTION)
        forms = self._device_forms
        return Spelling(
            streamed=self.streaming.symbol if self.streaming is not None else "",
            attention_operator=reified and forms.operator,
            attention_products=self.attention_as_products or not forms.operator,
            attention_padding=reified and forms.padding,
            attention_in_f16=self.attention_in_f16,
            fused_softmax=forms.fused_softmax,
            debox_upsampling=self.upsample_with_debox,
            resize_operator=has_operator(self.release, "tract_core_resize"),
            square_products=self.release not in ENDLESS_SQUARE_PRODUCTS,
        )

    @property
    def properties(self) -> Mapping[str, str | float]:
        """See `InferenceTarget.properties`."""
        properties: dict[str, str | float] = {"tract_target_version": str(self.release)}
        if self.devices != (CPU,):
            properties[DEVICES_PROPERTY] = " ".join(self.devices)
        if self.dump_identity_properties:
            identity = (getpass.getuser(), platform.node(), platform.platform())
            properties |= dict(zip(IDENTITY_PROPERTIES, identity, strict=True))
        return properties | dict(self.specific_properties)

    def pre_trace(
        self, model: nn.Module, input_names: Sequence[str] | None, output_names: Sequence[str] | None
    ) -> None:
        """Validate the names in `dynamic_axes` and locate the engine that will check the archive.

        Args:
            model: the module to export.
            input_names: names of the inputs; None if they are derived from the module.
            output_names: names of the outputs; None if they are derived from the module.

        Raises:
            EngineMissingError: the engine is not installed and could not be downloaded.
            OptionError: `specific_tract_binary_path` is not of release `version`, or a name is neither an input nor an output.
        """
        super().pre_trace(model, input_names, output_names)
        if self.check_io:
            _ = self._cli() if self.specific_tract_binary_path else self._wheel().version

    def post_translate(self, graph: NnefGraph) -> NnefGraph:
        """Return the document for this release: operators that it lacks are written with older ones.

        Args:
            graph: the translated document.

        Raises:
            DialectError: an operation is newer than the release and has no older form, or needs a registry that is not in
                `feature_flags`.
        """
        refuse_younger(graph, self.release)
        if not self._device_forms.fusible_softmax:
            graph = with_plain_softmax(graph)
        document = with_older_fragments(graph, self.release)
        refuse_other_registries(document, self.registries)
        return document

    def post_export(
        self,
        model: nn.Module,
        nnef_graph: NnefGraph,
        args: Sequence[Any],
        exported_filepath: str | Path,
        debug_bundle_path: str | Path | None = None,
    ) -> None:
        """Run the archive on the example inputs in the engine and compare every output.

        During an export, the exporter writes the debug bundle. If you call this method yourself, it writes the bundle.

        Args:
            model: the module, in eval mode.
            nnef_graph: the document that was written.
            args: arguments of the forward.
            exported_filepath: path of the archive.
            debug_bundle_path: where to write a debug bundle if the check fails; None writes none.

        Raises:
            EngineError: the engine refused the archive or failed to run it.
            MismatchError: its outputs differ from PyTorch's.
        """
        if not self.check_io:
            return
        archive = Path(exported_filepath)
        if isinstance(args, ExampleCall) and args.example is not None:
            self.require_close(archive, args.example, self.ask(archive, args.example.inputs))
            if self.streaming is not None:
                self._require_streams(archive, args.example, self.streaming)
            return
        from generic_export.debug.archive.repeated_check import ArchiveCheck  # it imports this package

        bundle = None if debug_bundle_path is None else Path(debug_bundle_path)
        ArchiveCheck(archive, self).run_again(model, tuple(args), bundle_path=bundle)

    def _require_streams(self, archive: Path, example: ExampleRun, streaming: Streaming) -> None:
        with open_stream(archive, streaming, self._wheel(), self.registries) as stream:
            streamed = stream.run(example.inputs)
        try:
            self.require_close(archive, known_by_then(example, streamed), [output.values for output in streamed])
        except MismatchError as error:
            raise MismatchError(
                f"run in {streaming}: {error.message}",
                "It agrees when run as a whole: something in the model needs later steps of the stream. See "
                "docs/how-to/streaming.md.",
            ) from error

    # --- the engine -----------------------------------------------------------------------------

    def ask(self, archive: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run an archive once; see `EngineTarget.ask`.

        Args:
            archive: path of the archive.
            inputs: one array per input.
        """
        if self.specific_tract_binary_path:
            return ask_cli(self._cli(), archive, inputs, registries=self.registries)
        return ask_wheel(self._wheel(), archive, inputs, registries=self.registries)

    @contextmanager
    def opened(self, archive: Path) -> Iterator[Callable[[Sequence[np.ndarray]], list[np.ndarray]]]:
        """Load an archive once and yield a function that runs it; see `EngineTarget.opened`.

        Args:
            archive: path of the archive.
        """
        if self.specific_tract_binary_path:
            with super().opened(archive) as ask:
                yield ask
            return
        with self._wheel().load(archive, registries=self.registries) as model:
            yield lambda inputs: model.run(list(inputs))

    def _wheel(self) -> TractWheel:
        return TractWheel(packages=wheel_packages(self.release))

    def _cli(self) -> TractCli:
        cli = TractCli(Path(str(self.specific_tract_binary_path)))
        if SemanticVersion.parse(cli.version) != self.release:
            raise OptionError(
                f"{cli.binary} is tract {cli.version}, but the archive is for {self.version}.",
                f"Use the command of that release, or version={cli.version!r}.",
            )
        return cli
