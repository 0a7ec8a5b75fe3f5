"""The command line `topoflight VERB`, and the verb explain. Results go to stdout, everything else to stderr.

Each verb is imported only when it runs. Therefore `--help` is fast, and no verb loads the libraries of another. Exit
codes: docs/reference/exit-codes.md.
"""

from __future__ import annotations

import errno
import importlib
import sys
import tomllib

import click

from agent import base

# An error of a user's disk, file or folder is not a program error: print one line without a traceback.
FILE_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EISDIR,
    errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip

with open(__file__.removesuffix("py") + "toml", "rb") as table:  # noqa: PTH123 - --help needs no pathlib
    VERBS: dict[str, tuple[str, str]] = {verb: (module, line) for verb, (module, line) in tomllib.load(table).items()}


class LazyGroup(click.Group):
    """A group that imports a verb when it is run, not when it is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the verbs, in the order of a typical run."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return one verb."""
        if cmd_name not in VERBS:
            return None
        command = getattr(importlib.import_module(VERBS[cmd_name][0]), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)  # noqa: S101 - a wiring mistake, held by a test
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the verbs from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


def _show_version(ctx: click.Context, _option: click.Parameter, is_set: bool) -> None:
    if is_set:
        click.echo(f"topoflight, version {base.version()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
              help="Show the version and exit.")  # fmt: skip
@click.option("-v", "--verbose", count=True, help="Log more to stderr; give it twice for debug messages.")
def cli(verbose: int) -> None:
    """Topology-aware preflight for GPU training.

    Inspects a node as NCCL will see it, measures its links, recommends the NCCL environment and the parallel layout,
    launches the fine-tune, and compares the run with its forecast.
    """
    base.log_to_stderr(verbose)


@click.command()
@click.argument("code", required=False)
@click.option("--list", "listed", is_flag=True, help="List all codes and alerts, each with its meaning.")
def explain(code: str | None, listed: bool) -> None:
    """Explain a finding, a log problem, a diagnosis or an alert: its meaning, its cause and its remedy."""
    from agent.checks.findings import UnknownCodeError, find_entry, find_point, read_entries

    if listed == (code is not None):
        raise click.UsageError("Give either one CODE or --list.")
    if code is None:
        for name in read_entries():
            click.echo(f"{name:36} {find_point(name, 'Meaning')}")
        return
    with base.raise_as(click.UsageError, UnknownCodeError):
        _show_entry(find_entry(code))


def _show_entry(text: str) -> None:
    """Print an entry of the findings or alerts page: one point below the other."""
    import shutil
    import textwrap

    title, _, points = text.partition("\n\n")
    click.secho(f"{title}\n", bold=True)
    for line in points.splitlines():  # "- **Meaning:** words"
        _, label, paragraph = line.split("**", 2)
        paragraph = label + paragraph.replace("**", "")
        width = shutil.get_terminal_size().columns
        paragraph = textwrap.fill(paragraph, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        click.echo(paragraph.replace(label, click.style(label, bold=True), 1))


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script."""
    base.prepare_streams()
    argv = list(sys.argv[1:] if arguments is None else arguments)
    code = base.EXIT_TOOL_ERROR
    try:
        code = _run(argv)
        base.flush_output()
    except BrokenPipeError:  # of stderr, or of a writer that could not continue
        base.discard_output()
        code = base.EXIT_CLOSED_PIPE
    except OSError as error:
        if error.errno not in FILE_ERRORS:
            raise
        base.discard_output()  # the buffered output cannot be written either
        click.echo(f"Error: {error.filename or 'standard output or a temporary folder'}: {error.strerror}", err=True)
        code = base.EXIT_USAGE if str(error.filename) in argv else base.EXIT_TOOL_ERROR
    sys.exit(code)


def _run(argv: list[str]) -> int:
    """Run the verb and return its exit code."""
    try:
        cli.main(args=argv, prog_name="topoflight", standalone_mode=False)
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return base.EXIT_INTERRUPTED
    except click.ClickException as error:  # usage and input errors have code 2, others 1
        error.show()
        place = argv.index("--host") if "--host" in argv else len(argv)
        kinds = [word.rpartition(".")[2] for word in argv[place + 1 : place + 3]]
        if "unexpected extra" in error.message and kinds[1:] == kinds[:1] != []:  # a shell has expanded --host *.json
            click.echo("Give --host before each file, or once with the folder of all files.", err=True)
        return error.exit_code
    except SystemExit as done:  # a verdict is a number; a text is an error message, as in Python
        if isinstance(done.code, str):
            click.echo(done.code, err=True)
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


if __name__ == "__main__":
    main()
