"""`python -m meshnode`: the same as the `meshnode` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
