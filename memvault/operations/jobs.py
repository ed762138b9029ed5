"""Which compression jobs wait, run, or have ended?"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Column, Index, Integer, String, Text
from sqlmodel import Field

from memvault.database.base import Base, Owned, UtcDateTime, identifier, non_negative, one_of, table_of
from memvault.database.transactions import Transactions
from memvault.database.unit import Unit
from memvault.errors import StorageError
from memvault.ids import MAX_DRAWS, new_job_id
from memvault.memory.paging import check_paging, keyset_page
from memvault.text import check_identifier
from memvault.values import JOB_STATUSES, Job, Page


class CompressionJob(Base, Owned, table=True):
    """A request to compress a user's sessions. The lease columns say who works on it, and until when."""

    __tablename__ = "compression_jobs"
    __table_args__ = (
        one_of("status", JOB_STATUSES, "status"),
        non_negative("sessions_compressed"),
        non_negative("memories_created"),
        non_negative("attempts"),
        Index("idx_jobs_user", "user_id", "created_at", "id"),
    )

    id: str = Field(sa_column=Column(identifier(), primary_key=True))
    user_id: str = Field(sa_column=Column(identifier(), nullable=False))
    status: str = Field(sa_column=Column(String(16), nullable=False))
    sessions_compressed: int = Field(sa_column=Column(Integer, nullable=False))
    memories_created: int = Field(sa_column=Column(Integer, nullable=False))
    error: str | None = Field(sa_column=Column(Text, nullable=True))
    created_at: datetime = Field(sa_column=Column(UtcDateTime, nullable=False))
    completed_at: datetime | None = Field(sa_column=Column(UtcDateTime, nullable=True))
    lease_token: str | None = Field(sa_column=Column(String(32), nullable=True))
    leased_until: datetime | None = Field(sa_column=Column(UtcDateTime, nullable=True))
    attempts: int = Field(sa_column=Column(Integer, nullable=False, server_default="0"))


JOBS = table_of(CompressionJob)
JOB_COLUMNS = [JOBS.c[name] for name in Job.model_fields]


class JobStore:
    """The compression jobs of one user."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def enqueue(self) -> Job:
        """Ask for a compression of the user's sessions."""

        def work(unit: Unit) -> Job:
            for _ in range(MAX_DRAWS):
                row = {
                    "id": new_job_id(),
                    "status": "queued",
                    "sessions_compressed": 0,
                    "memories_created": 0,
                    "error": None,
                    "created_at": datetime.now(UTC),
                    "completed_at": None,
                }
                if unit.insert_new(JOBS, [row]):
                    return Job.model_validate({**row, "user_id": unit.user_id})
            raise StorageError(f"no free job id in {MAX_DRAWS} draws")

        return self._transactions.write(work)

    def get(self, id: str) -> Job | None:
        """The job, or None where this user has none such."""
        check_identifier(id, "id")

        def work(unit: Unit) -> Job | None:
            statement = unit.select(*JOB_COLUMNS, frm=JOBS, by_key=True).where(JOBS.c.id == id)
            row = unit.execute(statement).one_or_none()
            return None if row is None else _value(row)

        return self._transactions.read(work)

    def list(self, *, order: str = "created", limit: int = 50, after: str | None = None) -> Page[Job]:
        """The jobs, oldest first, or newest first with ``order="-created"``."""
        keys = (JOBS.c.created_at, JOBS.c.id)
        check_paging(keys, order, limit, after)
        return self._transactions.read(
            lambda unit: keyset_page(
                unit, unit.select(*JOB_COLUMNS, frm=JOBS), keys, _value, order=order, limit=limit, after=after
            )
        )


def _value(row: Any) -> Job:
    return Job.model_construct(**row._mapping)
