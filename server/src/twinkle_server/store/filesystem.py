"""Requirements on the file system: working locks, and durable directories."""

import os
from pathlib import Path

from twinkle_server.errors import StoreError

_MOUNTS = Path("/proc/self/mountinfo")
_REMOTE = {
    "nfs",
    "nfs4",
    "cifs",
    "smb",
    "smb2",
    "smb3",
    "smbfs",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "glusterfs",
    "beegfs",
}
_REMOTE |= {"orangefs", "ocfs2", "gfs2", "9p", "ncpfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs"}
_REMOTE |= {"fuse.gcsfuse", "fuse.goofys", "fuse.rclone", "fuse.juicefs"}


def check_local(folder: Path, mounts: Path = _MOUNTS) -> None:
    """Check that a folder is on a local disk, since SQLite's locks are unreliable on network file systems.

    Args:
        folder: an existing folder.
        mounts: the kernel's list of mounts; nothing is checked if it does not exist.

    Raises:
        StoreError: the folder is on a network file system.
    """
    kind = _kind(folder.resolve(), mounts)
    if kind in _REMOTE:
        raise StoreError(
            f"{folder} is on a network file system ({kind}), where SQLite's locks are unreliable; "
            f"choose a --data on a local disk"
        )


def _kind(folder: Path, mounts: Path) -> str | None:
    """Return the file system type of the longest mount point that contains a folder."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    longest: tuple[int, str | None] = (-1, None)
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
        if folder.is_relative_to(point) and len(point) >= longest[0]:
            longest = (len(point), right.split()[0])
    return longest[1]


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
