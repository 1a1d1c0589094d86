"""Web pages of reports: one style, one script, light and dark, for all of them.

In: a template and what it shows. Out: the text of one HTML file that needs no other file, no network, and no script to be
read. Templates extend `base.html.j2` and take what they share from `parts.html.j2`.
"""

from __future__ import annotations

from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from generic_export.sizes import seconds_text, size_text


def render(package: str, template: str, **content: object) -> str:
    """Return a page.

    Args:
        package: whose folder `templates` holds the template.
        template: its name.
        content: what the template shows, by name. Text is escaped, whatever it holds.

    Raises:
        jinja2.TemplateError: the template is wrong, or names what `content` does not have.
    """
    return _environment(package).get_template(template).render(content)


@cache
def _environment(package: str) -> Environment:
    shared = PackageLoader(__name__)
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), shared]),
        autoescape=True,  # whatever a template is called: models name their modules as they like
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(seconds=seconds_text, size=size_text)
    return environment


__all__ = ["render"]
