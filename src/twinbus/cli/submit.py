"""Runs `twinbus syphon` under spark-submit, which needs a file; uses the session it finds."""

import sys

from twinbus.cli import main

if __name__ == "__main__":
    main(["syphon", *sys.argv[1:]])
