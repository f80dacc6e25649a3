"""Ascend NPUs for MindIE."""
