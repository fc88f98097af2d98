"""The model hub, where it can be reached; its libraries would try for half a minute, aloud."""

import logging
from functools import cache
from pathlib import Path

import httpx
from huggingface_hub import constants

log = logging.getLogger(__name__)

REACH_S = 5.0


def is_hub_name(name: str) -> bool:
    """Whether a model is named that may have to be fetched."""
    return not Path(name).expanduser().is_dir()


@cache
def hub_problem() -> str | None:
    """Why nothing can be fetched from the hub, None when something can; looked at once.

    From then on its libraries use what is on this machine, without trying.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=REACH_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        constants.HF_HUB_OFFLINE = True
        problem = f"{constants.ENDPOINT} cannot be reached ({error or type(error).__name__})"
        log.info("%s: only what is on this machine already is used", problem)
        return problem
    return None
