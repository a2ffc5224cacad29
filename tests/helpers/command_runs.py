"""The command line, as tests call it."""

from __future__ import annotations

from click.testing import CliRunner, Result

from parplan import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def succeed(*arguments: str) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def fail(code: int, *arguments: str) -> str:
    """Returns the message of a run that must end with one `error:` and one `hint:`.

    Further lines are indented, and the run has no result.
    """
    result = run(*arguments)
    assert result.exit_code == code, result.output
    starts = [line.split(":")[0] for line in result.stderr.splitlines() if not line.startswith(" ")]
    assert starts == ["error", "hint"], result.stderr
    assert result.stdout == ""
    return result.stderr
