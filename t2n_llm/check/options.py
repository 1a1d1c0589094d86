"""How an export is compared with PyTorch: the engine, how long, and where the reference's weights may stay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from generic_export.devices import CPU, check_device
from generic_export.errors import OptionError
from t2n_llm.option import Panel, option, refuse_invalid

if TYPE_CHECKING:
    from t2n_llm.weights.placement import Placement

ENGINES = ("wheel", "cli", "auto")
DEFAULT_DECODE_STEPS = 64


@dataclass(frozen=True)
class EngineOptions:
    """Which engine is asked.

    Raises:
        OptionError: there is no such engine.
    """

    engine: str = option(
        "wheel",
        "wheel: tract from pip. cli: the tract command. auto: whichever exists.",
        Panel.CHECK,
        choices=ENGINES,
    )
    tract_binary: Path | None = option(
        None, "Path of the tract command (implies --engine cli).", Panel.CHECK, flags=("--tract",)
    )

    threads: int = option(
        1, "Threads of the tract command (--engine cli).", Panel.CHECK, minimum=1, metavar="N", advice="Use 1 or more."
    )

    device: str = CPU
    """What computes; no option of its own: `export` has several, `validate` one."""

    def __post_init__(self) -> None:
        refuse_invalid(self)
        check_device(self.device)
        if self.threads > 1 and not self.uses_command:
            raise OptionError(
                f"--threads {self.threads} is given, and products in the wheel take one.",
                "Add --engine cli, or leave it out.",
            )

    @property
    def uses_command(self) -> bool:
        """Whether the `tract` command is asked, and not the wheel."""
        from importlib.util import find_spec

        automatic = self.engine == "auto" and find_spec("tract") is None
        return self.engine == "cli" or self.tract_binary is not None or automatic


@dataclass(frozen=True)
class PlacementOptions:
    """Where the weights of the PyTorch reference may stay.

    Raises:
        OptionError: there is no such place, or a size is none.
    """

    device_map: str = option("auto", "Placement of the reference model: auto, cpu, disk or cuda.", Panel.CHECK)
    max_memory: str | None = option(
        None, "Memory limit of the reference: 8GB, or cpu=8GB,0=20GB.", Panel.CHECK, metavar="SIZE"
    )

    def __post_init__(self) -> None:
        if (self.device_map, self.max_memory) != ("auto", None):
            _ = self.placement  # refuses what cannot be read

    @property
    def placement(self) -> Placement:
        """What the user allows."""
        from t2n_llm.weights.placement import Placement

        return Placement.parse(self.device_map, self.max_memory)


@dataclass(frozen=True)
class CheckingOptions(PlacementOptions, EngineOptions):
    """Options of the comparison with PyTorch. Each field carries its description."""

    decode_steps: int = option(
        DEFAULT_DECODE_STEPS,
        "Tokens decoded by the check.",
        Panel.CHECK,
        minimum=1,
        advice="Decode at least one token, or skip the check.",
    )
    low_memory: bool = option(False, "Run PyTorch in a process that ends before tract starts.", Panel.CHECK)

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        PlacementOptions.__post_init__(self)
