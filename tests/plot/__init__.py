"""Tests of the figures: what is drawn, and the files it goes to."""
