"""`python -m anabatic`: the same program as the `anabatic` command."""

from anabatic.cli.app import main

if __name__ == "__main__":
    main()
