"""Relations between sizes, such as `T <= 4*S`: read, renamed, evaluated, and written as tract reads them.

In: text of tract's assertion language (sums, products, division by a number, one comparison). Out: `Relation`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from generic_export.errors import OptionError
from generic_export.torch_graph.dims import dim_symbol

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # tract's division truncates towards zero
    ast.Div: lambda dividend, divisor: abs(dividend) // divisor * (1 if dividend >= 0 else -1),
}
# min(a, b) and max(a, b) are left out: tract 0.23.9 dies of an assertion that holds one.
_GRAMMAR = "Sizes are integers, symbols, +, -, * and / by a number."


@dataclass(frozen=True)
class Size:
    """A size as text over symbols, such as `2*S + 1`."""

    text: str

    @staticmethod
    def parse(text: str) -> Size:
        """Read a size.

        Raises:
            OptionError: it is none that tract can read.
        """
        tree = _tree(text)
        _require_size(tree, text)
        return Size(ast.unparse(tree))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in it, in order of appearance."""
        return _symbols(_tree(self.text))


@dataclass(frozen=True)
class Relation:
    """One comparison of two sizes."""

    text: str

    @staticmethod
    def parse(text: str) -> Relation:
        """Read a relation.

        Raises:
            OptionError: it is none that tract can read.
        """
        tree = _tree(text)
        if not isinstance(tree, ast.Compare) or type(tree.ops[0]) not in _COMPARISONS:
            raise OptionError(
                f"{text!r} is not a relation between sizes.", "Compare two sizes with ==, <, <=, > or >=."
            )
        if len(tree.ops) > 1:
            raise OptionError(f"{text!r} contains more than one comparison.", "Write one relation each.")
        for side in (tree.left, tree.comparators[0]):
            _require_size(side, text)
        return Relation(ast.unparse(tree))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in it, in order of appearance."""
        return _symbols(_tree(self.text))

    @property
    def divided_and_whole(self) -> tuple[str, ...]:
        """The symbols that stand in it both inside a division and outside of one, as in `2*(S/2) == S`."""
        tree = _tree(self.text)
        quotients = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
        inside = {id(name): name.id for node in quotients for name in ast.walk(node) if isinstance(name, ast.Name)}
        outside = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name) and id(name) not in inside}
        return tuple(sorted(outside & set(inside.values())))

    def replaced(self, values: Mapping[str, str | int]) -> Relation:
        """Return the relation with other symbols or numbers in the place of some of its symbols."""
        return Relation(ast.unparse(_Replacement(values).visit(_tree(self.text))))

    @property
    def larger(self) -> tuple[sympy.Symbol, sympy.Expr] | None:
        """The symbol that is never smaller than something of other symbols, and that: T and `U + 1` of `T - U > 0`."""
        tree = _tree(self.text)
        kind = type(tree.ops[0]) if isinstance(tree, ast.Compare) else ast.Eq
        if (
            not isinstance(tree, ast.Compare)
            or kind is ast.Eq
            or any(isinstance(node, ast.Div) for node in ast.walk(tree))
        ):
            return None
        sizes = {name: dim_symbol(name) for name in self.symbols}
        left, right = (_value(side, sizes) for side in (tree.left, tree.comparators[0]))
        difference = left - right if kind in (ast.Gt, ast.GtE) else right - left
        least = sympy.expand(difference - int(kind in (ast.Gt, ast.Lt)))
        found = next((each for each in sizes.values() if least.coeff(each) == 1), None)
        rest = sympy.expand(found - least) if found is not None else sympy.Integer(0)
        return (found, rest) if found is not None and rest.free_symbols else None

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Say whether it is true at these sizes.

        Args:
            sizes: one for each of its symbols.
        """
        tree = _tree(self.text)
        if not isinstance(tree, ast.Compare):
            raise OptionError(f"{self.text!r} is not a relation between sizes.", "Make it with Relation.parse.")
        compare = _COMPARISONS[type(tree.ops[0])]
        return compare(_value(tree.left, sizes), _value(tree.comparators[0], sizes))


class _Replacement(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, str | int]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._values.get(node.id, node.id)
        return ast.Constant(value) if isinstance(value, int) else ast.Name(value)


def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise OptionError(f"{text!r} cannot be parsed as a relation or a size.", _GRAMMAR) from None


def _require_size(node: ast.expr, text: str) -> None:
    """Refuse what tract's language has no word for."""
    if isinstance(node, ast.Name):
        dim_symbol(node.id)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        return
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        _require_size(node.operand, text)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        _require_size(node.left, text)
        _require_size(node.right, text)
        if isinstance(node.op, ast.Div) and not _is_positive_number(node.right):
            raise OptionError(f"{text!r} divides by something other than a positive number.", _GRAMMAR)
    else:
        raise OptionError(f"{text!r}: {ast.unparse(node)!r} is not a size.", _GRAMMAR)


def _is_positive_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value > 0


def _symbols(node: ast.AST) -> tuple[str, ...]:
    names = [found for found in ast.walk(node) if isinstance(found, ast.Name)]
    return tuple(dict.fromkeys(found.id for found in sorted(names, key=lambda name: name.col_offset)))


def _value(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, sizes)
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    return int(ast.literal_eval(node))
