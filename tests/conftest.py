"""For every test: examples are judged by what they do, never by how long a shared machine took over them."""

from hypothesis import settings

settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")
