"""Which users' vectors are in memory, and are they still those of SQL?

What is kept of a user is valid for one state of their owner's row, which each search reads before anything else. A new
vector costs the rows that came since, a removal one reading of the keys that are left; nothing is ever taken for valid
because of its age.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memvault import forking
from memvault.database.unit import Unit
from memvault.embedding.base import Matrix
from memvault.vectors.canonical import OwnerState, StoredVectors, key_range, stored_keys, stored_vectors

ID_BYTES = 80
"""What an id takes in memory: a str of 16 characters, and the list's reference to it."""


class _Buffers:
    """Room for a user's vectors that grows by doubling: who holds an older part of it is not disturbed."""

    def __init__(self, dimension: int, capacity: int) -> None:
        self.matrix: Matrix = np.empty((capacity, dimension), np.float32)
        self.keys: NDArray[np.int64] = np.empty(capacity, np.int64)
        self.ids: list[str] = []

    @classmethod
    def of(cls, stored: StoredVectors, dimension: int) -> _Buffers:
        """Full, of what was read: at a user's first search each copy of a thousand vectors costs half a millisecond."""
        buffers = cls(dimension, 0)
        buffers.matrix = np.frombuffer(bytearray().join(stored.blobs), "<f4").reshape(len(stored.blobs), dimension)
        buffers.keys = np.array(stored.keys, np.int64)
        buffers.ids = stored.ids
        return buffers

    def append(self, stored: StoredVectors) -> None:
        used, count = len(self.ids), len(stored.ids)
        self.matrix[used : used + count] = stored.matrix(self.matrix.shape[1])
        self.keys[used : used + count] = stored.keys
        self.ids.extend(stored.ids)


@dataclass(frozen=True)
class UserVectors:
    """A user's vectors in one state, in the order they were stored. ``ids`` may be longer than ``count``."""

    state: OwnerState
    model: str
    count: int
    buffers: _Buffers

    @property
    def ids(self) -> list[str]:
        return self.buffers.ids

    @property
    def matrix(self) -> Matrix:
        """(count, dimension)"""
        return self.buffers.matrix[: self.count]

    @property
    def keys(self) -> NDArray[np.int64]:
        return self.buffers.keys[: self.count]

    @property
    def nbytes(self) -> int:
        return self.buffers.matrix.nbytes + self.buffers.keys.nbytes + ID_BYTES * len(self.buffers.ids)


class VectorCache:
    """The vectors of the users who searched last, in so many bytes. Any number of threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[UserVectors, int]] = OrderedDict()
        """With the bytes that each was counted with: what is shared with a newer state has grown since."""
        self._bytes = 0
        self._lock = threading.Lock()
        forking.follow(self)

    def peek(self, user_id: str, model: str, dimension: int) -> UserVectors | None:
        """What is kept of a user, of whichever state."""
        with self._lock:
            kept, _ = self._kept.get(user_id, (None, 0))
            if kept is None or kept.model != model or kept.matrix.shape[1] != dimension:
                return None
            self._kept.move_to_end(user_id)
            return kept

    def get(self, unit: Unit, state: OwnerState, model: str, dimension: int) -> UserVectors:
        """The user's vectors as this transaction sees them; ``state`` is the first thing that it has read."""
        with self._lock:
            kept, _ = self._kept.get(unit.user_id, (None, 0))
            if kept is not None:
                self._kept.move_to_end(unit.user_id)
        if kept is not None and (kept.model, kept.state.incarnation) != (model, state.incarnation):
            kept = None
        if kept is not None and kept.state.epoch == state.epoch:
            return kept  # a write of this very transaction would have raised the epoch above every committed one
        vectors = None
        if kept is not None and kept.state.epoch < state.epoch:
            vectors = self._advanced(unit, kept, state)
        if vectors is None:
            stored = stored_vectors(unit, state, model)
            buffers = _Buffers.of(stored, dimension)
            vectors = UserVectors(state, model, len(stored.ids), buffers)
        if unit.is_snapshot and vectors.count == state.vector_count:
            self._keep(unit.user_id, vectors)
        return vectors

    def _advanced(self, unit: Unit, kept: UserVectors, state: OwnerState) -> UserVectors | None:
        """What was kept, with what came and without what went since; None where that does not add up."""
        first, _ = key_range(state)
        fresh = stored_vectors(unit, state, kept.model, after=first + kept.state.epoch)
        stays = np.ones(kept.count, bool)
        if state.removed_epoch > kept.state.epoch:
            stays = np.isin(kept.keys, np.array(stored_keys(unit, state, kept.model), np.int64), assume_unique=True)
        count = int(stays.sum()) + len(fresh.ids)
        if count != state.vector_count:
            return None
        buffers = kept.buffers
        with self._lock:
            # In place only where nothing was appended since, by a newer state or by one that was never committed.
            shared = unit.is_snapshot and stays.all() and len(buffers.ids) == kept.count
            if shared and count <= buffers.matrix.shape[0]:
                buffers.append(fresh)
                return UserVectors(state, kept.model, count, buffers)
        grown = _Buffers(buffers.matrix.shape[1], count + count // 2 if fresh.ids else count)
        grown.matrix[: stays.sum()] = kept.matrix[stays]
        grown.keys[: stays.sum()] = kept.keys[stays]
        grown.ids.extend(kept.ids[place] for place in np.flatnonzero(stays).tolist())
        grown.append(fresh)
        return UserVectors(state, kept.model, count, grown)

    def _keep(self, user_id: str, vectors: UserVectors) -> None:
        with self._lock:
            if user_id in self._kept:
                before, counted = self._kept[user_id]
                if before.state.incarnation == vectors.state.incarnation and before.state.epoch > vectors.state.epoch:
                    return
                self._bytes -= counted
                del self._kept[user_id]
            size = vectors.nbytes
            if size > self._max_bytes:
                return
            self._kept[user_id] = vectors, size
            self._bytes += size
            while self._bytes > self._max_bytes:
                _, (_, freed) = self._kept.popitem(last=False)
                self._bytes -= freed

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return self._bytes

    def before_fork(self) -> None:
        """Nothing is half-done: the child has the whole of it, as it is."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
