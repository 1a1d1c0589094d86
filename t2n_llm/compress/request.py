"""What a user asks for when a model is to be compressed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generic_export.errors import OptionError
from t2n_llm.option import Panel, option, refuse_invalid

if TYPE_CHECKING:
    from quant.protocol import Quantizer
    from quant.recipe import Recipe

AS_STORED = "as stored"
"""Name of the recipe of an export that was asked for none and whose checkpoint holds Q4_0's values."""


@dataclass(frozen=True)
class CompressionOptions:
    """Options of compression. The defaults compress nothing. See docs/how-to/compress.md; each field carries its description.

    Raises:
        OptionError: the recipe is unknown, unreadable or invalid, or an option does not apply.
    """

    name: str | None = option(
        None,
        "Quantize weights: q4_0, q4_0+embeddings, q4_0-mixed, q4_0x2. Algorithms: search, gptq, best, tuned, ...",
        keyword="compress",
        metavar="NAME[:ALGORITHM]",
    )
    file: Path | None = option(
        None,
        "YAML recipe, instead of --compress.",
        Panel.COMPRESSION,
        keyword="recipe",
        metavar="FILE",
    )
    target_size: str | int | None = option(
        None,
        "Size for q4_0-mixed: 900MB, or +10% (default).",
        Panel.COMPRESSION,
        metavar="SIZE",
    )
    quantizers: str | None = option(None, "Dict of custom algorithms.", Panel.COMPRESSION, metavar="MODULE:DICT")
    calibration: str = option(
        "builtin",
        "Calibration data: a file, a folder, auto (self-generated) or builtin.",
        Panel.COMPRESSION,
    )
    imatrix: Path | None = option(
        None,
        "Importance matrix to use (also llama.cpp's).",
        Panel.COMPRESSION,
        metavar="FILE",
    )
    save_imatrix: Path | None = option(
        None, "Save calibration statistics (*.imatrix.safetensors).", Panel.COMPRESSION, metavar="FILE"
    )

    weights_in_memory: str = option(
        "stored",
        "Expand matmul weights to f16 or f32 at load.",
        Panel.COMPRESSION,
        choices=("stored", "f16", "f32"),
        noun="dtype in memory",
    )

    def __post_init__(self) -> None:
        refuse_invalid(self)
        if self.name is not None and self.file is not None:
            raise OptionError("--compress and --recipe exclude each other.", "Use a named recipe or a file.")
        if self.name is None and self.file is None and self.target_size is not None:
            raise OptionError("--target-size requires a recipe.", "Add --compress q4_0-mixed.")
        self.recipe()  # whatever is wrong with it should be known before the work
        if self.imatrix is not None:
            self._refuse_unused_statistics()
        if self.save_imatrix is not None:
            from t2n_llm.compress.statistics import check_name

            check_name(self.save_imatrix)
            if not self.calibrates():
                raise OptionError("--save-imatrix requires a calibrated recipe.", "Add --compress q4_0:imatrix.")

    def _refuse_unused_statistics(self) -> None:
        from t2n_llm.compress.algorithms import IMATRIX

        if IMATRIX not in self.algorithm_names():
            raise OptionError(
                "--imatrix was given, but no tensor uses it.",
                f"Use it with the algorithm {IMATRIX}: --compress q4_0:{IMATRIX}.",
            )

    def algorithms(self) -> Mapping[str, Quantizer]:
        """Return the algorithms that work on one tensor at a time, by name."""
        from quant.algorithms import BUILT_IN, load_algorithms

        return load_algorithms(self.quantizers) if self.quantizers or self.name or self.file else BUILT_IN

    @property
    def compresses(self) -> bool:
        """Whether a recipe changes tensors."""
        recipe = self.recipe()
        return recipe is not None and bool(recipe.rules)

    def recipe(self) -> Recipe | None:
        """Return the recipe, or None without compression.

        Raises:
            OptionError: the recipe is unknown, unreadable or invalid.
        """
        if self.name is None and self.file is None and self.quantizers is None:
            return None
        from quant.budget import parse_target
        from quant.recipe import named_recipe, read_recipe
        from t2n_llm.compress.algorithms import CALIBRATED

        known = (*self.algorithms(), *CALIBRATED)
        size = parse_target(self.target_size) if self.target_size is not None else None
        if self.name is not None:
            return named_recipe(self.name, known, size)
        return read_recipe(self.file, known, size) if self.file is not None else None

    def dtype(self) -> str | None:
        """Return the dtype that the recipe requests for the graph, or None."""
        recipe = self.recipe()
        return recipe.dtype if recipe is not None else None

    def calibrates(self) -> bool:
        """Return whether the recipe contains an algorithm that runs the model."""
        names = self.algorithm_names()
        if not names:
            return False
        from t2n_llm.compress.algorithms import CALIBRATED, IMATRIX

        return not (names - ({IMATRIX} if self.imatrix is not None else set())).isdisjoint(CALIBRATED)

    def algorithm_names(self) -> set[str]:
        """Return the names of the algorithms in the recipe."""
        recipe = self.recipe()
        return recipe.algorithms() if recipe is not None else set()

    def recorded(self) -> dict[str, Any]:
        """Return the options as plain data, without paths of this machine."""
        from t2n_llm.compress.statistics import recorded_file

        calibration = self.calibration
        return {
            "name": self.name,
            "file": self.file.name if self.file is not None else None,
            "target_size": self.target_size,
            "quantizers": self.quantizers,
            "calibration": calibration if calibration in ("builtin", "auto") else Path(calibration).name,
            "imatrix": recorded_file(self.imatrix) if self.imatrix is not None else None,
            "weights_in_memory": self.weights_in_memory,
        }
