"""The wire contract, version 1: `attribution.proto` and the stubs generated from it."""
