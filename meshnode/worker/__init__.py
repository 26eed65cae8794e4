"""The worker process around the engine, and the conversation with it. See protocol/05-worker.md."""

from ..wire.worker_messages import Loaded, Sampled, Sampling, Stepped
from .conversation import LoadSpec, Worker, open_worker
from .process import WorkerCrashed
from .template import ChatTemplate, open_template

__all__ = [
    "ChatTemplate", "LoadSpec", "Loaded", "Sampled", "Sampling", "Stepped", "Worker", "WorkerCrashed", "open_template",
    "open_worker",
]  # fmt: skip
