"""What the OpenAI-compatible fronts share, of one engine and of many: errors, who asks, how much they may send."""
