"""Files that are whole or absent: written beside their place, synced, renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`, so that a crash at any moment leaves the old file or the new one, never a part.

    The folder is synced too: a rename that is only in memory is lost with the power. Raises OSError.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    # The umask can only be read by setting it; studies run single-threaded at this point.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
