"""The OpenAI-compatible HTTP front of one engine."""
