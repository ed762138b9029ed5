"""What do the tests of models share? When vectors are the same."""

from __future__ import annotations

import numpy as np

from memvault.embedding.base import Matrix


def assert_same(vectors: Matrix, expected: Matrix) -> None:
    """At unit norm, and equal as far as batches of other shapes leave float32 so."""
    assert vectors.dtype == np.float32
    assert vectors.shape == expected.shape
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float64), axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
