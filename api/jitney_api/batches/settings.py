"""Settings of batches, for the API and for whoever assembles them: both must name the same files."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from jitney.errors import SettingsError
from jitney.sampling import explain
from jitney.settings import client_settings
from jitney_api.batches.records import MAX_FILE_BYTES, MAX_LINES

DAY_S = 86_400
WINDOW = 256
"""Enough to fill some workers; few enough that whoever enqueues for people finds no queue full of bulk work."""


class BatchSettings(BaseSettings):
    """How large, how long and where. Environment: `JITNEY_BATCH__<NAME>`.

    files: a directory, or a URL that fsspec knows (`s3://bucket/jitney`); absent: `files` in `JITNEY_DATA_DIR`. The
    API and every worker of batches must reach the same one. max_file_bytes, max_lines: of an input file.
    upload_timeout_s: an upload must have arrived within it. window: jobs of a batch that are on their way at once.
    keep_s: how long files and the records of ended batches are kept where nobody asked for another time.
    """

    model_config = SettingsConfigDict(
        env_prefix="JITNEY_BATCH__",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
    )

    files: str | None = None
    max_file_bytes: int = Field(MAX_FILE_BYTES, ge=1, le=MAX_FILE_BYTES)
    max_lines: int = Field(MAX_LINES, ge=1, le=MAX_LINES)
    upload_timeout_s: float = Field(600.0, gt=0.0, le=86_400.0)
    window: int = Field(WINDOW, ge=1, le=10_000)
    keep_s: int = Field(30 * DAY_S, ge=3_600, le=3_650 * DAY_S)

    @property
    def place(self) -> str:
        """Where the files lie: a directory or a URL. Raises SettingsError."""
        return self.files or str(client_settings().data_dir / "files")

    @classmethod
    def load(cls, **given: Any) -> BatchSettings:
        """Settings from the environment, `given` ones first. Raises SettingsError."""
        try:
            return cls(**given)
        except ValidationError as error:
            raise SettingsError(str(explain(error, prefix="batch."))) from None
