"""tract as a backend of `transformers.exporters`: importing this package registers it.

In: a transformers model and the keyword arguments of its forward. Out: an `ExportedModel` whose programs run in tract.
"""

from t2n_llm.exporters.registration import register

register()

from t2n_llm.exporters.config import TractConfig  # noqa: E402 - an older transformers is refused before these need the interface
from t2n_llm.exporters.exporter import TractExporter  # noqa: E402
from t2n_llm.exporters.program import TractProgram  # noqa: E402
from t2n_llm.exporters.runner import TractModelRunner  # noqa: E402

__all__ = ["TractConfig", "TractExporter", "TractModelRunner", "TractProgram"]
