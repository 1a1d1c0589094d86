"""What mkdocs does beside its plugins, for scripts/site: pages made from files of the repository, and addresses that moved.

In: pages of docs/ as Markdown. Out: `<!-- include: FILE -->` is that file, `<!-- command line reference -->` the options of every
command, and each page in docs/redirects.toml leads to its new place, by anchor where one is named. With T2N_SITE_FAST=1
tutorials are shown and not run.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAST = "T2N_SITE_FAST"
REDIRECTS = ROOT / "docs" / "redirects.toml"

_INCLUDE = re.compile(r"<!-- include: ([\w/.-]+) -->")
_REFERENCE = "<!-- command line reference -->"
_EXECUTED = re.compile(r"^(```\w+) exec=.*$", re.MULTILINE)

_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{target}">
<script>
const anchors = {anchors};
location.replace(anchors[location.hash.slice(1)] || "{target}" + location.hash);
</script>
<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript>
<a href="{target}">This page has moved.</a>
"""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in what the page asks for."""
    markdown = _INCLUDE.sub(lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), markdown)
    if _REFERENCE in markdown:
        script = runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))
        markdown = markdown.replace(_REFERENCE, script["reference"]())
    return _EXECUTED.sub(r"\1", markdown) if os.environ.get(FAST) else markdown


def read_redirects(path: Path = REDIRECTS) -> dict[str, dict[str, str]]:
    """Return, by earlier page, where it and its anchors are now; "" is the page itself."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def html(target: str) -> str:
    """Return the address of a page on the site."""
    page, _, anchor = target.partition("#")
    return page.removesuffix(".md") + ".html" + (f"#{anchor}" if anchor else "")


def redirect(page: str, places: dict[str, str]) -> str:
    """Return the page that leads from an earlier address to the new ones."""
    up = "../" * page.count("/")
    moved = {anchor: up + html(target) for anchor, target in places.items() if anchor}
    return _PAGE.format(target=up + html(places[""]), anchors=json.dumps(moved))


def on_post_build(config: Any, **_: Any) -> None:
    """Write the pages of addresses that moved."""
    site = Path(config["site_dir"])
    for page, places in read_redirects().items():
        file = site / html(page)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(redirect(page, places), encoding="utf-8")
