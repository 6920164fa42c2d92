"""Traces for ``virtualflow simulate``; README.md says where each figure comes from."""
