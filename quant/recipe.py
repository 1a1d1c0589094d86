"""Which tensor is stored how: recipes by name, or from YAML, and the choice they make for each tensor.

In: a recipe and the names and roles of a model's tensors. Out: a scheme and an algorithm per tensor, and rules that match
nothing. Patterns are shell patterns on runs of a name's dotted parts; of several rules that match, the last one wins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from generic_export.errors import OptionError
from quant.algorithms import DEFAULT_ALGORITHM, unknown_name
from quant.blocks import TWICE
from quant.budget import TargetSize, parse_target

QUANTIZED_SCHEMES = ("q4_0", TWICE, "q8_1")
PLAIN_SCHEMES = ("f16", "f32")
SCHEMES = (*QUANTIZED_SCHEMES, *PLAIN_SCHEMES)
ROLES = ("@linears", "@embeddings", "@head")
RECIPE_FILE = "recipe.yaml"

_MOST_BYTES = 1 << 20
_WRITE = "Write names, sizes and schemes as in docs/how-to/compress.md."
_KEYS = ("name", "dtype", "algorithm", "target_size", "tensors")
_RULE_KEYS = ("scheme", "algorithm")


@dataclass(frozen=True)
class Choice:
    """How a tensor is stored.

    Attributes:
        scheme: one of `SCHEMES`; the plain ones leave a tensor in the graph's element type.
        algorithm: what chooses the values of `q4_0`; "" takes the recipe's.
    """

    scheme: str
    algorithm: str = ""


@dataclass(frozen=True)
class Rule:
    """What to do with the tensors that a pattern, or one of `ROLES`, names."""

    pattern: str
    choice: Choice


@dataclass(frozen=True)
class Recipe:
    """How a model is compressed.

    Attributes:
        name: shown and recorded.
        rules: the last one that matches a tensor decides; a tensor that none matches stays plain.
        dtype: element type of the graph, or None to leave it to the caller.
        algorithm: for rules that name none.
        target_size: what all weights together may take: the most sensitive ones stay plain within it.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    dtype: str | None = None
    algorithm: str = DEFAULT_ALGORITHM
    target_size: TargetSize | None = None

    def algorithms(self) -> set[str]:
        """Return the algorithms that the rules may ask for."""
        chosen = {rule.choice.algorithm or self.algorithm for rule in self.rules if rule.choice.scheme == "q4_0"}
        return chosen | {DEFAULT_ALGORITHM for rule in self.rules if rule.choice.scheme == TWICE}

    def asdict(self) -> dict[str, Any]:
        """Return the recipe as `parse_recipe` reads it."""
        tensors = {rule.pattern: _choice_text(rule.choice) for rule in self.rules}
        return {
            "name": self.name,
            **({"dtype": self.dtype} if self.dtype else {}),
            "algorithm": self.algorithm,
            **({"target_size": self.target_size.written()} if self.target_size is not None else {}),
            "tensors": tensors,
        }


_EVERY_LINEAR = Rule("@linears", Choice("q4_0"))
_EMBEDDINGS = (Rule("@embeddings", Choice("q4_0")), Rule("@head", Choice("q4_0")))

NAMED_RECIPES: Mapping[str, Recipe] = {
    "q4_0": Recipe("q4_0", (_EVERY_LINEAR,)),
    "q4_0+embeddings": Recipe("q4_0+embeddings", (_EVERY_LINEAR, *_EMBEDDINGS)),
    "q4_0-mixed": Recipe("q4_0-mixed", (_EVERY_LINEAR, *_EMBEDDINGS)),
    "q4_0x2": Recipe("q4_0x2", tuple(Rule(role, Choice(TWICE)) for role in ROLES)),
    "f16": Recipe("f16", dtype="f16"),
    "f32": Recipe("f32", dtype="f32"),
}
MIXED_RECIPE = "q4_0-mixed"
_MIXED_SIZE = TargetSize(growth=0.1)


def named_recipe(spec: str, algorithms: Collection[str], target_size: TargetSize | None = None) -> Recipe:
    """Return a recipe of `NAMED_RECIPES`.

    Args:
        spec: `NAME` or `NAME:ALGORITHM`, such as `q4_0+embeddings:min_max`.
        algorithms: names that exist.
        target_size: for all weights; only `q4_0-mixed` takes one.

    Raises:
        OptionError: the name or the algorithm is unknown, or the size is out of place.
    """
    name, _, algorithm = spec.partition(":")
    if name not in NAMED_RECIPES:
        raise unknown_name("recipe", name, NAMED_RECIPES)
    recipe = NAMED_RECIPES[name]
    if ":" in spec:
        if not any(rule.choice.scheme == "q4_0" for rule in recipe.rules):
            raise OptionError(
                f"recipe {name!r} has no q4_0 values, so the algorithm {algorithm!r} does not apply.", f"Write {name}."
            )
        _require_known("algorithm", algorithm, algorithms)
        recipe = replace(recipe, name=spec, algorithm=algorithm)
    if name == MIXED_RECIPE:
        return replace(recipe, target_size=target_size or _MIXED_SIZE)
    if target_size is not None:
        raise OptionError(
            f"--target-size does not apply to recipe {name!r}.",
            f"Use {MIXED_RECIPE}, or target_size in a recipe file.",
        )
    return recipe


