"""`plan completion`: the lines with which a shell completes commands, options and names."""

from __future__ import annotations

import click

from parplan.commands.style import Command

SHELLS = ("bash", "zsh", "fish")


@click.command(
    cls=Command,
    epilog='  eval "$(plan completion bash)"\n  plan completion fish > '
    "~/.config/fish/completions/plan.fish",
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the lines that let a shell complete commands, options, and names of models and GPUs."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "the shell is a choice of the argument"
    group = ctx.find_root().command
    click.echo(kind(group, {}, "plan", "_PLAN_COMPLETE").source())
