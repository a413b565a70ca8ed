from tests.support.hand_clock import HandClock

from homing.runtime.heartbeat import Heartbeat


def test_an_answer_brings_no_new_ping_before_the_interval_is_over() -> None:
    """Else supervisor and worker ping and answer as fast as they can, and use a core between them."""
    clock = HandClock()
    heartbeat = Heartbeat(0.5, clock=clock)
    pings = 0
    for _ in range(1000):  # looks, each brought about by an answer that came at once
        if heartbeat.due():
            heartbeat.sent()
            pings += 1
        heartbeat.heard()
        clock.move(0.001)
    assert pings == 2


def test_a_ping_that_is_under_way_is_not_repeated() -> None:
    clock = HandClock()
    heartbeat = Heartbeat(0.5, clock=clock)
    heartbeat.sent()
    clock.move(10)
    assert not heartbeat.due()
    heartbeat.heard()
    assert heartbeat.due()


def test_a_worker_that_does_not_answer_in_time_has_missed_a_ping() -> None:
    clock = HandClock()
    heartbeat = Heartbeat(0.5, clock=clock)
    assert not heartbeat.missed(30)
    heartbeat.sent()
    clock.move(30)
    assert not heartbeat.missed(30)
    clock.move(0.1)
    assert heartbeat.missed(30)
    heartbeat.heard()
    assert not heartbeat.missed(30)
