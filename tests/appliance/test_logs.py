"""A2: what is logged shows no password, whoever logs it."""

import logging

from appliance.logs import RedactingFormatter

URL = "rtsp://john.doe:p@s/w?o#r:d@10.0.0.5:554/live/key"


def test_addresses_are_cut_in_messages_and_tracebacks():
    try:
        raise ValueError(f"cannot open {URL}")
    except ValueError as error:
        caught = (type(error), error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "camera %s failed", (URL,), caught)
    text = RedactingFormatter("%(levelname)s %(message)s").format(record)

    assert "ERROR camera rtsp://10.0.0.5:554/… failed" in text
    assert "ValueError: cannot open rtsp://10.0.0.5:554/…" in text
    for secret in ("john", "w?o", "key"):
        assert secret not in text
