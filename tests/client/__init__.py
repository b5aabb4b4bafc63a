"""Tests of the SDK, over real sockets and on real files."""
