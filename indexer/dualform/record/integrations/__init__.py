"""Recorders for training frameworks, each in the module named after it: transformers, lightning.

Nothing is imported here: a framework is needed only by who uses its module.
"""
