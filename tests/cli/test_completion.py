"""The completions of a shell: commands, runs, and Hydra's keys and groups, for `runner` and for `python -m runner`."""

import shutil
import subprocess

import pytest

from runner import cli
from runner.cli import dispatch, table


def test_completion_offers_commands_and_folders(tmp_path):
    run = tmp_path / "outputs" / "2026-11-22" / "10-00"
    run.mkdir(parents=True)
    (run / "rerun.yaml").touch()

    def offered(name, *typed):
        return list(dispatch.suggestions(table.COMMANDS.get(name), list(typed), table.COMMANDS, tmp_path))

    assert offered(None, "re") == ["resume", "reproduce", "report", "register"]
    assert offered(None, "model=mlp", "re") == []
    assert offered("resume", "") == ["last", "outputs/2026-11-22/10-00"]
    assert offered("evaluate", "la") == ["last"]
    assert offered("evaluate", "last", "la") == offered("plan", "la") == []
    assert offered("predict", "last", "--in") == ["--input"]


@pytest.mark.parametrize("line", ["runner plan model=ml", "runner model=ml"])
def test_completion_after_command_is_hydras(line, monkeypatch, own_folder, capfd):
    monkeypatch.setenv("COMP_LINE", line)
    assert cli.main(["-sc", "query=bash"]) == 0
    assert capfd.readouterr().out.split() == ["model=mlp"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_both_ways_to_start_it(tmp_path, capfd):
    assert cli.main(["-sc", "install=bash"]) == 0
    install = capfd.readouterr().out
    (tmp_path / "python").write_text(
        '#!/bin/sh\necho "resume [$COMP_LINE] [$*]" | tr " " "_"; echo model=mlp model=cnn\n'
    )
    (tmp_path / "python").chmod(0o755)
    shutil.copy(tmp_path / "python", tmp_path / "runner")
    script = (
        f"{install}\n"
        + """
try() { COMP_LINE="$1"; COMP_POINT=${#1}; COMPREPLY=(); _runner_complete; echo "$1 -> ${COMPREPLY[*]}"; }
try 'runner re'; try 'python -m runner re'; try 'python -m runner model=m'; try 'python -m pytest re'; complete -p python runner
"""
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=False,
    )
    assert done.stdout.splitlines() == [
        "runner re -> resume_[runner_re]_[-sc_query=bash]",
        "python -m runner re -> resume_[runner_re]_[-m_runner_-sc_query=bash]",
        "python -m runner model=m -> model=mlp",
        "python -m pytest re -> ",
        "complete -o default -o nospace -F _runner_complete python",
        "complete -o default -o nospace -F _runner_complete runner",
    ], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_what_is_printed(shell, capfd):
    assert cli.main(["-sc", f"install={shell}"]) == 0
    script = capfd.readouterr().out
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    subprocess.run([shell, "-n", "-c", script], check=True)


def test_completion_unknown_shell_is_refused(capfd):
    assert cli.main(["-sc", "install=csh"]) == 2
    assert "install=fish" in capfd.readouterr().err
