"""Settings of the whole test suite: property tests draw the same examples on every machine and run."""

from hypothesis import settings

# No deadline: a slow machine is not a bug. Derandomised: a failure here is a failure everywhere.
settings.register_profile("fastrl", deadline=None, derandomize=True)
settings.load_profile("fastrl")
