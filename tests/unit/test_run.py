from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_finepage import run
from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed.one_process import GLOO_ALONE, ONE_PROCESS, UNUSED_OP

SCRIPT = """
import json, pathlib, sys
pathlib.Path({!r}).write_text(json.dumps([sys.argv, __name__, sys.path[0]]))
"""


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a launcher or another test has set, and undo what a test sets."""
    for name in ONE_PROCESS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["SCRIPT"], []),
        (["SCRIPT", "--deepspeed_config", "a.json"], ["--deepspeed_config", "a.json"]),
        (["--local_rank=0", "SCRIPT", "--x"], ["--local_rank=0", "--x"]),
        (["--local_rank", "0", "SCRIPT", "--x"], ["--local_rank", "0", "--x"]),
        (["SCRIPT", "--local_rank=3"], ["--local_rank=3"]),
    ],
)
def test_the_script_gets_its_own_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: list[str],
) -> None:
    monkeypatch.setattr(run, "prepare_one_process", lambda: None)
    script, found = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(SCRIPT.format(str(found)))
    run.main([str(script) if a == "SCRIPT" else a for a in arguments])
    argv, name, first_path = json.loads(found.read_text())
    assert argv == [str(script), *expected]
    assert name == "__main__"
    assert first_path == str(tmp_path)


@pytest.mark.parametrize(
    "arguments", [[], ["--local_rank=0"], ["--local_rank", "0"], ["--local_rank"]]
)
def test_no_script(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"no script was named. usage: python -m ds_finepage.run"):
        run.main(arguments)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no script '.*gone.py'. usage:"):
        run.main([str(tmp_path / "gone.py")])


def test_errors_of_the_script_come_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "prepare_one_process", lambda: None)
    script = tmp_path / "script.py"
    script.write_text("raise KeyError('theirs')")
    with pytest.raises(KeyError, match="theirs"):
        run.main([str(script)])


def test_without_a_launcher_one_process_is_set_up() -> None:
    run.prepare_one_process()
    assert {name: os.environ[name] for name in ONE_PROCESS} == ONE_PROCESS
    import deepspeed

    assert deepspeed.ops.__compatible_ops__[UNUSED_OP] is False


def test_what_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29501")
    run.prepare_one_process()
    assert os.environ["MASTER_PORT"] == "29501"
    assert os.environ["WORLD_SIZE"] == "1"


@pytest.mark.parametrize("gloo", [{}, {GLOO_ALONE: "1"}])
def test_under_a_launcher_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch, gloo: dict[str, str]
) -> None:
    """Ranks that talk over gloo alone build no op."""
    import deepspeed

    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, UNUSED_OP, True)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **gloo}.items():
        monkeypatch.setenv(name, value)
    run.prepare_one_process()
    assert "MASTER_PORT" not in os.environ
    assert deepspeed.ops.__compatible_ops__[UNUSED_OP] is not bool(gloo)


def test_each_rank_uses_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    chosen: list[int] = []
    monkeypatch.setattr(get_accelerator(), "set_device", chosen.append)
    run.use_device_of_rank()
    monkeypatch.setenv("LOCAL_RANK", "1")
    run.use_device_of_rank()
    assert chosen == [0, 1]


def test_as_a_command_errors_are_messages() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds_finepage.run"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"ds_finepage: no script was named. {run.USAGE}\n"
