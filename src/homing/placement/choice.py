"""At which worker a new session begins, as a plain function of what the workers say of themselves.

The invariant of `balanced`: whatever the load, no worker is given a session that puts it more than the slack above the mean.
Load tips the scales inside the slack, and never beyond it.

Not here: reading the figures (`board.py`), and acting on the choice (`homing.routing`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

Place = Literal["balanced", "fewest", "accepting", "random"]
"""Where a declared start runs: `balanced` where it arrived unless that worker has more than its share, `fewest` at the worker
with the fewest sessions, `accepting` always where it arrived, `random` anywhere."""

POLICIES: Final[tuple[Place, ...]] = get_args(Place)

SLACK_SHARE: Final = 0.05
SLACK_SESSIONS: Final = 2.0
"""How far above the mean a worker may be: 5 % of it, and at least two sessions."""

LAG_SECONDS: Final = 0.1
"""An event loop that is later than the others' by so much has all the pressure there is."""

CALM_REQUESTS: Final = 4
"""So few requests in flight say nothing about a worker."""

TIE: Final = 0.5
"""Workers that are nearer to each other than that are alike, and chance decides: several who choose at once must not all
choose the same one."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker, as one who looks for a place sees it.

    Attributes:
        slot: Which it is.
        sessions: Its live sessions, with the starts that are on their way there.
        in_flight: Requests whose handler is running.
        lag_seconds: By how much its event loop is late.
        takes: It takes new sessions: it serves, does not drain, is not stuck, and is below its limit.
    """

    slot: int
    sessions: int
    in_flight: int = 0
    lag_seconds: float = 0.0
    takes: bool = True


def slack(mean: float) -> float:
    """How many sessions above the mean a worker may have."""
    return max(SLACK_SHARE * mean, SLACK_SESSIONS)


def choose(place: Place, here: Standing, others: Sequence[Standing], chance: random.Random) -> int | None:
    """The slot of the worker where a start that arrived `here` is to run; None: here.

    Args:
        others: The other workers of this server, in any order.
        chance: Decides between workers that are alike.
    """
    takers = [each for each in others if each.takes]
    if place == "accepting" or not takers:
        return None
    candidates = [*takers, here] if here.takes else takers
    if place == "random":
        chosen = chance.choice(candidates)
        return None if chosen is here else chosen.slot
    if place == "fewest":
        costs = [float(each.sessions) for each in candidates]
    else:
        mean = (sum(each.sessions for each in candidates) + 1) / len(candidates)
        above = slack(mean)
        costs = [each.sessions + above * pressure(each, candidates) for each in candidates]
        fewest = min(each.sessions for each in candidates)
        if here.takes and costs[-1] + 1 <= mean + above and fewest >= mean - above:
            return None
    least = min(costs)
    alike = [each for each, cost in zip(candidates, costs, strict=True) if cost <= least + TIE]
    # Where it arrived costs no hop, so it wins a tie.
    if here.takes and here in alike:
        return None
    return chance.choice(alike).slot


def pressure(standing: Standing, all_of_them: Sequence[Standing]) -> float:
    """How much more loaded a worker is than the mean of them, from 0 to 1: by requests in flight, or by its event loop's lag."""
    count = len(all_of_them)
    in_flight = sum(each.in_flight for each in all_of_them) / count
    lag = sum(each.lag_seconds for each in all_of_them) / count
    more = max(
        (standing.in_flight - in_flight) / (in_flight + CALM_REQUESTS),
        (standing.lag_seconds - lag) / LAG_SECONDS,
    )
    return min(max(more, 0.0), 1.0)
