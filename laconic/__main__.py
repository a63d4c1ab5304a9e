"""`python -m laconic`, the entry point that torchrun starts."""

import os

# Otherwise every rank warns that DDP looked for unused parameters and found none, which is as intended.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from laconic.cli import main

if __name__ == "__main__":
    main()
