"""What experiments/run.py is made of: the study's configuration, data, stages and report."""
