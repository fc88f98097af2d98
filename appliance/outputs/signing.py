"""Signatures of webhooks, as in the Standard Webhooks specification (https://www.standardwebhooks.com).

The receiver checks `webhook-signature`: `v1,` and the base64 of HMAC-SHA256 over
`{webhook-id}.{webhook-timestamp}.{body}`. `webhook-id` stays the same when a message comes again.
"""

import base64
import binascii
import hashlib
import hmac

from appliance import __version__


def signing_key(secret: str) -> bytes:
    """The bytes of a secret: `whsec_` and base64, or any other text as it is. Raises `ValueError`."""
    encoded = secret.removeprefix("whsec_")
    if encoded == secret:
        return secret.encode()
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ValueError("secret: what follows whsec_ has to be base64") from None


def signed_headers(key: bytes | None, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of one POST at `timestamp` (unix seconds); without a key they are not signed."""
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"vision-appliance/{__version__}",
        "webhook-id": message_id,
        "webhook-timestamp": f"{timestamp}",
    }
    if key is not None:
        digest = hmac.digest(key, b"%b.%d.%b" % (message_id.encode(), timestamp, body), hashlib.sha256)
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers
