"""Are the methods that an adapter overrides still those that it was written for?"""

import inspect
from collections.abc import Mapping


def differing_signatures(host: type, expected: Mapping[str, str]) -> list[str]:
    """Name each method of a trainer whose leading parameters are not the expected ones.

    Args:
        host: The engine's class.
        expected: Names of methods, and their leading parameters in order, separated by blanks.
    """
    problems = []
    for name, parameters in expected.items():
        method = getattr(host, name, None)
        if method is None:
            problems.append(f"{host.__name__}.{name} does not exist")
            continue
        found = [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
        if "args" in found and "kwargs" in found:  # a subclass that passes everything on
            continue
        wanted = parameters.split()
        if found[: len(wanted)] != wanted:
            problems.append(f"{host.__name__}.{name} takes {found}, expected {wanted} first")
    return problems
