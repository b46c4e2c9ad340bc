"""Runs unmodified `transformers` decoder models on a paged KV cache.

weights.py    a model's name to files on disk: fetch, verify, convert once
hardware.py   what this process may use: cores, memory, the number format that suits it
model.py      load a decoder, refuse what would not be exact, register the attention
linear.py     fused and prepacked projections
kvcache.py    the paged KV tensor
attention.py  attention over that tensor, called by every layer of the model
kernels.py    the decode kernel for CPUs
slots.py      per-slot columns, kept up by plan deltas, and the packed batch of a step
sampler.py    logits to token ids
grammar.py    JSON schema to token masks
executor.py   `engine.executor.Executor` on top of all that
"""
