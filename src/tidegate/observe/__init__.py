"""Folds what the engine tells into metrics, records and reports. Observers never answer back."""
