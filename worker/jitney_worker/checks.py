"""What `jitney doctor` looks at on a machine that is to run workers: settings, model files, device."""

from __future__ import annotations

from jitney.checks import Finding
from jitney.errors import JitneyError
from jitney_worker.model.choice import served_config
from jitney_worker.model.native.build import NativeUnavailable
from jitney_worker.model.native.library import kernels
from jitney_worker.model.resolve import resolve
from jitney_worker.model.runner import pick_device, pick_dtype
from jitney_worker.model.weights import weight_files
from jitney_worker.settings import WorkerSettings, load_settings
from jitney_worker.text.tokenizer import Tokenizer


def checks() -> list[Finding]:
    """The checks of a worker with the settings of this environment. Loads no weights and fetches nothing."""
    try:
        settings = load_settings()
    except JitneyError as error:
        return [Finding("worker", "fail", f"its settings are wrong: {error}", "correct that one")]
    return [check_model(settings), check_device(settings), check_kernels(settings)]


def check_model(settings: WorkerSettings) -> Finding:
    """Are all of its files there, and of a kind that is served?"""
    try:
        directory = resolve(settings.model, offline=True)
    except JitneyError as error:
        # No failure: this machine may run no worker, and one that starts fetches a registered model itself.
        return Finding("model", "warn", str(error))
    try:
        config = served_config(directory)
        Tokenizer.load(directory)
        num_bytes = sum(file.stat().st_size for file in weight_files(directory))
    except (JitneyError, OSError) as error:
        return Finding("model", "fail", str(error), "fetch it again, or name another one with JITNEY_MODEL")
    size = f"{num_bytes / 1e6:,.1f} MB of weights, a context of {config.max_model_len} tokens"
    return Finding("model", "ok", f"{settings.model_name} in {directory}: {size}")


def check_device(settings: WorkerSettings) -> Finding:
    """Can torch compute on the device, in the dtype?"""
    try:
        device = pick_device(settings.device)
        dtype = pick_dtype(settings.dtype, device)
    except JitneyError as error:
        return Finding("device", "fail", str(error), "correct JITNEY_DEVICE or JITNEY_DTYPE")
    return Finding("device", "ok", f"{device}, computing in {str(dtype).removeprefix('torch.')}")


def check_kernels(settings: WorkerSettings) -> Finding:
    """Are the kernels compiled for this CPU, or can they be? Compiles them if they are not."""
    if settings.kernels == "torch":
        return Finding("kernels", "ok", "plain torch, as JITNEY_KERNELS says")
    try:
        found = kernels()
    except NativeUnavailable as error:
        is_fatal = settings.kernels == "native"
        return Finding("kernels", "fail" if is_fatal else "warn", f"plain torch computes, many times slower: {error}")
    return Finding("kernels", "ok", f"compiled for {found.level}, in {found.path.parent}")
