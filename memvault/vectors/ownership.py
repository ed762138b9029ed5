"""Which process owns an embedded index's directory?"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from memvault.errors import ConfigurationError, IndexOwnershipError, VectorIndexError


class DirectoryOwnership:
    """A lock beside the directory, so that it outlives the directory being dropped; it falls with its process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = FileLock(f"{directory}.lock", thread_local=False)  # what one thread took, another may release
        self._owner = Path(f"{directory}.owner")  # a file of its own: taking the lock truncates the lock's

    @property
    def is_held(self) -> bool:
        return self._lock.is_locked

    def acquire(self) -> None:
        """Become the owner, or be it already. Raises IndexOwnershipError at once where another process is."""
        if not self._directory.parent.is_dir():
            raise ConfigurationError(
                f"the vector index cannot lie in {self._directory}: there is no folder {self._directory.parent}"
            )
        if self._lock.is_locked:
            return
        try:
            self._lock.acquire(blocking=False)
            self._owner.write_text(f"{os.getpid()}\n", encoding="ascii")
        except Timeout as exc:
            pid = self._owner_pid()
            raise IndexOwnershipError(
                f"the vector index in {self._directory} is owned by {f'process {pid}' if pid else 'another process'}; "
                "one process may have it open at a time",
                owner_pid=pid,
            ) from exc
        except OSError as exc:
            self._lock.release(force=True)
            raise VectorIndexError(f"the vector index in {self._directory} cannot be locked: {exc}") from exc

    def release(self) -> None:
        """Let another process be the owner. No-op for who is not."""
        if self._lock.is_locked:
            self._owner.unlink(missing_ok=True)  # first: afterwards it may be the next owner's
            self._lock.release(force=True)

    def _owner_pid(self) -> int | None:
        try:
            return int(self._owner.read_text(encoding="ascii"))
        except (OSError, ValueError):  # it is just being taken, or given back
            return None
