"""`python -m shardroute.executors`: the command line, for launchers that start modules."""

from shardroute.executors.cli import main

if __name__ == "__main__":
    main()
