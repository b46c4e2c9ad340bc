"""Who computes a step: scripted outputs, a cost model, or a real model."""
