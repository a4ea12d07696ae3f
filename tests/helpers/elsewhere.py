"""Tests whose bodies run in another process: with a stub driver, or with large libraries."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable

import pytest


def elsewhere(fixture: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a decorator: the test's body runs in the process that a fixture gives."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**arguments):
            process = arguments.pop(fixture)
            module = body.__module__.removeprefix("tests.")
            process.call(module, f"{body.__name__}.run", arguments)

        signature = inspect.signature(body)
        process = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        given = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values()]
        test.__signature__ = signature.replace(parameters=[process, *given])
        test.__name__, test.__doc__ = body.__name__, body.__doc__
        test.run = lambda arguments: body(**arguments)
        return test

    return decorate


def needs(package: str) -> pytest.MarkDecorator:
    """Skip without an optional package, which the test run itself does not import."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"needs {package}, which is in no extra"
    )
