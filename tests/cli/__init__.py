"""Tests of the command: real processes, their output and their exit status."""
