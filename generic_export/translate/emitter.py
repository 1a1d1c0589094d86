"""The operations of a document as they are emitted: each once, with the shapes and element types of its results.

In: operators, values and literals. Out: emissions. Two requests for the same operation on the same values give one operation, so
that masks and rotary tables appear once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from generic_export.errors import GraphError
from generic_export.nnef.dtypes import tract_dtype
from generic_export.nnef.graph import Argument, Block, NnefFragment
from generic_export.torch_graph.dims import Dim, Shape, simplify_dim
from generic_export.translate.choices import Numerics, Spelling
from generic_export.translate.complex_layout import COMPONENT_DTYPES, as_complex, carried_fact, holds_complex, on_pairs
from generic_export.translate.fragments import load_fragment
from generic_export.translate.repeated_axes import RepeatedAxes
from generic_export.translate.value import Emission, QuantisedTensor, Scalar, Value, shape_argument, values_in
from generic_export.weights.part import TensorPart


@dataclass
class NnefEmitter:
    """Collects emissions while the translations run (the only mutable thing in this room).

    Attributes:
        numerics: f32 switches that translations honour.
        spelling: which of two ways to say the same thing they write.
        shared_parameters: names of parameters that more than one operator reads.
        result_shapes: what PyTorch computed for the operator being translated, as it writes its sizes.
        quantised: by number, the integers that a dequantised value was made from (ops/quantised.py).
        parts: by label, what a stored tensor is of a parameter, where it is not that parameter itself.
    """

    numerics: Numerics = field(default_factory=Numerics)
    spelling: Spelling = field(default_factory=Spelling)
    shared_parameters: frozenset[str] = frozenset()
    emissions: list[Emission] = field(default_factory=list)
    block: Block = field(default_factory=Block)
    hint: str = ""
    result_shapes: tuple[Shape, ...] = ()
    labels: dict[int, str] = field(default_factory=dict)
    fragments: dict[str, NnefFragment] = field(default_factory=dict)
    quantised: dict[int, QuantisedTensor] = field(default_factory=dict)
    parts: dict[str, TensorPart] = field(default_factory=dict)
    _known: dict[tuple, tuple[Value, ...]] = field(default_factory=dict)
    _makers: dict[int, Emission] = field(default_factory=dict)
    _varying: set[int] = field(default_factory=set)  # what graph inputs go into
    _repeated: RepeatedAxes = field(default_factory=RepeatedAxes)
    _count: int = 0

    # --- the one door through which everything is emitted ---------------------------------------

    def emit(
        self,
        operator: str,
        inputs: Sequence[Argument | Value | Sequence[Value]],
        *,
        shape: Sequence[Dim],
        dtype: torch.dtype,
        attributes: Mapping[str, Argument] | None = None,
        constant: Scalar | None = None,
        generic_type: str = "",
    ) -> Value:
        """Emit a one-output operation and return its value; see `emit_many` for the arguments."""
        facts = ((tuple(shape), dtype),)
        (value,) = self.emit_many(operator, inputs, facts, attributes=attributes, generic_type=generic_type)
        if constant is not None and value.constant is None:
            return replace(value, constant=constant)
        return value

    def emit_many(
        self,
        operator: str,
        inputs: Sequence[Argument | Value | Sequence[Value]],
        facts: Sequence[tuple[Shape, torch.dtype]],
        *,
        attributes: Mapping[str, Argument] | None = None,
        generic_type: str = "",
        label: str = "",
    ) -> tuple[Value, ...]:
        """Emit an operation with several outputs.

        Args:
            operator: NNEF or tract operator name.
            inputs: values, lists of values, or literals.
            facts: shape and dtype of each output.
            attributes: named arguments.
            generic_type: what stands between `<>` after the operator name.
            label: what tells two sources apart: the tensor's label, the input's name.
        """
        frozen = tuple(tuple(item) if isinstance(item, (list, tuple)) else item for item in inputs)
        if holds_complex(frozen):
            frozen, attributes = on_pairs(operator, frozen, attributes or {})
            pairs = self.emit_many(operator, frozen, [carried_fact(*fact) for fact in facts], attributes=attributes)
            return tuple(
                as_complex(value) if fact[1] in COMPONENT_DTYPES else value
                for value, fact in zip(pairs, facts, strict=True)
            )
        named = tuple((attributes or {}).items())
        key = (operator, label, _key(frozen), _key(named), len(facts))
        known = self._known.get(key)
        if known is not None:
            return known
        outputs = tuple(
            Value(self._count + index, tuple(simplify_dim(dim) for dim in shape), dtype)
            for index, (shape, dtype) in enumerate(facts)
        )
        self._count += len(outputs)
        self._known[key] = outputs
        emission = Emission(operator, frozen, named, outputs, self.block, self.hint, generic_type, label)  # type: ignore[arg-type]
        self.emissions.append(emission)
        self._makers |= dict.fromkeys((output.number for output in outputs), emission)
        if operator == "tract_core_external" or any(
            map(self.varies, values_in([*frozen, *(attributes or {}).values()]))
        ):
            self._varying.update(output.number for output in outputs)
        self._repeated.record(emission)
        return outputs

    def fragment(
        self,
        fragment: str | NnefFragment,
        inputs: Sequence[Argument | Value],
        *,
        shape: Sequence[Dim],
        dtype: torch.dtype,
    ) -> Value:
        """Call a fragment (one output), which the document will then hold: of `translate/fragments/<name>.nnef`, or your own."""
        loaded = load_fragment(fragment) if isinstance(fragment, str) else fragment
        known = self.fragments.setdefault(loaded.name, loaded)
        if known != loaded:
            raise GraphError(f"two fragments are called {loaded.name!r}.", "Rename one of them.")
        return self.emit(loaded.name, inputs, shape=shape, dtype=dtype)

    # --- sources ---------------------------------------------------------------------------------

    def external(self, shape: Shape, dtype: torch.dtype, name: str) -> Value:
        """Declare a graph input; a complex one is pairs."""
        if dtype in COMPONENT_DTYPES:
            return as_complex(self.external(*carried_fact(shape, dtype), name))
        attributes: dict[str, Argument] = {"shape": shape_argument(shape), "datum_type": tract_dtype(dtype)}
        hint, self.hint = self.hint, name
        (value,) = self.emit_many("tract_core_external", [], [(shape, dtype)], attributes=attributes, label=name)
        self.hint = hint
        return value

    def variable(self, label: str, shape: Shape, dtype: torch.dtype) -> Value:
        """Read the tensor stored under `label`; the element type comes from its `.dat` file."""
        if dtype in COMPONENT_DTYPES:
            return as_complex(self.variable(label, *carried_fact(shape, dtype)))
        attributes: dict[str, Argument] = {"label": label, "shape": shape_argument(shape)}
        hint, self.hint = self.hint, label
        (value,) = self.emit_many(
            "variable", [], [(shape, dtype)], attributes=attributes, generic_type="scalar", label=label
        )
        self.hint = hint
        self.labels[value.number] = label
        return value

    def part(self, label: str, part: TensorPart, dtype: torch.dtype) -> Value:
        """Read part of a parameter, which is stored under `label` as a tensor of its own.

        Raises:
            GraphError: another part lies under that label.
        """
        if self.parts.setdefault(label, part) != part:
            raise GraphError(f"two different parts of {part.parameter!r} would be stored as {label!r}.")
        return self.variable(label, part.shape, dtype)

    def maker_of(self, value: Value) -> Emission | None:
        """Return the emission that makes a value."""
        return self._makers.get(value.number)

    def varies(self, value: Value) -> bool:
        """Say whether a graph input goes into a value; others are constants."""
        return value.number in self._varying

    def label_of(self, value: Value) -> str | None:
        """Return the label of a value that is a stored tensor as it lies there, else None."""
        return self.labels.get(value.number)


def _key(item: object) -> object:
    """Return what makes two emissions the same: value numbers, and literals with their Python type."""
    if isinstance(item, tuple):
        return tuple(_key(element) for element in item)
    if isinstance(item, Value):
        return (item.number, _key(item.constant), item.dtype) if item.literal else item.number
    # bool, int and float compare equal in Python (1 == True == 1.0) but are different NNEF literals.
    return type(item), repr(item)


__all__ = ["NnefEmitter"]
