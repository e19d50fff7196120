"""Measuring pipelines and their rivals against each other, so that the figures can be believed.

`run` decodes every prompt through every arm, in turns; each finished request is a `records.Record` on disk.
"""
