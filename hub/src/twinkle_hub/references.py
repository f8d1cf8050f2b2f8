"""Parses references to repositories of models and data."""

from pathlib import Path

from twinkle.errors import ArgumentError
from twinkle.hub.local import HUBS_OF_BARE_NAMES
from twinkle_registry.trust.reference import HubReference


def parse_reference(reference: str, revision: str | None = None) -> HubReference:
    """Parse `scheme://owner/name@revision`; the revision may be passed as an argument instead.

    The oldest repositories of Hugging Face have no owner: `hf://gpt2`.

    Raises:
        ComponentNotFound: it does not have this form.
        ArgumentError: it names a component, or another revision than `revision`.
    """
    scheme, _, path = reference.partition("://")
    bare = scheme.lower() in HUBS_OF_BARE_NAMES
    hub_ref = HubReference.parse(f"{scheme.lower()}://{path}", context=repr(reference), owner_required=not bare)
    if hub_ref.name:
        raise ArgumentError(f"{reference!r} names a component of a repository; omit '#{hub_ref.name}'")
    if not revision or revision == hub_ref.revision:
        return hub_ref
    if hub_ref.revision:
        raise ArgumentError(
            f"{reference!r} names the revision {hub_ref.revision!r}, and revision= is {revision!r}; give only one"
        )
    context = f"{reference!r}, revision={revision!r}"
    return HubReference.parse(f"{hub_ref.place}@{revision}", context=context, owner_required=not bare)


def without_revision(reference: str) -> HubReference:
    """Parse a reference to a whole repository.

    Raises:
        ArgumentError: it names a revision.
    """
    hub_ref = parse_reference(reference)
    if hub_ref.revision:
        raise ArgumentError(f"{reference!r}: a new repository has no revisions; omit '@{hub_ref.revision}'")
    return hub_ref


def folder_of(reference: str) -> Path:
    """Return the folder of a `file://...` reference.

    Raises:
        ComponentNotFound: it does not have this form.
        ArgumentError: the path is relative, or a revision or component is named.
    """
    hub_ref = parse_reference(reference)
    if hub_ref.revision:
        raise ArgumentError(f"{reference!r}: a folder has no revisions; omit '@{hub_ref.revision}'")
    return absolute(hub_ref.repo, reference)


def absolute(path: str, reference: str) -> Path:
    """Return a path with `~` expanded; raise `ArgumentError` if it is relative."""
    folder = Path(path).expanduser()
    if not folder.is_absolute():
        raise ArgumentError(f"{reference!r}: the path of a file:// reference must be absolute: file:///path/to/folder")
    return folder
