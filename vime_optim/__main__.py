"""`python -m vime_optim` is the command `vime-optim`."""

from vime_optim.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
