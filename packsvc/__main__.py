"""`python -m packsvc`: the command line, where no script is on the path."""

from packsvc.cli import main

if __name__ == "__main__":
    main()
