"""`meshnode`, and `python -m meshnode`."""

import signal
import sys


def entry() -> int:
    """The exit status of the command line.

    Until the command line is loaded Ctrl-C ends the process silently, as of any program: there is nothing to take
    down yet, and a traceback out of an import tells nobody anything.
    """
    asked_for = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, as of a job under nohup
    if asked_for:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main

    if asked_for:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(entry())
