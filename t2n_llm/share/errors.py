"""What can go wrong between a folder and the hub, said in our words.

In: an exception of huggingface-hub, or of the HTTP library below it. Out: a `SharingError`.
"""

from __future__ import annotations

from generic_export.errors import T2NError, described, first_line

_AGAIN = "Run the same command again; uploaded files are not sent again."


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
        return SharingError(
            f"{repository}: HF_HUB_OFFLINE is set, so the hub cannot be reached.", "Unset HF_HUB_OFFLINE."
        )
    if status == 401:
        return SharingError(
            f"{repository}: {constants.ENDPOINT} rejected the token.",
            "Create one with write access at huggingface.co/settings/tokens; then use `hf auth login`, "
            "HF_TOKEN or --token.",
        )
    if status == 403:
        return SharingError(
            f"{repository}: the token has no write access: {first_line(error)}",
            "Use a token with write access, or a repository that you own.",
        )
    if status == 404:
        return SharingError(f"{repository}: the owner or repository does not exist on the hub.", "Check the spelling.")
    if status in (413, 507):
        return SharingError(
            f"{repository}: the storage quota of the hub is exceeded: {first_line(error)}",
            "Check your storage limits on the hub.",
        )
    if status is not None:
        return SharingError(f"{repository}: {constants.ENDPOINT} returned {status}: {first_line(error)}", _AGAIN)
    if isinstance(error, ValueError) and "README.md" in str(error):
        problem = " ".join(str(error).split())
        return SharingError(
            f"{repository}: the hub rejected the model card: {problem}",
            "Correct the metadata at the top of README.md, or rewrite it: t2n-llm card DIR --force.",
        )
    return SharingError(f"{repository}: the connection to {constants.ENDPOINT} failed: {described(error)}", _AGAIN)


def bad_name(repository: str) -> SharingError:
    """Return the error for what can be no repository."""
    return SharingError(f"{repository!r} is not a repository name.", "Use owner/name.")


__all__ = ["SharingError", "bad_name", "push_error"]
