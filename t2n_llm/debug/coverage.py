"""`cover_model`: which operators a model needs and which of them can be written, from its config alone, in seconds.

In: a config. Out: a `CoverageReport`. One layer of each kind is captured as the export does it; where that fails, the
tiny twin is captured module by module, so that the operators of all that can be captured are known, and what cannot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from generic_export.capture import ModuleCall
from generic_export.debug.coverage import ModuleCoverage, OperatorCoverage, Support
from generic_export.documents import producer_version, torch_version
from generic_export.errors import T2NError
from t2n_llm.debug.module_coverage import UncapturedModule, call_coverage, layer_of, modules_coverage
from t2n_llm.graph.capture import WRAPPER_ATTRIBUTE
from t2n_llm.graph.causal_lm import causal_lm
from t2n_llm.graph.options import GraphOptions
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.source.empty_model import meta_model
from t2n_llm.source.hub import open_config
from t2n_llm.source.layer_cut import LayerCut, cut_layers, layers_path
from t2n_llm.source.reference import SourceRef

DECODER = "cached decoder"
MODULES = "module by module"


@dataclass(frozen=True)
class CoverageReport:
    """What is known of a model before any weight is read.

    Attributes:
        model: as the user named it.
        architecture: class of the model.
        model_type: of its config.
        how: `cached decoder` (captured as an export does it) or `module by module`.
        layers: numbers of the layers that were captured; each stands for its kind.
        depth: layers of the model.
        operators: in the order of their first use; counts are those of the whole model.
        problems: what keeps the whole from being captured or translated, one line each.
        uncaptured: modules whose own code cannot be captured.
        seconds: taken.
        versions: of PyTorch, transformers and this package.
    """

    model: str
    architecture: str
    model_type: str
    how: str
    layers: tuple[int, ...]
    depth: int
    operators: tuple[OperatorCoverage, ...]
    problems: tuple[str, ...]
    uncaptured: tuple[UncapturedModule, ...]
    seconds: float
    versions: Mapping[str, str]

    def of(self, support: Support) -> tuple[OperatorCoverage, ...]:
        """Return the operators that are supported, decomposed or missing."""
        return tuple(row for row in self.operators if row.support is support)

    @property
    def complete(self) -> bool:
        """Whether every operator can be written and the whole model can be captured."""
        return not (self.problems or self.uncaptured or self.of(Support.MISSING))

    def asdict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        totals = {
            str(support): {"operators": len(rows := self.of(support)), "calls": sum(row.count for row in rows)}
            for support in Support
        }
        operators = [asdict(row) | {"support": str(row.support)} for row in self.operators]
        plain = {key: value for key, value in asdict(self).items() if key != "operators"}
        return {"complete": self.complete, **plain, "totals": totals, "operators": operators}


def cover_model(
    source: str | SourceRef,
    *,
    every_layer: bool = False,
    reporter: Reporter | None = None,
) -> CoverageReport:
    """Say which operators a model needs, and which of them can be written.

    Args:
        source: hub id, folder, config file or `.gguf` file; of a hub repository only the config is fetched.
        every_layer: capture all layers instead of one of each kind (slower, the same answer).
        reporter: told what happens; None logs.

    Raises:
        SourceError: there is no such config.
        CaptureError: transformers cannot build the model, or nothing of it can be run or captured.
    """
    reporter = reporter or LogReporter()
    started = time.monotonic()
    ref = SourceRef.of(source)
    trust_remote_code = ref.trust_remote_code
    reporter.stage(f"Reading {ref.name}")
    config = open_config(ref).config
    cut = cut_layers(config, trust_remote_code=trust_remote_code)
    if every_layer:
        cut = LayerCut(config, tuple(range(cut.depth)), (1,) * cut.depth)
    reporter.stage(f"Capturing {len(cut.picks)} of {cut.depth} layers")
    uncaptured: tuple[UncapturedModule, ...] = ()
    try:
        found = _decoder_coverage(cut, trust_remote_code)
        how, problems = DECODER, found.problems
    except T2NError as error:
        reporter.stage("The whole model cannot be captured; capturing its modules one by one")
        how, problems = MODULES, (error.message,)
        found, uncaptured = modules_coverage(config, trust_remote_code, error)
        problems += found.problems
    return CoverageReport(
        model=ref.name,
        architecture=type(meta_model(cut.config, trust_remote_code=trust_remote_code)).__name__,
        model_type=str(config.model_type),
        how=how,
        layers=cut.picks,
        depth=cut.depth,
        operators=found.operators,
        problems=problems,
        uncaptured=uncaptured,
        seconds=time.monotonic() - started,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch_version(), "transformers": str(transformers.__version__), "t2n-llm": producer_version()}


# --- the whole, as an export captures it ----------------------------------------------------------


def _decoder_coverage(cut: LayerCut, trust_remote_code: bool) -> ModuleCoverage:
    with causal_lm(cut.config, GraphOptions(), name="", trust_remote_code=trust_remote_code) as graph:
        layers = layers_path(graph.network, graph.config)
        call = ModuleCall(
            graph.module,
            tuple(graph.inputs.values()),
            input_names=tuple(graph.inputs),
            output_names=graph.output_names,
            strip_prefix=f"{WRAPPER_ATTRIBUTE}.",
        )
        return call_coverage(call, lambda path: cut.weight(layer_of(path, layers)), graph.dynamic_axes)


__all__ = ["DECODER", "MODULES", "CoverageReport", "UncapturedModule", "cover_model"]
