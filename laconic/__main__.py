"""`python -m laconic`, by which torchrun starts it."""

from laconic.cli import main

if __name__ == "__main__":
    main()
