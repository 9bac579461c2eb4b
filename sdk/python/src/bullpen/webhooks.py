"""Verifies webhooks, which are signed as Standard Webhooks 1.0 says."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping
from datetime import datetime

from ._events import Result
from ._model import Model
from .errors import WebhookVerificationError

__all__ = ["WebhookEvent", "verify"]

PREFIX = "whsec_"


class WebhookEvent(Model):
    """What a webhook says. Fields that not every event has are None, or attributes of their own."""

    event: str | None = None
    """Such as execution.completed. Responses of agents have OpenAI's form, with a type instead."""
    timestamp: datetime | None = None
    trace_id: str | None = None
    status: str | None = None
    result: Result | None = None
    metadata: dict[str, str] | None = None


def verify(body: bytes | str, headers: Mapping[str, str], secret: str, *, tolerance: float = 300) -> WebhookEvent:
    """Returns the content of a webhook whose signature is valid. Otherwise it raises WebhookVerificationError.

    body must be the body as received, before any parsing. tolerance is how many seconds the webhook may be old. A webhook
    may arrive twice: headers["webhook-id"] is the same then.
    """
    content = body.encode() if isinstance(body, str) else body
    lower = {name.lower(): value for name, value in headers.items()}
    try:
        identity, sent, signatures = (lower[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
    except KeyError as missing:
        raise WebhookVerificationError(f"the header {missing} is missing") from None
    try:
        age = abs(time.time() - int(sent))
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True) if secret.startswith(PREFIX) else secret.encode()
    except ValueError as malformed:
        raise WebhookVerificationError(f"the timestamp or the secret is malformed: {malformed}") from None
    if age > tolerance:
        raise WebhookVerificationError(f"the webhook was sent at another time than now, by {age:.0f} s")
    signed = b".".join([identity.encode(), sent.encode(), content])
    expected = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    if not any(hmac.compare_digest(expected.encode(), s.encode()) for s in signatures.split()):
        raise WebhookVerificationError("the signature is not valid: check that the secret is the key's present one")
    return WebhookEvent.model_validate_json(content)
