"""How long the first frame of a batch waits for those of other cameras."""

from collections.abc import Sequence

# why: frames cost the detector less together, and a frame that has waited so long still shows what is.
COLLECT_SHARE = 0.5
COLLECT_S = (0.01, 0.1)


def collect_s(rates: Sequence[float], last_batch_s: float) -> float:
    """How long the first frame of a batch waits for those of other cameras.

    Half of the time that the last batch left of the pause between two frames of the fastest camera, within
    bounds, so that the batch is done before that camera's next frame comes.

    Args:
        rates: frames a second of each camera.
        last_batch_s: what the last batch took.
    """
    least_s, most_s = COLLECT_S
    fastest = max(rates, default=0.0)
    left_s = 1 / fastest - last_batch_s if fastest else 0.0
    return max(least_s, min(most_s, COLLECT_SHARE * left_s))
