"""MLflow: the store itself says how far it has come, and a leader writes what is behind that.

All numbers of some steps are one transaction of the store, and one of them is the number of the step. The newest value
of that one is the last step that the store has as a whole, whoever wrote it. It is asked before each write, together
with the highest fencing number that has written: who finds a higher one than its own has been replaced.
"""

from __future__ import annotations

import fcntl
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from virtualflow._arguments import checked_class
from virtualflow.errors import ConfigurationError
from virtualflow.worker.tracker import OURS, Entry, NotWritten

_STEP = f"{OURS}step"
_RUN, _FENCE, _CHANGE = "virtualflow.run", "virtualflow.fence", "virtualflow.change"
"""Tags of a run: the id of its training, the newest generation that has written, and each membership change."""
_BATCH = 1_000
"""The most numbers that MLflow takes at once."""


@checked_class("MLflow")
class MLflow:
    """Writes into the one run of an experiment whose tag ``virtualflow.run`` is ``run.id``.

    Args:
        experiment: its name; it is made if there is none.
        tracking_uri: of a server or a database that all workers reach. Without it, what MLflow is set to, as by
            ``MLFLOW_TRACKING_URI``.
        name: of the run; ``run.id`` without it.

    Raises:
        ConfigurationError: MLflow is not installed, or would write files.
        MlflowException: there is no such server or database.
    """

    fenced = False

    def __init__(self, experiment: str, *, tracking_uri: str | None = None, name: str | None = None) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise ConfigurationError(
                "virtualflow.integrations.trackers.MLflow needs the package mlflow, which is not here: pip install "
                "mlflow, or mlflow-skinny with sqlalchemy and alembic"
            )
        import mlflow

        self._uri = _absolute(tracking_uri or mlflow.get_tracking_uri())
        if self._uri.startswith("file:") or ("://" not in self._uri and not self._uri.startswith("databricks")):
            raise ConfigurationError(
                f"MLflow would write to files in {self._uri}, which a killed worker leaves half-written; give "
                'tracking_uri= of a server or a database, such as "sqlite:////shared/mlflow.db"'
            )
        with _alone(self._uri):
            # Before anybody waits for this worker: a new database takes some seconds to be made.
            mlflow.MlflowClient(self._uri).search_experiments(max_results=1)
        self._experiment, self._name = experiment, name
        self._client: Any = None
        self._run, self._fence = "", ""

    def open(self, run: str, fence: tuple[int, int]) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._fence = "{:016d}.{:016d}".format(*fence)
        try:
            client = MlflowClient(self._uri)
            experiment = client.get_experiment_by_name(self._experiment)
            number = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
            tags = {_RUN: run, "mlflow.runName": self._name or run}
            self._run = _find(client, number, run) or client.create_run(number, tags=tags).info.run_id
            self._check(client.get_run(self._run))
            client.set_tag(self._run, _FENCE, self._fence)
            client.update_run(self._run, status="RUNNING")
        except MlflowException as error:
            raise NotWritten(error) from error
        self._client = client

    def write(self, entries: Sequence[Entry]) -> None:
        """Write the steps that are not there, as a whole each, and all changes."""
        from mlflow.entities import RunTag
        from mlflow.exceptions import MlflowException

        try:
            there = self._client.get_run(self._run)
            self._check(there)
            last = there.data.metrics.get(_STEP, 0)
            for batch in _batches([entry for entry in entries if entry.step > last]):
                self._client.log_batch(self._run, batch)
            for entry in entries:
                if entry.change is not None and entry.mark is not None:
                    key = f"{_CHANGE}.{entry.change.generation.counter:06d}"
                    self._client.log_batch(self._run, tags=[RunTag(key, f"step {entry.step}: {entry.mark}")])
        except MlflowException as error:
            raise NotWritten(error) from error

    def close(self) -> None:
        self._client = None

    def end(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.set_terminated(self._run)
        except MlflowException as error:
            raise NotWritten(error) from error

    def _check(self, there: Any) -> None:
        newest = there.data.tags.get(_FENCE, "")
        if newest > self._fence:
            raise NotWritten(f"another leader, of generation {newest}, writes run {self._run}")


def _absolute(uri: str) -> str:
    scheme, separator, path = uri.partition("sqlite:///")
    return f"{scheme}{separator}{Path(path).absolute()}" if path and not path.startswith(":") else uri


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Nobody else makes the database of a file meanwhile; servers see to that themselves."""
    path = uri.partition("sqlite:///")[2]
    if not path:
        yield
        return
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _find(client: Any, experiment: str, run: str) -> str | None:
    """The run of that id; of two that have been made at the same time, the same one for all who look."""
    found = client.search_runs([experiment], f"tags.`{_RUN}` = '{run}'", order_by=["attributes.start_time ASC"])
    return found[0].info.run_id if found else None


def _batches(entries: Sequence[Entry]) -> Iterator[list[Any]]:
    """The numbers of entries, those of one never apart while they are fewer than MLflow takes at once."""
    from mlflow.entities import Metric

    batch: list[Any] = []
    for entry in entries:
        at = int(1_000 * entry.at)
        numbers = [*entry.numbers.items(), (_STEP, float(entry.step))]
        if len(batch) + len(numbers) > _BATCH:
            yield batch
            batch = []
        batch += [Metric(name, value, at, entry.step) for name, value in numbers]
    for first in range(0, len(batch), _BATCH):
        yield batch[first : first + _BATCH]
