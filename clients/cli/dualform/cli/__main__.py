"""`python -m dualform.cli`: the same as `dualform`."""

from dualform.cli.main import program

program()
