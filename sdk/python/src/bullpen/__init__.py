"""The Python client of bullpen, which runs untrusted code in sandboxes.

    from bullpen import Bullpen

    with Bullpen.from_env() as client:
        print(client.run("print(6 * 7)").stdout)

AsyncBullpen has the same methods for asyncio. A program that fails is no error: its result says so.
"""

from . import types, webhooks
from ._async import AsyncBullpen, AsyncContext, AsyncSandbox
from ._events import AgentEvent, AgentSession, CellEvent, CommandResult, Entry, Event, Result
from ._sync import Bullpen, Context, Sandbox
from ._version import __version__
from .errors import (
    APIError,
    AuthenticationError,
    BadRequestError,
    BullpenError,
    ConflictError,
    ContextLostError,
    GuestError,
    IdempotencyMismatchError,
    LostError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    ServerError,
    UnknownOutcomeError,
    UnreachableError,
    WebhookVerificationError,
)

__all__ = [
    "APIError", "AgentEvent", "AgentSession", "AsyncBullpen", "AsyncContext", "AsyncSandbox", "AuthenticationError",
    "BadRequestError", "Bullpen", "BullpenError", "CellEvent", "CommandResult", "ConflictError", "Context",
    "ContextLostError", "Entry", "Event", "GuestError", "IdempotencyMismatchError", "LostError", "NotFoundError",
    "PermissionDeniedError", "RateLimitError", "Result", "Sandbox", "ServerError", "UnknownOutcomeError",
    "UnreachableError", "WebhookVerificationError", "__version__", "types", "webhooks",
]
