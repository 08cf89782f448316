"""Finds the file system of a path; SQLite's locks and its shared memory work on local ones only."""

import re
from pathlib import Path

from app.errors import NetworkFileSystem

NETWORK_FILE_SYSTEMS = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fuse.beegfs", "fuse.ceph", "fuse.ceph-fuse",
    "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs", "gfs2",
    "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb3",
    "smbfs", "vboxsf", "wekafs",
})  # fmt: skip

MOUNT_TABLE = Path("/proc/self/mounts")


def file_system_type(path: Path, mount_table: Path = MOUNT_TABLE) -> str | None:
    """Return the type of the file system of `path`, by the mount with the longest prefix of the resolved path, of
    several on one point the last, which hides the others; None where there is no mount table (not Linux)."""
    try:
        lines = mount_table.read_text(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return None
    resolved = path.resolve()
    best: tuple[int, str] | None = None
    for line in lines:
        _device, point, kind, *_ = line.split(" ")
        # The kernel writes blanks, tabs, newlines and backslashes as three octal digits.
        mount = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point))
        if resolved.is_relative_to(mount) and (best is None or len(mount.parts) >= best[0]):
            best = (len(mount.parts), kind)
    return best[1] if best else None


def refuse_network_file_system(path: Path, mount_table: Path = MOUNT_TABLE) -> None:
    """Raise NetworkFileSystem if `path` is on one."""
    kind = file_system_type(path, mount_table)
    if kind in NETWORK_FILE_SYSTEMS:
        raise NetworkFileSystem(
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold: "
            "set FLOPWATCH_DATA_DIR to a folder on a local disk."
        )
