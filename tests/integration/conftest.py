"""Quick and quiet trainers for all tests of this folder."""

import pytest
from small_machine import small_machine


@pytest.fixture(scope="session", autouse=True)
def _small_machine():
    with small_machine():
        yield
