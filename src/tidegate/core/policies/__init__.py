"""Every policy, by name. A new one is a small file here and a line in core/presets.py."""
