"""What can go wrong between a folder and the hub, said in our words.

In: an exception of huggingface-hub, or of the HTTP library below it. Out: a `SharingError`.
"""

from __future__ import annotations

from generic_export.errors import T2NError, described, first_line

_AGAIN = "Run the same command again: what was sent already is not sent again."


class SharingError(T2NError):
    """An export could not be sent to the hub, or fetched from it."""


def push_error(repository: str, error: Exception) -> SharingError:
    """Return what to tell a user whose export did not arrive."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, HFValidationError):
        return bad_name(repository)
    if isinstance(error, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return SharingError(f"{repository}: HF_HUB_OFFLINE forbids to reach the hub.", "Unset HF_HUB_OFFLINE.")
    if status == 401:
        return SharingError(
            f"{repository}: {constants.ENDPOINT} does not accept the token.",
            "Make one that may write, at huggingface.co/settings/tokens; then `hf auth login`, HF_TOKEN or --token.",
        )
    if status == 403:
        return SharingError(
            f"{repository}: the token may not write there: {first_line(error)}",
            "Give a token with write access, or a repository of your own.",
        )
    if status == 404:
        return SharingError(f"{repository}: no such owner or repository on the hub.", "Check the spelling.")
    if status in (413, 507):
        return SharingError(
            f"{repository}: the hub has no room for it: {first_line(error)}", "See your storage limits there."
        )
    if status is not None:
        return SharingError(f"{repository}: {constants.ENDPOINT} answered {status}: {first_line(error)}", _AGAIN)
    if isinstance(error, ValueError) and "README.md" in str(error):
        problem = " ".join(str(error).split())
        return SharingError(
            f"{repository}: the hub does not accept the model card: {problem}",
            "Correct the table on top of README.md, or write it again: t2n-llm card DIR --force.",
        )
    return SharingError(f"{repository}: the connection to {constants.ENDPOINT} failed: {described(error)}", _AGAIN)


def bad_name(repository: str) -> SharingError:
    """Return the error for what can be no repository."""
    return SharingError(f"{repository!r} is no name of a repository on the hub.", "Give owner/name.")


__all__ = ["SharingError", "bad_name", "push_error"]
