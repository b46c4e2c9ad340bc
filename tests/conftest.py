"""For every test: examples are judged by what they do, never by how long a shared machine took over them.

Where CI judges a commit the examples are the same every time; elsewhere they are new ones at every run.
"""

import os

from hypothesis import settings

settings.register_profile("tidegate", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("tidegate")
