"""How many words the pages have: docs/budgets.toml has a limit for each page, and one for each sum."""

from __future__ import annotations

import tomllib

from tests.docs import pages

BUDGETS = tomllib.loads((pages.DOCS / "budgets.toml").read_text(encoding="utf-8"))


def words(text: str) -> int:
    """Count the words of a page, tables included, blocks of code left out."""
    return len(pages.without_code(text).split())


def test_every_page_is_within_its_budget() -> None:
    counted = {
        page.relative_to(pages.DOCS).as_posix(): words(page.read_text(encoding="utf-8"))
        for page in (*pages.user_pages(), *pages.measurement_pages())
    }
    assert counted.keys() == BUDGETS["pages"].keys()
    assert not {name: count for name, count in counted.items() if count > BUDGETS["pages"][name]}
    users = {name: count for name, count in counted.items() if not name.startswith("measurements/")}
    assert sum(users.values()) <= BUDGETS["sums"]["users"]
    assert sum(counted.values()) - sum(users.values()) <= BUDGETS["sums"]["measurements"]


def test_the_readme_is_short() -> None:
    assert words((pages.ROOT / "README.md").read_text(encoding="utf-8")) <= BUDGETS["sums"]["readme"]
