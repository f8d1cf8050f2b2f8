"""`python -m twinkle_server MODEL --data DIR`: the same as `twinkle serve`."""

from twinkle.cli import main

if __name__ == "__main__":
    import sys

    main(["serve", *sys.argv[1:]])
