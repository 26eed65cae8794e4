"""The worker process around the engine, and the conversation with it. See protocol/05-worker.md."""

from ..artifact.files import FileStamp
from ..wire.worker_messages import Loaded, Sampled, Sampling, Stepped
from .conversation import LoadSpec, Worker, open_worker

__all__ = ["FileStamp", "LoadSpec", "Loaded", "Sampled", "Sampling", "Stepped", "Worker", "open_worker"]