def read_recipe(path: Path, algorithms: Collection[str], target_size: TargetSize | None = None) -> Recipe:
    """Read a recipe from a YAML file.

    Args:
        path: the file; its keys are `name`, `dtype`, `algorithm`, `target_size` and `tensors`.
        algorithms: names that exist.
        target_size: replaces the file's.

    Raises:
        OptionError: the file cannot be read, is no YAML, or says something unknown.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise OptionError(f"{path}: longer than {_MOST_BYTES} bytes, the limit for a recipe.", _WRITE)
        data = yaml.load(text.decode(), _RecipeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OptionError(f"{path}: the recipe cannot be read: {reason}.", _WRITE) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # to Python a number of thousands of digits is none
        reason = "brackets are nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise OptionError(f"{path}: not the YAML of a recipe: {' '.join(reason.split())}.", _WRITE) from error
    recipe = parse_recipe(data, str(path), algorithms, default_name=path.stem)
    return recipe if target_size is None else replace(recipe, target_size=target_size)


class _RecipeLoader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without what a recipe has no use for: names for parts of it, which may stand for billions of values, and types."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, and tags that the author wrote."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} uses an alias (*{event.anchor})")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} uses a type tag ({event.tag})")
        return super().compose_node(parent, index)


# Dates are no part of a recipe: 2001-12-14 is a name.
_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_recipe(data: Any, origin: str, algorithms: Collection[str], default_name: str = "recipe") -> Recipe:
    """Return the recipe that plain data describe; `origin` names them in errors.

    Raises:
        OptionError: a key, scheme or algorithm is unknown, or a value has the wrong type.
    """
    if not isinstance(data, dict):
        raise OptionError(f"{origin}: a recipe must be a mapping with the keys {', '.join(_KEYS)}.", _WRITE)
    for key in data:
        _require_known(f"{origin}: key", key, _KEYS)
    tensors = data.get("tensors", {})
    if not isinstance(tensors, dict):
        raise OptionError(f"{origin}: 'tensors' must map patterns to schemes, got {type(tensors).__name__}.", _WRITE)
    rules = tuple(_parse_rule(pattern, value, origin, algorithms) for pattern, value in tensors.items())
    dtype = data.get("dtype")
    if dtype is not None:
        _require_known(f"{origin}: dtype", dtype, PLAIN_SCHEMES)
    algorithm = data.get("algorithm", DEFAULT_ALGORITHM)
    _require_known(f"{origin}: algorithm", algorithm, algorithms)
    size = data.get("target_size")
    return Recipe(
        str(data.get("name", default_name)),
        rules,
        dtype,
        algorithm,
        None if size is None else parse_target(size),
    )


@dataclass(frozen=True)
class TensorName:
    """One tensor as recipes see it: its full dotted name, and what it is in the model (one of `ROLES`, or "")."""

    name: str
    role: str = ""


def choose(recipe: Recipe, tensors: Sequence[TensorName]) -> tuple[dict[str, Choice], list[str]]:
    """Return what a recipe wants for each tensor that a rule matches, algorithms filled in, and the idle patterns.

    Args:
        recipe: its rules are applied in order.
        tensors: all that could be stored in blocks.
    """
    choices: dict[str, Choice] = {}
    idle: list[str] = []
    for rule in recipe.rules:
        matched = [tensor.name for tensor in tensors if matches(rule.pattern, tensor)]
        if not matched:
            idle.append(rule.pattern)
        choice = rule.choice
        if choice.scheme == "q4_0" and not choice.algorithm:
            choice = replace(choice, algorithm=recipe.algorithm)
        choices.update(dict.fromkeys(matched, choice))
    return choices, idle


def matches(pattern: str, tensor: TensorName) -> bool:
    """Say whether a pattern names a tensor: its role, or a shell pattern on any run of the parts of its name.

    `embed_tokens`, `layers.0` and `layers.*.mlp` match parameters below such modules; `layers.1` does not match `layers.10`.
    """
    if pattern.startswith("@"):
        return pattern == tensor.role
    parts = tensor.name.split(".")
    runs = (".".join(parts[start:end]) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))
    return any(fnmatchcase(run, pattern) for run in runs)


def _parse_rule(pattern: Any, value: Any, origin: str, algorithms: Collection[str]) -> Rule:
    if not isinstance(pattern, str) or not pattern:
        raise OptionError(f"{origin}: pattern {pattern!r} is not text.", "Write patterns in quotes.")
    if pattern.startswith("@"):
        _require_known(f"{origin}: role", pattern, ROLES)
    where = f"{origin}: {pattern}"
    if isinstance(value, dict):
        for key in value:
            _require_known(f"{where}: key", key, _RULE_KEYS)
        scheme, algorithm = value.get("scheme"), value.get("algorithm", "")
    elif isinstance(value, str):
        scheme, _, algorithm = value.partition(":")
    else:
        raise OptionError(f"{where}: {value!r} is not a scheme.", f"Schemes: {', '.join(SCHEMES)}.")
    _require_known(f"{where}: scheme", scheme, SCHEMES)
    if algorithm:
        _require_known(f"{where}: algorithm", algorithm, algorithms)
        if scheme != "q4_0":
            raise OptionError(f"{where}: algorithms apply to q4_0, but the scheme is {scheme}.", "Drop the algorithm.")
    return Rule(pattern, Choice(str(scheme), str(algorithm)))


def _require_known(what: str, name: Any, known: Collection[str]) -> None:
    if not isinstance(name, str) or name not in known:
        raise unknown_name(what, str(name), tuple(known))


def _choice_text(choice: Choice) -> str:
    return f"{choice.scheme}:{choice.algorithm}" if choice.algorithm else choice.scheme


def recipe_text(recipe: Recipe) -> str:
    """Return a recipe as the YAML text that `read_recipe` reads."""
    return str(yaml.safe_dump(recipe.asdict(), sort_keys=False))
