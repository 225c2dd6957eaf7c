"""`twinbus syphon` for spark-submit, which takes a file; its session is used as it is."""

import sys

from twinbus.cli import main

if __name__ == "__main__":
    main(["syphon", *sys.argv[1:]])
