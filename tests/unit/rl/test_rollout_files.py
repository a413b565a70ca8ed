"""Files of tasks and of results: what is read, what is refused with which line, and what a cut run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies

from homing.errors import ConfigurationError
from homing.rl.protocol import EpisodeId, TaskId
from homing.rl.rollouts.results import ResultLine, ResultsFile, whole_results
from homing.rl.rollouts.summary import percentile, summarise
from homing.rl.rollouts.tasks import read_tasks, rollout_id_of

TASK_ID = TaskId(taskset="t", task_id="1")


def line(rollout_id: str = "r", attempt: int = 0, **more: Any) -> ResultLine:
    settings: dict[str, Any] = {"final": True, "reward": 1.0, "mask_sample": False, "task_id": TASK_ID}
    return ResultLine(rollout_id=rollout_id, attempt=attempt, **settings | more)


def masked(rollout_id: str = "r", attempt: int = 0, reason: str = "session_lost", *, final: bool = False) -> ResultLine:
    return line(rollout_id, attempt, final=final, reward=None, mask_sample=True, mask_reason=reason)


# --- tasks ---


def test_a_task_is_named_by_its_line_its_text_or_in_full(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(
        '{"task_input": {"a": 1}}\n\n'
        '{"task_input": {}, "task_id": "second"}\n'
        '{"task_input": {}, "task_id": {"taskset": "x", "task_id": "y"}, "rollout_id": "mine"}\n'
    )
    found = list(read_tasks(path))
    assert [each.task.task_id.model_dump() for each in found] == [
        {"taskset": "sums", "task_id": "1"},
        {"taskset": "sums", "task_id": "second"},
        {"taskset": "x", "task_id": "y"},
    ]
    assert found[0].task.task_input == {"a": 1}
    assert found[2].rollout_id == "mine"
    assert [each.rollout_id for each in found] == [each.rollout_id for each in read_tasks(path)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x\n", "line 1"),
        ('{"task_input": {}}\n{"task_id": "a"}\n', "line 2: task_input"),
        ('{"task_input": []}\n', "task_input"),
        ('{"task_input": {}, "more": 1}\n', "more"),
        ('{"task_input": {}, "rollout_id": "a-a1"}\n', "rollout_id"),
        ('{"task_input": {}, "rollout_id": "a"}\n{"task_input": {}, "rollout_id": "a"}\n', "same rollout as line 1"),
    ],
)
def test_a_line_that_is_no_task_is_refused_with_its_number(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        list(read_tasks(path))


def test_tasks_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        list(read_tasks(tmp_path / "none"))
    (tmp_path / "latin").write_bytes(b"\xff\n")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        list(read_tasks(tmp_path / "latin"))


@given(strategies.text(min_size=1), strategies.text(min_size=1))
def test_every_task_has_a_rollout_id_that_the_protocol_takes(taskset: str, task_id: str) -> None:
    named = rollout_id_of(TaskId(taskset=taskset, task_id=task_id))
    assert EpisodeId(rollout_id=named).rollout_id == named
    assert EpisodeId.from_capture_key(EpisodeId(rollout_id=named, attempt=3).capture_key).attempt == 3
    assert named != rollout_id_of(TaskId(taskset=taskset + "x", task_id=task_id))


# --- results ---


def test_what_was_added_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile(path) as results:
        results.add(masked("a", 0))
        results.add(line("a", 1, result={"reward": 1.0}))
        results.add(masked("b", 0))
    with ResultsFile(path) as results:
        assert (results.rollouts["a"].attempts, results.rollouts["b"].attempts) == (2, 1)
        assert results.rollouts["a"].final is not None
        assert results.rollouts["b"].final is None
    assert [each["reward"] for each in whole_results(path)] == [None, 1.0, None]


@given(cut=strategies.integers(min_value=1, max_value=60))
def test_a_line_that_was_cut_off_is_as_if_it_had_not_been_written(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "out.jsonl")
        with ResultsFile(path) as results:
            results.add(line("a"))
            results.add(line("b"))
        whole = path.read_bytes()
        path.write_bytes(whole[:-cut])
        with ResultsFile(path) as results:
            assert set(results.rollouts) == {"a"}
            results.add(line("c"))
        assert [each["rollout_id"] for each in whole_results(path)] == ["a", "c"]


def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"precious": 1}\n')
    with pytest.raises(ConfigurationError, match="line 1"), ResultsFile(path):
        raise AssertionError
    assert path.read_text() == '{"precious": 1}\n'
    with pytest.raises(ConfigurationError, match="cannot be written"), ResultsFile(tmp_path):
        raise AssertionError


def test_two_collectors_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile(path), pytest.raises(ConfigurationError, match="another collector"), ResultsFile(path):
        raise AssertionError
    with ResultsFile(path):
        pass


# --- figures ---


def test_only_valid_samples_make_the_mean() -> None:
    finals = [
        line("a", reward=1.0),
        line("b", reward=0.5),
        masked("c", final=True),
        masked("d", reason="timeout", final=True),
    ]
    summary = summarise(finals, rollouts=5, episodes=6, retried=2, seconds=2.0)
    assert (summary.mean_reward, summary.valid, summary.masked, summary.done) == (0.75, 2, 2, 4)
    assert summary.masked_by_reason == {"session_lost": 1, "timeout": 1}
    assert summary.episodes_per_second == 3.0
    assert json.loads(json.dumps(summary.as_dict()))["rollouts"] == 5


def test_figures_of_nothing_are_none() -> None:
    summary = summarise([masked(final=True)], rollouts=1, episodes=0, retried=0, seconds=0.0)
    assert (summary.mean_reward, summary.p50_seconds, summary.episodes_per_second) == (None, None, 0.0)


@given(strategies.lists(strategies.floats(0, 1e6), min_size=1), strategies.floats(1, 100))
def test_a_percentile_is_one_of_the_values_that_so_many_do_not_exceed(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert found in ordered
    assert sum(each <= found for each in ordered) >= percent / 100 * len(ordered) - 1e-6
