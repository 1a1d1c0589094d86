"""The warning that compression changed a model by a lot."""

from __future__ import annotations

import pytest

from t2n_llm.check.agreement import Agreement, Tolerance, ValidationReport
from t2n_llm.check.loss import warn_of_loss
from t2n_llm.reporter import LogReporter


class Warnings(LogReporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, message: str) -> None:
        self.said.append(message)


def warnings_of(recipe: str | None, mean_kl: float) -> list[str]:
    original = Agreement(29, mean_kl, 2.0, 20)
    report = ValidationReport("wheel", "0", "f16", Tolerance.for_dtype("f16"), (), original)
    reporter = Warnings()
    warn_of_loss(report, {"recipe": {"name": recipe}} if recipe is not None else None, reporter)
    return reporter.said


@pytest.mark.parametrize(
    ("recipe", "ways"),
    [
        ("q4_0", ["q4_0:gptq", "q4_0-mixed", "q4_0x2"]),
        ("q4_0+embeddings:gptq", ["q4_0-mixed", "q4_0x2"]),
        ("q4_0-mixed", ["q4_0:gptq", "q4_0x2"]),
        ("q4_0x2", []),
    ],
)
def test_a_large_loss_is_a_warning_with_the_recipes_that_lose_less(recipe: str, ways: list[str]) -> None:
    (warning,) = warnings_of(recipe, 0.39)
    assert "mean KL 0.39" in warning and "same token 20/29" in warning
    assert [
        way for way in ("q4_0:gptq", "q4_0-mixed", "q4_0x2") if way in warning.partition("More accurate:")[2]
    ] == ways


def test_a_small_loss_is_none() -> None:
    assert not warnings_of("q4_0", 0.05)
    assert not warnings_of(None, 0.39)
