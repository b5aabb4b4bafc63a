"""Tests of the server, over real sockets and on real files."""
