"""What a job asks for: who is told of its end, and of which endings."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

JobEnding = Literal["finished", "failed", "cancelled", "expired"]
JOB_ENDINGS: Final[tuple[JobEnding, ...]] = ("finished", "failed", "cancelled", "expired")

MAX_URL_CHARS: Final = 2_048


class Webhook(BaseModel):
    """`webhook` of a job.

    url: absent: the deployment's own endpoint, if it has one. events: types of the job's terminal event; all unless
    some are named. Whether the address may be called at all is `Endpoint.parse`'s to say, at the door and before
    every attempt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = Field(None, min_length=1, max_length=MAX_URL_CHARS)
    events: tuple[JobEnding, ...] = Field(JOB_ENDINGS, min_length=1, max_length=len(JOB_ENDINGS))

    def hook(self, object: Literal["job", "response"]) -> str:
        """As it stands in the job's record, for the script that ends the job. object: what the asker calls the job.

        '' for a url that no door has let in.
        """
        if self.url is None or any(map(str.isspace, self.url)):
            return ""
        return f"{','.join(self.events)} {object} {self.url}"
