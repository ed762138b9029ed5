"""What do ids look like, and are derived ones stable?"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memvault.ids import derived_chunk_id, new_chunk_id, new_job_id, new_preference_id, new_session_id
from memvault.text import check_identifier

MAKERS = [
    pytest.param(new_chunk_id, r"mem_[0-9a-f]{12}", id="chunk"),
    pytest.param(new_session_id, r"sess_[0-9a-f]{8}", id="session"),
    pytest.param(new_job_id, r"job_[0-9a-f]{8}", id="job"),
    pytest.param(new_preference_id, r"proc_[0-9a-f]{12}", id="preference"),
]

PARTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4)


@pytest.mark.parametrize(("new_id", "pattern"), MAKERS)
def test_format(new_id: Callable[[], str], pattern: str) -> None:
    for _ in range(100):
        made = new_id()
        assert re.fullmatch(pattern, made)
        assert check_identifier(made, "id") == made


@pytest.mark.parametrize(("new_id", "pattern"), MAKERS)
def test_new_ids_differ(new_id: Callable[[], str], pattern: str) -> None:
    # Of 100 draws of 32 bits, two are equal once in 870,000 times: tolerate one pair.
    assert len({new_id() for _ in range(100)}) >= 99


class TestDerived:
    def test_stable_across_releases(self) -> None:
        # SHA-256 over each part's length in eight bytes, and the part: an import made by an older release is known.
        assert derived_chunk_id("user_alice", "content") == "mem_661228d7273b"
        assert derived_chunk_id("ü", "🙂", "") == "mem_b7ad8855e04d"
        assert derived_chunk_id() == "mem_e3b0c44298fc"  # SHA-256 of nothing

    def test_boundaries_count(self) -> None:
        made = [
            derived_chunk_id(*parts)
            for parts in [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("c", "ab"), ("a", "b", "c")]
        ]
        assert len(set(made)) == len(made)

    def test_lengths_are_those_of_the_bytes(self) -> None:
        assert derived_chunk_id("é") != derived_chunk_id("e\u0301")
        assert derived_chunk_id("é", "x") != derived_chunk_id("éx")

    def test_a_part_cannot_imitate_a_length(self) -> None:
        prefix = (1).to_bytes(8, "big").decode()
        assert derived_chunk_id("a", "b") != derived_chunk_id(f"a{prefix}b")

    @given(PARTS, PARTS)
    @settings(deadline=None)
    def test_equal_parts_and_only_they_give_equal_ids(self, one: list[str], other: list[str]) -> None:
        assert re.fullmatch(r"mem_[0-9a-f]{12}", derived_chunk_id(*one))
        assert (derived_chunk_id(*one) == derived_chunk_id(*other)) == (one == other)
