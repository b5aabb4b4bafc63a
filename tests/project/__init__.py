"""Tests of the project as a whole: its layout, documents, set-up, demo and studies."""
