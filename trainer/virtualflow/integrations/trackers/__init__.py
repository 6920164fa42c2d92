"""Experiment trackers: one run in each, over all changes of the workers, with every committed step once.

A tracker is given to ``vf.elastic(..., tracker=...)``. Each has a module of its own, which imports its package where an
object is made.
"""

from virtualflow.integrations.trackers.mlflow import MLflow
from virtualflow.integrations.trackers.tensorboard import TensorBoard
from virtualflow.integrations.trackers.wandb import WeightsAndBiases

__all__ = ["MLflow", "TensorBoard", "WeightsAndBiases"]
