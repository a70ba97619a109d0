"""Decoupled DiLoCo over DeepSpeed islands: pre-training that never stops."""

__version__ = "0.1.0"
