"""What may stand in a request about batches and files."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator

from jitney_api.batches.records import ENDPOINTS
from jitney_api.schemas import Int

MIN_EXPIRY_S: Final = 3_600
MAX_EXPIRY_S: Final = 2_592_000
"""An hour and thirty days. Source: OpenAI's API reference, `expires_after`."""

MAX_PAIRS: Final = 16
MAX_NAME_CHARS: Final = 64
MAX_VALUE_CHARS: Final = 512


def _metadata(value: Any) -> Any:
    """By hand: pydantic would name the caller's own key, however long it is."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if len(value) > MAX_PAIRS:
        raise ValueError(f"must hold at most {MAX_PAIRS} pairs; it holds {len(value)}")
    for name, one in value.items():
        if not isinstance(one, str):
            raise ValueError(f"its values must be strings; that of {name[:MAX_NAME_CHARS]!r} is none")
        if len(name) > MAX_NAME_CHARS or len(one) > MAX_VALUE_CHARS:
            limits = f"names of at most {MAX_NAME_CHARS} characters and values of at most {MAX_VALUE_CHARS}"
            raise ValueError(f"may have {limits}; {name[:MAX_NAME_CHARS]!r} has {len(name)} and {len(one)}")
    return value


Expiry = Annotated[Int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class FileForm(BaseModel):
    """`POST /v1/files`, as multipart/form-data: for the document. What is sent is read by upload.py, as it comes."""

    file: Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary"})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: Expiry | None = Field(None, alias="expires_after[seconds]")


class ExpiresAfter(BaseModel):
    """When a file goes by itself. seconds: from its creation on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anchor: Literal["created_at"]
    seconds: Expiry


class BatchRequest(BaseModel):
    """`POST /v1/batches`."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], BeforeValidator(_metadata)] | None = None
    output_expires_after: ExpiresAfter | None = None
    idempotency_key: str | None = None

    @field_validator("endpoint")
    @classmethod
    def _served(cls, value: str) -> str:
        if value not in ENDPOINTS:
            raise ValueError(f"must be one of {', '.join(ENDPOINTS)}")
        return value
