"""The scheduler: pure decisions, no IO, no clock, no randomness, no logging, no engine."""
