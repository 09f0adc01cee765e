"""What a job's tools mean for this model: the form of its calls, and what that asks of sampling and text."""

from __future__ import annotations

from typing import Any

from jitney.call_formats import CallTerms
from jitney.forced_calls import forced_structure, refusing_by_name
from jitney.messages import JobSpec
from jitney_worker.text.tokenizer import Tokenizer


def with_calls(spec: JobSpec, tokenizer: Tokenizer) -> tuple[JobSpec, CallTerms | None]:
    """The job as its answers are made, and how they write calls; the job itself and None if it has no tools.

    Forced calls are a structure like any other. A marker that is a special token is shown, for whoever reads the text
    finds the calls by it. Raises InvalidJob.
    """
    use = spec.tool_use
    if use is None:
        return spec, None
    form = tokenizer.call_format(use)
    changed: dict[str, Any] = {}
    if use.is_forced:
        with refusing_by_name("tools"):
            changed["structured_outputs"] = forced_structure(form, use, tokenizer.special_ids)
    if any(token in form.marker + form.opening + form.closing for token in tokenizer.special_ids):
        changed["skip_special_tokens"] = False
    sampling = spec.sampling.model_copy(update=changed)
    return spec.model_copy(update={"sampling": sampling}), CallTerms(form.name, use.max_calls)
