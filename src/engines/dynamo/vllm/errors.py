"""vLLM's exceptions as errors of the contract.

They are recognised by the names of their classes: those of one release are not in another, and none is worth an import.
"""

from __future__ import annotations

from typing import Final

from dynamo.errors import Disconnected, EngineShutdown, HttpError, InvalidArgument

DEAD: Final = "EngineDeadError"
STATUSES: Final = {  # of its own hierarchy, from 0.28 on
    "VLLMNotFoundError": 404,
    "VLLMUnprocessableEntityError": 422,
}
CLIENT_ERRORS: Final = frozenset({"VLLMClientError", "VLLMValidationError"})  # the second alone up to 0.24


def map_vllm_error(error: Exception) -> Exception | None:
    """Return what to report in place of an exception of vLLM; None for others."""
    names = [cls.__name__ for cls in type(error).__mro__]
    if DEAD in names:
        dead = EngineShutdown("vLLM's engine core is dead")
        dead.__cause__ = Disconnected(str(error))  # routers count the deaths that one request causes
        return dead
    if isinstance(status := getattr(error, "http_status", None), int):  # such as full queues
        return HttpError(int(status), str(error))
    for name in names:
        if name in STATUSES:
            return HttpError(STATUSES[name], str(error))
        if name in CLIENT_ERRORS:
            return InvalidArgument(str(error))
    if isinstance(error, ValueError) and _is_of_vllm(error):
        return InvalidArgument(str(error))
    return None


def _is_of_vllm(error: BaseException) -> bool:
    """Return whether an exception was raised in vLLM's own code (a check of the request), and not in ours."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "vllm"


def configuration_error(error: Exception, *, is_local: bool) -> InvalidArgument | None:
    """Return the refusal of flags or of a model with which vLLM can never start; None for a failure that may pass.

    `error` left vLLM before its processes were started. `is_local`: the model is on this machine, so that an `OSError`
    has nothing to do with a network.
    """
    if not isinstance(error, ValueError | NotImplementedError | (OSError if is_local else ValueError)):
        return None
    return InvalidArgument(f"vLLM cannot serve this: {_sentence(error)}")


def _sentence(error: Exception) -> str:
    """Return the message of an exception in one line: pydantic's validation errors have several, and an address."""
    details = getattr(error, "errors", None)
    if callable(details):
        return "; ".join(str(each["msg"]) for each in details())
    return " ".join(str(error).split())
