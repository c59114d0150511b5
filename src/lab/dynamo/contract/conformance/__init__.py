"""The contract's own judge: run it against your engine, with any test runner or none.

    from dynamo.contract.conformance import run_conformance

    async def test_my_engine_keeps_the_contract():
        await run_conformance(lambda: MyEngine(...))

A failure is a `ConformanceFailure` whose `.name` is the broken promise. From the shell: `dynamo conformance
my_package.engine:MyEngine`.
"""

from dynamo.contract.conformance.contexts import cancelling_context, mock_context
from dynamo.contract.conformance.failures import FAILURE_NAMES, ConformanceFailure
from dynamo.contract.conformance.kit import (
    EngineFactory,
    run_conformance,
    run_encode_conformance,
    run_raw_conformance,
)

__all__ = [
    "FAILURE_NAMES",
    "ConformanceFailure",
    "EngineFactory",
    "cancelling_context",
    "mock_context",
    "run_conformance",
    "run_encode_conformance",
    "run_raw_conformance",
]
