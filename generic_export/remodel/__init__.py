"""Another boundary around a module that stays as it is: axes collapsed, inputs bound, symbols and names chosen by a plan.

In: modules with example arguments (`Subgraph`), and a plan in Python, YAML or JSON. Out: archives with exactly that interface.
"""

from generic_export.remodel.export import (
    BoundaryAdapter,
    Remodelled,
    export_one,
    export_remodelled,
    full_arguments,
    plan_of_archive,
    remodel,
)
from generic_export.remodel.plan import (
    BindConstant,
    BindSize,
    BindValue,
    InputPlan,
    OutputPlan,
    RemodelPlan,
    SubgraphPlan,
    SymbolConstraint,
)
from generic_export.remodel.plan_file import load_plan, parse_plan, plan_text, save_plan, template_plan
from generic_export.remodel.stages import BoundaryStages
from generic_export.remodel.subgraph import Subgraph

__all__ = [
    "BindConstant",
    "BindSize",
    "BindValue",
    "BoundaryAdapter",
    "BoundaryStages",
    "InputPlan",
    "OutputPlan",
    "RemodelPlan",
    "Remodelled",
    "Subgraph",
    "SubgraphPlan",
    "SymbolConstraint",
    "export_one",
    "export_remodelled",
    "full_arguments",
    "load_plan",
    "parse_plan",
    "plan_of_archive",
    "plan_text",
    "remodel",
    "save_plan",
    "template_plan",
]
