"""Tidegate decides what an LLM server computes next."""

__version__ = "0.1.0"
