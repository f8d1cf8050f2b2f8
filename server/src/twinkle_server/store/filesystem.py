"""What the store asks of the file system below it: locks that hold, and directories that are durable."""

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
    """Check that a folder is on a disk of this machine, for SQLite's locks do not hold on a network file system.

    Args:
        folder: that exists.
        mounts: the kernel's list of mounts; where there is none, nothing is checked.

    Raises:
        StoreError: it is on a network file system.
    """
    kind = _kind(folder.resolve(), mounts)
    if kind in _REMOTE:
        raise StoreError(
            f"{folder} is on a network file system ({kind}), where SQLite's locks are unreliable; "
            f"choose a --data on a local disk"
        )


def _kind(folder: Path, mounts: Path) -> str | None:
    """Return the type of the file system with the longest mount point above a folder."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    found: tuple[int, str | None] = (-1, None)
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
        if folder.is_relative_to(point) and len(point) >= found[0]:
            found = (len(point), right.split()[0])
    return found[1]


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
