"""The errors of the client.

A program that fails is no error: its result says so. An error means that bullpen did not run the program, or that the
outcome is unknown.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = [
    "APIError", "AuthenticationError", "BadRequestError", "BullpenError", "ConflictError", "ContextLostError",
    "GuestError", "IdempotencyMismatchError", "LostError", "NotFoundError", "PermissionDeniedError", "RateLimitError",
    "ServerError", "UnknownOutcomeError", "UnreachableError", "WebhookVerificationError",
]


class BullpenError(Exception):
    """The base of all errors of the client."""


class APIError(BullpenError):
    """An answer with an error status."""

    status: int
    """The HTTP status."""
    code: str
    """The API's code, such as validation_error. Empty if something other than bullpen answered."""
    message: str
    """What is wrong, and what to do about it."""
    reason: str | None
    """A closer reason that some codes have, such as plan_limit."""
    trace_id: str | None
    """The execution, if the request is about one."""
    request_id: str | None
    """The request, as the server's log has it."""
    retry_after: float | None
    """Seconds after which the server wants to be asked again."""
    body: bytes
    """The answer as it came."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.body = body
        self.trace_id = headers.get("x-trace-id")
        self.request_id = headers.get("x-request-id")
        after = headers.get("retry-after", "")
        self.retry_after = float(after) if after.isdecimal() else None
        self.code, self.message, self.reason = _envelope(body)
        ids = [x for x in (self.code, self.trace_id, self.request_id) if x]
        super().__init__(f"{self.message} ({', '.join([f'HTTP {status}', *ids])})")

    @property
    def temporary(self) -> bool:
        """Whether the same request may succeed later. A 429 without a time is a limit that waiting does not change."""
        return self.status == 503 or (self.status == 429 and bool(self.retry_after))


class BadRequestError(APIError):
    """The request is not valid; the message names the field."""


class AuthenticationError(APIError):
    """The API key is missing or not valid."""


class PermissionDeniedError(APIError):
    """The API key may not do this."""


class NotFoundError(APIError):
    """The API key's organisation has nothing with this id."""


class ConflictError(APIError):
    """Something else holds or has changed what the request needs, such as a thread that another execution uses."""


class ContextLostError(APIError):
    """The memory of a context is gone. Restart the context."""


class IdempotencyMismatchError(APIError):
    """The idempotency key was used with another request."""


class RateLimitError(APIError):
    """A limit is reached. It ends by waiting if retry_after is set."""


class ServerError(APIError):
    """A failure of the server, or nothing can run the program now."""


class UnreachableError(BullpenError):
    """The server cannot be reached. It has carried out nothing."""


class UnknownOutcomeError(BullpenError):
    """The connection broke before the answer, and repeating the request could carry it out twice.

    The server may have carried it out.
    """


class LostError(BullpenError):
    """The server became unreachable while an execution was followed. The execution may continue: see follow."""

    def __init__(self, trace_id: str, after_seq: int, cause: object) -> None:
        self.trace_id = trace_id
        self.after_seq = after_seq
        super().__init__(f"lost the server while following {trace_id} after event {after_seq}: {cause}")


class GuestError(BullpenError):
    """An error of the program inside a live sandbox that starts commands and serves files."""

    code: str
    """The code of the Connect protocol, such as not_found."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(f"{message} ({code})")


class WebhookVerificationError(BullpenError):
    """The signature of a webhook is not valid, or the webhook is too old."""


_CLASSES: dict[str, type[APIError]] = {
    "validation_error": BadRequestError,
    "length_required": BadRequestError,
    "payload_too_large": BadRequestError,
    "unsupported_media_type": BadRequestError,
    "method_not_allowed": BadRequestError,
    "range_not_satisfiable": BadRequestError,
    "unauthorized": AuthenticationError,
    "forbidden": PermissionDeniedError,
    "not_found": NotFoundError,
    "conflict": ConflictError,
    "precondition_failed": ConflictError,
    "context_lost": ContextLostError,
    "idempotency_mismatch": IdempotencyMismatchError,
    "rate_limited": RateLimitError,
}


# For codes that are not listed, such as those of agent sessions.
_CLASSES_BY_STATUS: dict[int, type[APIError]] = {
    400: BadRequestError, 401: AuthenticationError, 403: PermissionDeniedError, 404: NotFoundError, 409: ConflictError,
    429: RateLimitError,
}


def api_error(status: int, headers: dict[str, str], body: bytes) -> APIError:
    """Returns the error of an answer."""
    fallback = ServerError if status >= 500 else _CLASSES_BY_STATUS.get(status, APIError)
    return _CLASSES.get(_envelope(body)[0], fallback)(status, headers, body)


_AGENT_ERRORS = "urn:sandbox-agent:error:"


def _envelope(body: bytes) -> tuple[str, str, str | None]:
    try:
        envelope: Any = json.loads(body)
    except ValueError:
        envelope = None
    if isinstance(envelope, dict):
        if isinstance(envelope.get("error"), str):
            return envelope["error"], str(envelope.get("message", "")), envelope.get("reason")
        kind = envelope.get("type")
        if isinstance(kind, str) and kind.startswith(_AGENT_ERRORS):
            return kind.removeprefix(_AGENT_ERRORS), str(envelope.get("detail", "")), None
    return "", "the answer is not one of bullpen's: check the URL, and the proxies on the way", None
