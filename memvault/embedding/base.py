"""What must an embedder do, and what is a valid vector?"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from memvault.errors import ConfigurationError, EmbeddingError, ValidationError
from memvault.text import shown

Matrix = NDArray[np.float32]
"""Shape (n, dimension)."""

Vector = NDArray[np.float32]
"""Shape (dimension,)."""

BATCH_SIZE = 256
"""Texts that an embedder gets at once, unless its ``batch_size`` says otherwise: few enough that progress is told, and
a deadline for each call means something."""

NO_EMBEDDER = "none"
"""The model's name in a vault whose vectors all come from the caller."""


@runtime_checkable
class Embedder(Protocol):
    """Turns texts into vectors of one dimension, the same text always into the same vector.

    ``model`` names the model and everything that changes its vectors; a vault remembers it and refuses another.
    Both methods take any number of texts, each obeying the text policy, and return float32 of shape
    (len(texts), dimension), finite and of unit norm; they may be called by several threads at once. They raise
    whatever they like: the caller sees an EmbeddingError, and nothing is stored. `embed_queries` differs from
    `embed_documents` only in models that were trained so.

    An embedder may also have ``batch_size``, the texts it wants at once; ``loading_s``, the seconds that its dimension
    may take to be known, where it loads a model for that; and ``cheap = True``: it works in memory, faster than a
    vector is found in the database. It is then called without a deadline, and for every text.
    """

    @property
    def model(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def embed_documents(self, texts: Sequence[str]) -> Matrix: ...

    def embed_queries(self, texts: Sequence[str]) -> Matrix: ...


def is_embedder(value: object) -> bool:
    """Whether an object has all that an `Embedder` has; asks for none of it: ``dimension`` may have to load a model."""
    names = ("model", "dimension", "embed_documents", "embed_queries")
    return not isinstance(value, type) and all(_has(value, name) for name in names)


def _has(value: object, name: str) -> bool:
    try:
        inspect.getattr_static(value, name)
    except AttributeError:
        return False
    return True


def embed_checked(embed: Callable[[Sequence[str]], Matrix], texts: Sequence[str], embedder: Embedder) -> Matrix:
    """Call an embedder and hold its answer against the protocol; rows come back at unit norm.

    Raises EmbeddingError, chained to what the embedder raised, if anything.
    """
    try:
        answer: Any = embed(texts)
    except (ConfigurationError, EmbeddingError):
        raise  # it says what is wrong already
    except Exception as exc:
        # A foreign model may raise anything at all; whatever it was, it is chained.
        reason = f"{type(exc).__name__}: {str(exc)[:200]}"
        raise EmbeddingError(f"the embedder {embedder.model!r} failed: {reason}") from exc
    try:
        matrix = _numbers(answer)
    except (TypeError, ValueError, OverflowError, RuntimeError) as exc:  # the last: of a tensor with gradients
        raise EmbeddingError(f"the embedder {embedder.model!r} answered what is no array of numbers") from exc
    expected = (len(texts), embedder.dimension)
    if matrix.shape != expected:
        raise EmbeddingError(f"the embedder {embedder.model!r} answered shape {matrix.shape}, expected {expected}")
    largest = np.abs(matrix).max(axis=1)
    if not (np.isfinite(largest).all() and (largest > 0).all()):
        raise EmbeddingError(f"the embedder {embedder.model!r} answered a vector that is not finite, or all zero")
    return _unit_rows(matrix / largest[:, None])


def check_vector(value: object, argument: str, dimension: int | None) -> Vector:
    """The caller's vector as float32 of unit norm: only its direction counts, similarity being the cosine.

    ``dimension`` None: any. Raises ValidationError where it is not a flat sequence of finite numbers, not all zero.
    """
    if (quick := _quickly(value, dimension)) is not None:
        return quick
    try:
        vector = _numbers(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
        raise ValidationError(f"{argument} must be a sequence of numbers, got {shown(value)}") from exc
    if vector.ndim != 1 or vector.size == 0:
        raise ValidationError(f"{argument} must be one flat, non-empty sequence, got shape {vector.shape}")
    if dimension is not None and vector.size != dimension:
        raise ValidationError(f"{argument} must have the vault's dimension {dimension}, got {vector.size}")
    if not np.isfinite(vector).all():
        raise ValidationError(f"{argument} must be finite, got {shown(vector.tolist())}")
    largest = np.abs(vector).max()
    if largest == 0:
        raise ValidationError(f"{argument} must not be all zero: it has no direction")
    unit: Vector = _unit_rows((vector / largest)[None])[0]
    return unit


def _quickly(value: object, dimension: int | None) -> Vector | None:
    """The vector, where it is an array about which nothing is odd; whatever is odd is for the careful way."""
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.ndim != 1:
        return None
    if dimension is not None and value.size != dimension:
        return None
    vector = value.astype(np.float64)
    square = float(vector @ vector)
    if not 1e-60 < square < np.inf:  # zero, not finite, or so small that squares lose digits
        return None
    unit: Vector = (vector / math.sqrt(square)).astype(np.float32)
    return unit


def _unit_rows(matrix: NDArray[np.float64]) -> Matrix:
    """The rows at unit norm. Their largest elements are 1, so that no norm overflows or vanishes."""
    unit: Matrix = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)
    return unit


def _numbers(value: object) -> NDArray[np.float64]:
    """An array of real numbers; TypeError where NumPy would read text, truth values or complex numbers as such."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" and array.size:
        raise TypeError(f"an array of {array.dtype}")
    return array.astype(np.float64)
