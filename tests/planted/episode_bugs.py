"""Planted bugs of agents, episodes and rollouts: what is left open, who passes whom, and faults that pass for rewards."""

from __future__ import annotations

from typing import Final

from tests.planted.bug import Bug, Change

_RL: Final = "src/homing/rl"
_UNIT: Final = "tests/unit/rl"
_ENVIRONMENT: Final = "tests/integration/rl/test_environment.py"

EPISODE_BUGS: Final = (
    Bug(
        "an episode registers a close once its seed has been answered",
        "P3",
        (
            Change(
                f"{_RL}/episodes/episode.py",
                '        self.cleanup.register("the resources session", self._close_resources)\n        document',
                "        document",
            ),
            Change(
                f"{_RL}/episodes/episode.py",
                "        if seeded.resources_session_id != self._resources_id:\n",
                '        self.cleanup.register("the resources session", self._close_resources)\n'
                "        if seeded.resources_session_id != self._resources_id:\n",
            ),
        ),
        (f"{_ENVIRONMENT}::test_what_goes_wrong_is_said_as_data_and_everything_is_closed",),
    ),
    Bug(
        "an episode's clean-up ends with whoever waits for it",
        "P3",
        (
            Change(
                f"{_RL}/episodes/cleanup.py",
                "            except asyncio.CancelledError as error:\n                cancelled = error\n",
                "            except asyncio.CancelledError:\n                self._task.cancel()\n                raise\n",
            ),
        ),
        (f"{_UNIT}/test_cleanup.py::test_a_cancellation_waits_for_the_last_close_and_is_then_seen",),
    ),
    Bug(
        "one close that hangs takes the time of the others",
        "P3",
        (Change(f"{_RL}/episodes/cleanup.py", "(deadline - clock()) / left", "deadline - clock()"),),
        (f"{_UNIT}/test_cleanup.py::test_a_close_that_hangs_takes_no_more_than_its_share_of_the_time",),
    ),
    Bug(
        "a new episode passes those that wait",
        "answers",
        (
            Change(
                f"{_RL}/episodes/admission.py",
                "        if not queue:\n            slot",
                "        if True:\n            slot",
            ),
        ),
        (f"{_UNIT}/test_admission.py::test_a_new_one_does_not_pass_those_that_wait",),
    ),
    Bug(
        "the turn of an episode whose worker died is waited for",
        "P3",
        (
            Change(
                f"{_RL}/episodes/admission.py",
                'return ticket in self._waiting if worker == self._worker else self._send(worker, b"")',
                "return True",
            ),
            Change(
                f"{_RL}/episodes/admission.py",
                "        except (ConnectionRefusedError, FileNotFoundError):\n            return False\n",
                "        except (ConnectionRefusedError, FileNotFoundError):\n            return True\n",
            ),
        ),
        (f"{_UNIT}/test_admission.py::test_the_turn_of_a_worker_that_is_killed_goes_to_the_next",),
    ),
    Bug(
        "a masked verdict counts as the reward that it names",
        "P2",
        (Change(f"{_RL}/rollouts/collector.py", "    if verdict.mask_sample:\n", "    if False:\n"),),
        ("tests/integration/rl/test_rollouts.py::test_rollouts_are_collected_tried_again_and_counted",),
    ),
    Bug(
        "a line of results that was cut off stays in the file",
        "P4",
        (Change(f"{_RL}/rollouts/results.py", "                os.ftruncate(self._fd, kept)\n", ""),),
        (f"{_UNIT}/test_rollout_files.py::test_a_line_that_was_cut_off_is_as_if_it_had_not_been_written",),
    ),
    Bug(
        "a seed that waited goes on with a record that is gone",
        "P2",
        (
            Change(
                f"{_RL}/agents/records.py",
                "if self._records.get(session_id) is not record:\n                    continue",
                "if False:\n                    continue",
            ),
        ),
        (
            f"{_UNIT}/test_agent_records.py::test_a_seed_that_waited_for_a_record_that_is_gone_begins_with_the_current_one",
        ),
    ),
    Bug(
        "a failed seed that was tried again expires with its first failure",
        "P2",
        (Change(f"{_RL}/agents/records.py", " is record and record.expires_at == expires_at:", " is record:"),),
        (
            f"{_UNIT}/test_agent_records.py"
            "::test_a_failed_seed_that_is_tried_again_does_not_expire_with_its_first_failure",
        ),
    ),
    Bug(
        "a dead worker's path key is nobody's to take",
        "answers",
        (
            Change(
                "src/homing/routing/path_keys.py",
                "if owner != self._here and self._run_directory.is_dead(owner):",
                "if False:",
            ),
        ),
        ("tests/integration/seeds/test_path_keys.py::test_a_start_takes_the_path_key_of_a_dead_worker",),
    ),
    Bug(
        "what a killed worker's episodes had open stays open",
        "P3",
        (
            Change(
                f"{_RL}/episodes/leases.py", "                await self._close_left(name)\n", "                pass\n"
            ),
        ),
        (f"{_UNIT}/test_leases.py::test_what_a_killed_worker_had_open_is_closed_once_by_several",),
    ),
    Bug(
        "a worker that finds a lease does not ask whether its worker lives",
        "P2",
        (
            Change(
                f"{_RL}/episodes/leases.py",
                "            except BlockingIOError:\n                return  # its worker lives, or another one is closing it\n",
                "            except BlockingIOError:\n                pass\n",
            ),
        ),
        (
            f"{_UNIT}/test_leases.py::test_what_a_killed_worker_had_open_is_closed_once_by_several",
            f"{_UNIT}/test_leases.py::test_a_worker_leaves_its_own_leases_alone",
        ),
    ),
    Bug(
        "a thread whose environment hangs keeps its sessions",
        "P2",
        (
            Change(
                f"{_RL}/gymnasium.py",
                "            self.sessions.remove(session.id)\n            self.router.lifetimes.ended(session.id)\n",
                "            pass\n",
            ),
        ),
        ("tests/processes/rl/test_gymnasium.py::test_an_environment_that_hangs_costs_its_thread_and_what_lives_there",),
    ),
    Bug(
        "a token that is limited to some tools is not where tools are called without MCP",
        "answers",
        (Change(f"{_RL}/resources.py", "            self._refuse_unless_granted(request, called)\n", ""),),
        (
            "tests/processes/rl/test_mcp.py::test_a_token_that_is_limited_to_some_tools_is_so_wherever_it_names_the_session[2.x]",
        ),
    ),
    Bug(
        "the sandbox that a session lends is not granted to its agent",
        "answers",
        (
            Change(
                f"{_RL}/episodes/episode.py",
                "        if seeded.sandbox_access is not None:\n",
                "        if False:\n",
            ),
        ),
        (f"{_ENVIRONMENT}::test_a_sandbox_that_the_session_lends_is_granted_to_the_agent",),
    ),
    Bug(
        "an agent that has no use for a sandbox takes one",
        "answers",
        (
            Change(
                f"{_RL}/agents/server.py",
                "        if seed.sandbox_access is not None and not self.capabilities.sandbox_access:\n",
                "        if False:\n",
            ),
        ),
        (f"{_ENVIRONMENT}::test_a_sandbox_that_the_session_lends_is_granted_to_the_agent",),
    ),
)
