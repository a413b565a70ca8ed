from tests.support.hand_clock import HandClock

from homing.runtime.heartbeat import Heartbeat, LoopClock


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


def test_a_loop_that_was_stopped_gives_a_worker_the_rest_of_its_time() -> None:
    clock = HandClock()
    loop_clock = LoopClock(0.5, clock=clock)
    heartbeat = Heartbeat(0.5, clock=loop_clock)
    heartbeat.sent()
    clock.move(3600)
    loop_clock.turn()
    for _ in range(3):
        assert not heartbeat.missed(2)
        clock.move(0.5)
        loop_clock.turn()
    assert not heartbeat.missed(2)
    clock.move(0.25)
    loop_clock.turn()
    assert heartbeat.missed(2)


def test_a_loop_that_was_stopped_in_the_middle_of_a_turn_finds_nobody_late_in_it() -> None:
    clock = HandClock()
    loop_clock = LoopClock(0.5, clock=clock)
    heartbeat = Heartbeat(0.5, clock=loop_clock)
    heartbeat.sent()
    loop_clock.turn()
    clock.move(3600)
    assert not heartbeat.missed(1)
