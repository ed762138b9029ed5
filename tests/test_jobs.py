"""What do a user's compression jobs promise?"""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from memvault import Job, StorageError, StorageLayer, UserMemory
from memvault.operations import jobs
from tests.support import refused


def test_enqueue(alice: UserMemory) -> None:
    before = datetime.now(UTC)
    job = alice.jobs.enqueue()
    assert re.fullmatch(r"job_[0-9a-f]{8}", job.id)
    assert before <= job.created_at <= datetime.now(UTC)
    assert job.model_dump(exclude={"id", "created_at"}) == {
        "user_id": "user_alice",
        "status": "queued",
        "sessions_compressed": 0,
        "memories_created": 0,
        "error": None,
        "completed_at": None,
    }
    assert alice.jobs.get(job.id) == job
    assert Job.model_validate_json(job.model_dump_json()) == job


def test_jobs_are_one_users(alice: UserMemory, bob: UserMemory) -> None:
    theirs = bob.jobs.enqueue()
    assert alice.jobs.get(theirs.id) is None
    assert alice.jobs.get("absent") is None
    assert alice.jobs.list().items == []
    assert bob.jobs.list().items == [theirs]


@pytest.mark.parametrize("order", ["created", "-created"])
def test_list_by_pages(alice: UserMemory, order: str) -> None:
    queued = [alice.jobs.enqueue() for _ in range(7)]
    first = alice.jobs.list(order=order, limit=4)
    second = alice.jobs.list(order=order, limit=4, after=first.next)
    assert second.next is None
    assert first.items + second.items == (queued if order == "created" else queued[::-1])


def test_a_generated_id_that_is_taken_is_drawn_again(
    exact_storage: StorageLayer, alice: UserMemory, bob: UserMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(["job_a", "job_a", "job_b"])
    monkeypatch.setattr(jobs, "new_job_id", lambda: next(drawn))
    mine, theirs = alice.jobs.enqueue(), bob.jobs.enqueue()
    assert (mine.id, theirs.id) == ("job_a", "job_b")
    assert alice.jobs.get("job_a") == mine
    monkeypatch.setattr(jobs, "new_job_id", lambda: "job_a")
    with refused(exact_storage, StorageError, "job id"):
        alice.jobs.enqueue()
