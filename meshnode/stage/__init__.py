"""Serving hops: a holding that offers layers, the leases given on it, and the work each lease stands for."""

from .holding import Holding
from .serve import Stage

__all__ = ["Holding", "Stage"]
