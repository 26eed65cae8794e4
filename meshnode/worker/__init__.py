"""The worker process around the engine, and the conversation with it. See protocol/05-worker.md."""

from ..wire.worker_messages import Loaded, Sampled, Sampling, Stepped
from .conversation import LoadSpec, Worker, open_worker

__all__ = ["LoadSpec", "Loaded", "Sampled", "Sampling", "Stepped", "Worker", "open_worker"]
