"""Workloads: where they come from, how they are reshaped, and how they are sent to a real server."""
