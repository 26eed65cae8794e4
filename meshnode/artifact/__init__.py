"""Artifacts: GGUF models named by their bytes, checked before anything is said about them, mapped to local paths.

Pure and synchronous: no trio, no network, no clock. Callers run these functions in a thread.
"""
