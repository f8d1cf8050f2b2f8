"""References to repositories of models and data, taken apart."""

from pathlib import Path

from twinkle.errors import ArgumentError
from twinkle_registry.trust.reference import HubReference


def parsed(reference: str, revision: str | None = None) -> HubReference:
    """Take `scheme://owner/name@revision` apart; the revision may stand beside it instead.

    Raises:
        ComponentNotFound: it has not this form.
        ArgumentError: it names a component, or another revision than `revision`.
    """
    scheme, _, rest = reference.partition("://")
    hub_ref = HubReference.parse(f"{scheme.lower()}://{rest}", asked=repr(reference))
    if hub_ref.name:
        raise ArgumentError(f"{reference!r} names a component of a repository; leave '#{hub_ref.name}' out here")
    if not revision or revision == hub_ref.revision:
        return hub_ref
    if hub_ref.revision:
        raise ArgumentError(
            f"{reference!r} names the revision {hub_ref.revision!r}, and revision= {revision!r}; give one"
        )
    return HubReference.parse(f"{hub_ref.place}@{revision}", asked=f"{reference!r}, revision={revision!r}")


def without_revision(reference: str) -> HubReference:
    """Take a reference apart that names a whole repository.

    Raises:
        ArgumentError: it names a revision.
    """
    hub_ref = parsed(reference)
    if hub_ref.revision:
        raise ArgumentError(f"{reference!r}: a repository is made as a whole; leave '@{hub_ref.revision}' out")
    return hub_ref


def folder_of(reference: str) -> Path:
    """Return the folder of a `file://...` reference.

    Raises:
        ComponentNotFound: it has not this form.
        ArgumentError: the path is relative, or a revision or component is named.
    """
    hub_ref = parsed(reference)
    if hub_ref.revision:
        raise ArgumentError(f"{reference!r}: a folder has one state and no revisions; leave '@{hub_ref.revision}' out")
    return absolute(hub_ref.repo, reference)


def absolute(path: str, reference: str) -> Path:
    """Return a path, `~` expanded, or raise `ArgumentError` if it is relative."""
    folder = Path(path).expanduser()
    if not folder.is_absolute():
        raise ArgumentError(f"{reference!r}: a file:// reference has an absolute path: file:///path/to/folder")
    return folder
