"""Planted bugs of the connection that small exchanges share."""

from __future__ import annotations

from typing import Final

from tests.planted.bug import Bug, Change

_FORWARDING: Final = "src/homing/forwarding"
_SHARED: Final = "tests/integration/forwarding/test_shared.py"
_BATCHES: Final = "tests/integration/forwarding/test_shared_batches.py"
_JOINS: Final = "tests/integration/forwarding/test_shared_joins.py"

SHARED_BUGS: Final = (
    Bug(
        "frames on a shared connection are used as they arrive, not once their batch was read",
        "P4",
        (
            Change(
                f"{_FORWARDING}/numbered.py",
                "                    break\n",
                "                    while size - start >= _PREFIX.size:\n"
                "                        prefix, payload_size, number = _PREFIX.unpack_from(data, start)\n"
                "                        middle = start + _PREFIX.size + (prefix >> 8)\n"
                "                        if (end := middle + payload_size) > size:\n"
                "                            break\n"
                "                        head = data[start + _PREFIX.size : middle]\n"
                "                        self.frame_received(prefix & 0xFF, number, head, data[middle:end])\n"
                "                        of_batch -= end - start\n"
                "                        start = end\n"
                "                    data = _SIZE.pack(of_batch) + data[start:]\n"
                "                    size, position = len(data), 0\n"
                "                    break\n",
            ),
        ),
        (f"{_BATCHES}::test_a_batch_whose_end_was_not_read_has_run_nothing",),
    ),
    Bug(
        "all that was sent on a shared connection counts as unread when its owner leaves bytes unread",
        "P4",
        (Change(f"{_FORWARDING}/shared.py", " and number >= self._last_batch\n", "\n"),),
        (
            f"{_BATCHES}::test_the_last_batch_of_an_owner_that_left_it_unread_is_sent_again_and_no_other",
            f"{_BATCHES}::test_a_batch_of_nothing_but_farewells_says_nothing_of_the_one_before",
        ),
    ),
    Bug(
        "the last request that the owner has read on a shared connection is sent again",
        "P4",
        (Change(f"{_FORWARDING}/shared.py", "each.number > number]", "each.number >= number]"),),
        (f"{_BATCHES}::test_those_past_the_last_one_read_are_sent_again_and_the_others_wait",),
    ),
    Bug(
        "an answer on a shared connection is given to the exchange that has waited longest",
        "P5",
        (
            Change(
                f"{_FORWARDING}/shared.py",
                "self.exchanges.pop(number, None)\n",
                "self.exchanges.pop(next(iter(self.exchanges), number), None)\n",
            ),
        ),
        (
            f"{_SHARED}::test_each_of_many_gets_its_own_reply",
            f"{_SHARED}::test_a_late_answer_hits_no_other_exchange",
        ),
    ),
    Bug(
        "what was said between the call from a shared connection and the join is lost",
        "P5",
        (
            Change(
                f"{_FORWARDING}/shared_peer.py",
                "        for frame in self._held or ():\n",
                "        for frame in ():\n",
            ),
        ),
        (f"{_JOINS}::test_a_shared_connection_is_not_idle_while_what_was_called_from_it_waits_to_join",),
    ),
    Bug(
        "the number of an exchange that timed out on a shared connection is used again",
        "P5",
        (
            Change(
                f"{_FORWARDING}/shared.py",
                "if 0.0 < each.answer_by <= now]:\n",
                "if 0.0 < each.answer_by <= now]:\n            self._number = exchange.number - 1\n",
            ),
        ),
        (f"{_SHARED}::test_a_late_answer_hits_no_other_exchange",),
    ),
    Bug(
        "a shared connection is given up under an exchange that has yet to join another",
        "answers",
        (Change(f"{_FORWARDING}/shared.py", "not (self.exchanges or self.called)", "not self.exchanges"),),
        (f"{_JOINS}::test_a_shared_connection_is_not_idle_while_what_was_called_from_it_waits_to_join",),
    ),
    Bug(
        "a worker that stops closes a shared connection under a forwarder that has yet to read its replies",
        "P5",
        (Change(f"{_FORWARDING}/receiver.py", "        await self._wait_for_forwarders()\n", ""),),
        (f"{_SHARED}::test_a_receiver_that_closes_waits_until_the_forwarder_has_let_go",),
    ),
    Bug(
        "a body crosses as the server has it, whatever stands between the server and the router",
        "P1",
        (Change("src/homing/runtime/protocol.py", " or receive != cycle.receive:\n", ":\n"),),
        (
            "tests/integration/forwarding/test_whole_bodies.py"
            "::test_what_the_router_would_read_counts_and_not_what_the_server_has",
        ),
    ),
)
