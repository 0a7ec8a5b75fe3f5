"""Entry point of `topoflight` and `python -m agent.cli`."""

import sys


def main() -> None:
    """Run a verb; an interrupt while its modules are imported ends it without a traceback."""
    try:
        from agent.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
