"""The heap: by time, then by order of making; nothing in the past; an end that an event can set."""

from itertools import pairwise
from random import Random

import pytest

from autoscaling.simulator.events import LOOK_EVENTS, EventQueue


def test_events_run_by_time_and_those_of_one_time_as_they_were_made() -> None:
    queue, rng, seen = EventQueue(), Random(1), []
    for i in range(500):
        queue.at(rng.randrange(50), lambda at, n: seen.append((at, n)), i)
    queue.run()
    assert seen == sorted(seen)
    assert (len(seen), queue.events, len(queue)) == (500, 500, 0)
    assert all(a <= b for a, b in pairwise(seen))


def test_an_event_may_make_others_at_its_own_time_but_not_before() -> None:
    queue, seen = EventQueue(), []

    def first(now_ns: int, _: object) -> None:
        queue.at(now_ns, lambda at, name: seen.append((at, name)), "same")
        with pytest.raises(ValueError, match="an event for 9 ns was made at 10 ns"):
            queue.at(9, first)

    queue.at(10, first)
    queue.run()
    assert seen == [(10, "same")]


def test_an_event_ends_the_run_and_the_rest_stays() -> None:
    queue = EventQueue()
    queue.at(5, lambda *_: setattr(queue, "over", True))
    queue.at(6, lambda *_: pytest.fail("it was over"))
    queue.run()
    assert (queue.now_ns, len(queue)) == (5, 1)


def test_the_outside_is_asked_now_and_then_and_may_stop_an_endless_run() -> None:
    queue = EventQueue()

    def again(now_ns: int, _: object) -> None:
        queue.at(now_ns + 1, again)

    queue.at(0, again)
    queue.run(look=lambda: queue.events >= 3 * LOOK_EVENTS)
    assert queue.events == 3 * LOOK_EVENTS
