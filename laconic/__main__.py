"""`python -m laconic`, by which torchrun starts it."""

import os

# Else every rank says that DDP looks for unused parameters and finds none, which is as it should be.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from laconic.cli import main

if __name__ == "__main__":
    main()
