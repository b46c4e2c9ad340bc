"""Observers: they fold the scheduler's events into numbers and never answer back."""
