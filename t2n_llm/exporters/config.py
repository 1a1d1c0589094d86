"""`TractConfig`: the options of an export through `transformers.exporters`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers.exporters import ExportConfigMixin

from generic_export.errors import OptionError
from t2n_llm.exporters.compression import COMPRESSIONS

EXPORT_FORMAT = "tract"


@dataclass
class TractConfig(ExportConfigMixin):
    """Options of `TractExporter`.

    Args:
        dynamic: keep every axis symbolic where the model allows it. A warning names axes that become static or bounded.
        dynamic_shapes: the axes that stay symbolic, as `torch.export` takes them: for each keyword argument a dict of axes
            (`Dim.AUTO`, `Dim.DYNAMIC`, a `Dim` or a name), nested like the argument. Takes precedence over `dynamic`.
        dtype: element type of stored weights: "f32", or "f16" (read by tract as such; activations stay f32). None keeps the
            model's own; bfloat16, which tract does not have, becomes f32.
        tolerance: how close tract's outputs must be to PyTorch's: "exact", "close", "approximate", "very" or "super". None takes
            1e-4, absolute and relative, and 1e-4 of the largest value of each output, by which sums in another order differ.
        check: run each program in tract before the export returns, and compare with the model.
        compress: "q4_0" stores the weights of linear layers in blocks of 4 bits, and compares tract with the quantized model. For
            algorithms that calibrate, use `t2n-llm export --compress`.

    Raises:
        OptionError: an unknown dtype, tolerance or compression.
    """

    export_format: str = EXPORT_FORMAT

    dynamic: bool = False
    dynamic_shapes: dict[str, Any] | None = None
    dtype: Literal["f16", "f32"] | None = None
    tolerance: str | None = None
    check: bool = True
    compress: Literal["q4_0"] | None = None

    quantizer: None = None
    """Read by `HfExporter.export_for_generation`; tract has no quantizer of transformers'."""

    def __post_init__(self) -> None:
        from generic_export.compare.comparison import tolerance_of

        if self.dtype not in (None, "f16", "f32"):
            raise OptionError(f"TractConfig.dtype is {self.dtype!r}.", 'Give "f16", "f32" or None.')
        if self.compress not in (None, *COMPRESSIONS):
            raise OptionError(f"TractConfig.compress is {self.compress!r}.", 'Give "q4_0" or None.')
        if self.quantizer is not None:
            raise OptionError("TractConfig takes no quantizer.", "Use t2n-llm export --compress.")
        if self.tolerance is not None:
            tolerance_of(self.tolerance)


__all__ = ["EXPORT_FORMAT", "TractConfig"]
