"""jitney: durable, Redis-native LLM generation by continuous batching."""

from importlib.metadata import version

from jitney.async_client import AsyncClient, AsyncJob
from jitney.client import Client, Job
from jitney.errors import (
    BadRecord,
    IdempotencyConflict,
    InvalidJob,
    JitneyError,
    JobCancelled,
    JobEnded,
    JobExpired,
    JobFailed,
    JobNotFound,
    KeyRefused,
    LeaseLost,
    ModelError,
    NotDurable,
    Overloaded,
    PromptTooLong,
    QueueUnavailable,
    ScopeMissing,
    ServerError,
    SettingsError,
    StreamLost,
    UnknownQueue,
)
from jitney.messages import Event, JobSpec
from jitney.result import Choice, Result
from jitney.sampling import SamplingParams
from jitney.tool_calls import ToolCall

__version__ = version("jitney")

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "BadRecord",
    "Choice",
    "Client",
    "Event",
    "IdempotencyConflict",
    "InvalidJob",
    "JitneyError",
    "Job",
    "JobCancelled",
    "JobEnded",
    "JobExpired",
    "JobFailed",
    "JobNotFound",
    "JobSpec",
    "KeyRefused",
    "LeaseLost",
    "ModelError",
    "NotDurable",
    "Overloaded",
    "PromptTooLong",
    "QueueUnavailable",
    "Result",
    "SamplingParams",
    "ScopeMissing",
    "ServerError",
    "SettingsError",
    "StreamLost",
    "ToolCall",
    "UnknownQueue",
    "__version__",
]
