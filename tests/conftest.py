"""Settings of all tests."""

from hypothesis import settings

# These machines are shared: an example that takes long says nothing about the code.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
