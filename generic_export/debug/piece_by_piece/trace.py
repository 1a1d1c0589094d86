"""A model run on several input sets while every module is watched.

In: a model and input sets. Out: the root `ModelDiagnoseOutput`. Forwards are watched with hooks; another method than forward, which
`traced_method` asks for, is replaced on the instance for the length of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from generic_export.capture import class_name, evaluation_mode
from generic_export.debug.piece_by_piece.narration import Narration
from generic_export.debug.piece_by_piece.tree import ModelDiagnoseOutput, fill
from generic_export.debug.piece_by_piece.watching import TracedMethod, Watch, watch_of, watching
from generic_export.debug.record.observe import InputSet, as_call
from generic_export.errors import OptionError
from generic_export.torch_graph.state import state_kept

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@contextmanager
def trace_forward_execution(
    model: nn.Module,
    verbose: int = 0,
    traced_method: TracedMethod | None = None,
    trace_functions: bool = False,
    black_list_functions: Collection[str] | None = None,
) -> Iterator[ModelDiagnoseOutput]:
    """Record the calls of all submodules while a `with` block runs a model; yields the tree of modules.

    The calls are complete when the block ends.

    Args:
        model: any module; the block runs it.
        verbose: 1 prints what is recorded and the number of calls; 2 also prints the arguments.
        traced_method: see `TracedMethod`.
        trace_functions: also record functions of the same file that a forward calls by name.
        black_list_functions: names of functions to skip.

    Raises:
        OptionError: a class has no such method.
    """
    narration = Narration.of(verbose)
    watch = watch_of(model, traced_method)
    root = _grown(watch)
    narration.say(1, f"[trace_forward_execution] {root.full_name}: {len(watch.recording.paths)} modules are watched")
    with watching(watch, trace_functions, black_list_functions or ()):
        yield root
    fill(root, watch.recording)
    for node in root:
        narration.say(1, f"[trace_forward_execution] {node.dot_name}: {len(node.inputs)} calls", node)
    narration.say(2, root.pretty_text(with_dynamic_shape=True))


def trace_execution_piece_by_piece(
    model: nn.Module,
    inputs: Sequence[InputSet],
    verbose: int = 0,
    traced_method: TracedMethod | None = None,
    trace_functions: bool = False,
    black_list_functions: Collection[str] | None = None,
) -> ModelDiagnoseOutput:
    """Run a model on several inputs and record what every submodule receives and returns.

    Args:
        model: any module; it runs in eval mode.
        inputs: for each call a dict of keyword arguments, a tuple of positional arguments, or a pair of both. Sizes should
            differ between calls.
        verbose: see `trace_forward_execution`.
        traced_method: see `trace_forward_execution`.
        trace_functions: see `trace_forward_execution`.
        black_list_functions: see `trace_forward_execution`.

    Returns:
        The tree of modules.

    Raises:
        OptionError: `inputs` is empty or has another form.
    """
    if not inputs:
        raise OptionError("no input sets were given.", "Give two or more of different sizes.")
    calls = [as_call(given) for given in inputs]
    with (
        trace_forward_execution(model, verbose, traced_method, trace_functions, black_list_functions) as root,
        evaluation_mode(model),
        state_kept(model),
        torch.no_grad(),
    ):
        run = model if root.method_name == "forward" else getattr(model, root.method_name)
        for args, kwargs in calls:
            run(*args, **kwargs)
    return root


def _grown(watch: Watch) -> ModelDiagnoseOutput:
    """Return the tree of a model's modules, those that are watched, without calls as yet."""
    model = watch.recording.model
    method = watch.methods.get(model, "forward")
    root = ModelDiagnoseOutput(None, class_name(model).lower(), model, 0, method)
    _add_children(root, root.model, "", watch)
    return root


def _add_children(node: ModelDiagnoseOutput, module: nn.Module, prefix: str, watch: Watch) -> None:
    """Add the modules directly inside one; lists and dicts of modules are looked through."""
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if isinstance(child, _CONTAINERS):
            _add_children(node, child, f"{full}.", watch)
        elif child in watch.recording.paths:
            made = ModelDiagnoseOutput(node, full, child, node.level + 1, watch.methods.get(child, "forward"))
            node.add_child(made)
            _add_children(made, child, "", watch)


__all__ = ["trace_execution_piece_by_piece", "trace_forward_execution"]
