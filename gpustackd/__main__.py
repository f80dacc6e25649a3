"""`python -m gpustackd` is the command line."""

from gpustackd.cli import main

if __name__ == "__main__":
    main()
