"""The table of transformers' exporters: what it counts, and one model in it."""

from tests.exporter_backends import skip_without_backends
from tests.load_script import load_script

skip_without_backends()
exporters_table = load_script("exporters_table")


def record(backend: str, verdict: str, dynamic: bool = False, elsewhere: str = "") -> dict[str, object]:
    """Return a line of the results."""
    case = exporters_table.Outcome(
        "fill-mask", "bert", "BertForMaskedLM", backend, dynamic, verdict, elsewhere, 2.0, "why"
    )
    return exporters_table.asdict(case)


def test_the_table_counts_and_names() -> None:
    records = [
        record("tract", "right"),
        record("tract", "right", dynamic=True, elsewhere="wrong"),
        record("dynamo", "failed"),
        record("dynamo", "right", dynamic=True, elsewhere="not taken"),
    ]
    text = exporters_table.table(records)
    assert "| static | 1 of 1 right, 0 wrong, median 2.0 s | 0 of 1 right, 0 wrong, median 0.0 s |" in text
    assert "1 of 1 right, 1 wrong, 0 of 1 at other sizes" in text
    assert "* BertForMaskedLM (dynamic): right, wrong: why" in text


def test_one_model() -> None:
    (found,) = exporters_table.in_process("fill-mask", "bert", [("tract", False)], 300.0)
    assert (found["verdict"], found["model_class"]) == ("right", "BertForMaskedLM")
