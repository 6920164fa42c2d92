"""A run's checkpoints: where they go, when one is due, and which one to begin from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from virtualflow.errors import ConfigurationError, Evicted
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.messages import NO_GENERATION, CheckpointState, Generation
from virtualflow.protocol.settings import CHECKPOINT_KEEP, CHECKPOINT_SECONDS, MAX_TEXT, STOP_GRACE
from virtualflow.protocol.signatures import SigningKeys
from virtualflow.state.checkpoint_format import (
    FoundCheckpoint,
    JobIdentity,
    adopt,
    find_newest,
    load,
    load_undivided,
    skipped,
)
from virtualflow.state.checkpoint_order import NO_CHECKPOINT, Mark, VolumeFailure, complete, highest_fence, volume_error
from virtualflow.state.checkpoint_shares import OwnShare, SavedPiece
from virtualflow.state.checkpoint_writer import CheckpointPolicy, CheckpointWriter, WriterState
from virtualflow.state.memory_copies import MemoryCopies
from virtualflow.state.sealed_manifest import UNSIGNED

T = TypeVar("T")


def choose_policy(
    given: CheckpointPolicy | Path | str | None, environment: WorkerEnvironment
) -> CheckpointPolicy | None:
    """The policy in force: the environment goes before what the script says."""
    policy = CheckpointPolicy(given) if isinstance(given, Path | str) else given
    if not isinstance(policy, CheckpointPolicy | None):
        raise ConfigurationError(f"checkpoint is {given!r}; it must be a directory or a vf.CheckpointPolicy")
    directory = environment.checkpoint_dir or (policy.directory if policy else None)
    if directory is None:
        return None
    every_steps = environment.checkpoint_steps or (policy.every_steps if policy else None)
    every_seconds = environment.checkpoint_seconds or (policy.every_seconds if policy else None)
    if every_steps is None and every_seconds is None:
        every_seconds = CHECKPOINT_SECONDS
    keep = environment.checkpoint_keep or (policy.keep if policy else CHECKPOINT_KEEP)
    sign = environment.sign or (policy.sign if policy else None)
    trust = environment.trust or (policy.trust if policy else None)
    return CheckpointPolicy(directory, every_steps, every_seconds, keep, sign, trust)


def policy_of_run(policy: CheckpointPolicy, run: int, former: Sequence[Path | None]) -> CheckpointPolicy:
    """The policy of a run of the script: a directory that a ``former`` run has used already gets one inside for it."""
    if not any(known is not None and known == policy.directory for known in former):
        return policy
    return replace(policy, directory=policy.directory / f"run-{run}")


Kind = Literal["checkpoint", "checkpoint-failed", "warning", "info"]
"""What there is to tell of checkpoints: one was written, one could not be, or something else about them."""


class Checkpointable(Protocol):
    """A training whose state can be taken and put back."""

    @property
    def completed_steps(self) -> int:
        """Updates that have been applied."""

    def capture(self) -> dict[str, Any]:
        """Return the whole state, as it is now."""

    def restore(self, tree: dict[str, Any]) -> None:
        """Put a captured state back."""


class Divided(Checkpointable, Protocol):
    """A training of which each worker has a share only."""

    def capture_undivided(self) -> dict[str, Any]:
        """Return what is the same on all workers, as it is now."""

    def capture_share(self) -> OwnShare:
        """Return what this worker has first, as it is now."""


@dataclass(frozen=True)
class VolumeSettings:
    """How long a volume is waited for that fails just now, by who begins from a checkpoint or sets one aside."""

    patience: float = 60.0
    """Well below ``transfer.MESSAGE_TIMEOUT``: the other workers of the first generation wait, too."""
    retry_first: float = 0.1
    """The first wait between two tries; it doubles."""
    retry_most: float = 2.0
    """The longest such wait."""


class Checkpointer:
    """Keeps the checkpoints of one run, or none when there is no place for them.

    Args:
        policy: where, and how often; ``None``: nowhere.
        doubt: within so many steps a state may still turn out to be wrong.
        joins: whether others may have the state already. Then a directory that cannot be read or written to just now
            is told, and an error only for who has to begin from it.
        volume: how long that one, and who sets checkpoints aside, waits for a volume that fails just now.
        only_reads: whether nothing there is to be changed: the run that wrote it is over.

    Raises:
        ConfigurationError: a key cannot be read; or there is no way to write there, and nobody has the state already.
    """

    def __init__(
        self,
        policy: CheckpointPolicy | None,
        identity: JobIdentity,
        tell: Callable[[Kind, str], None],
        report: Callable[[CheckpointState], None],
        doubt: int = 0,
        copies: MemoryCopies | None = None,
        *,
        joins: bool = False,
        volume: VolumeSettings | None = None,
        only_reads: bool = False,
    ) -> None:
        self._policy = policy
        self._directory = "" if policy is None else str(policy.directory)[:MAX_TEXT]
        self._identity = identity
        self._joins = joins
        self._keys = UNSIGNED if policy is None else _open_keys(policy, writes=not only_reads)
        self._volume = volume or VolumeSettings()
        self._tell = tell
        self._report = report
        self._copies = copies
        """Those in the coordinator's memory, where there are any."""
        self._copied = -1
        """The step of the newest of these, where it is newer than what is on disk."""
        self._complete: tuple[int, float] | tuple[None, None] = None, None
        """The newest complete one's step, and when it was written (Unix time)."""
        self._saved_step = -1
        self._told: int | None = None
        self._found: FoundCheckpoint | None = None
        self._tree: dict[str, Any] | None = None
        """Its state, once it has been read,"""
        self._pieces: list[SavedPiece] | None = None
        """and what this worker is to keep, if it is divided and is to be."""
        self._generation = NO_GENERATION
        self._damaged: set[int] = set()
        """Steps of checkpoints whose state was not what was written."""
        self._untried = False
        """Whether the directory could not be written to at first: who is to begin from it tries again."""
        self._writer: CheckpointWriter | None = None
        if policy is not None and not only_reads:
            self._writer = CheckpointWriter(
                policy, identity, self._say, time.monotonic, self._attempted, doubt, self._keys
            )
            try:
                self._writer.check_writable()
            except ConfigurationError as error:
                self._put_off(error)
                self._untried = True

    @property
    def failure(self) -> str | None:
        return None if self._writer is None else self._writer.failure

    @property
    def writes(self) -> bool:
        """Whether anything is ever written, to a directory or to the coordinator's memory."""
        return self._writer is not None or self._copies is not None

    @property
    def keeps(self) -> bool:
        return self._policy is not None

    @property
    def directory(self) -> Path | None:
        return None if self._policy is None else self._policy.directory

    @property
    def newest(self) -> int | None:
        return None if self._writer is None else self._writer.newest

    @property
    def floor(self) -> Generation:
        """The highest fencing number in the directory, above which a first generation is numbered; ``NO_GENERATION``:
        there is none, or it is not known to one who joins. Whoever begins, and every write, looks again.

        Raises:
            ConfigurationError: the directory cannot be read, and this worker is alone.
        """
        try:
            return self._highest_fence
        except ConfigurationError as error:
            self._put_off(error)
            return NO_GENERATION

    @property
    def _highest_fence(self) -> Generation:
        return NO_GENERATION if self._policy is None else highest_fence(self._policy.directory)

    def _put_off(self, error: ConfigurationError) -> None:
        """The directory cannot be used just now, which is told if others may have the state, and else is an error."""
        if not self._joins:
            raise error
        self._say(str(error))

    def enter(self, generation: Generation) -> None:
        self._generation = generation
        self._found = self._pieces = None  # others may have begun from it
        if self._writer is not None:
            self._writer.generation = generation

    def find(self) -> Mark:
        """The checkpoint or copy that this worker could begin from, by its manifest; ``NO_CHECKPOINT``: there is none.

        Raises:
            ConfigurationError: it is another job's, no trusted key has signed it, or the directory cannot be read or
                written to.
            Evicted: a newer generation has written or begun there.
        """
        if self._untried and self._writer is not None:
            self._persist(self._writer.check_writable)
            self._untried = False
        if self._policy is not None and self._found is None:
            if self._writer is not None:
                self._leave_if_fenced(self._persist(lambda: self._highest_fence))
            self._found = self._find_newest(self._policy.directory)
        saved = NO_CHECKPOINT if self._found is None else self._found.mark
        copied = NO_CHECKPOINT if self._copies is None else self._copies.find()
        self._copied = copied.step if copied > saved else -1
        return max(copied, saved)

    def _find_newest(self, directory: Path) -> FoundCheckpoint | None:
        def find(patient: bool) -> FoundCheckpoint | None:
            return find_newest(directory, self._say, self._identity, self._damaged, keys=self._keys, patient=patient)

        try:
            return self._persist(lambda: find(patient=True))
        except VolumeFailure:
            return find(patient=False)  # what cannot be read for so long is as good as damaged

    def _persist(self, attempt: Callable[[], T]) -> T:
        """Try again what a volume refuses and may grant a moment later."""
        volume, told = self._volume, False
        limit, pause = time.monotonic() + volume.patience, volume.retry_first
        while True:
            try:
                return attempt()
            except VolumeFailure as error:
                left = limit - time.monotonic()
                if left <= 0:
                    raise
                if not told:
                    self._say(f"{error}; this worker tries again for {left:.0f} s")
                told = True
                time.sleep(min(pause, left))
                pause = min(2 * pause, volume.retry_most)

    def read(self, *, divided: bool = False) -> bool:
        """Begin from what :meth:`find` has found; whether it is what was written, which is told otherwise.

        Args:
            divided: whether what is in shares is left to :meth:`read_share`.

        Raises:
            ConfigurationError: it is another job's, or the checkpoint cannot be given this generation's number.
        """
        if self._copied >= 0 and self._copies is not None:
            self._tree = self._copies.read()
            return self._tree is not None
        assert self._found is not None
        path = self._found.path
        try:
            if self._writer is not None:
                # First: nobody of an older generation removes it meanwhile.
                self._found = self._persist(partial(self._adopt, self._found))
            found = self._found
        except FileNotFoundError:
            self._say(f"the checkpoint {path} is not there any more")
            return False
        try:
            self._tree = load_undivided(found) if divided else load(found)
        except ValueError as error:
            self._say(skipped(found.path, error))
            return False
        return True

    @property
    def has_shares(self) -> bool:
        """Whether what was read is divided."""
        return self._found is not None and self._copied < 0 and bool(self._found.shares)

    def read_share(self, step: int, wanted: Sequence[tuple[str, int, int]]) -> bool:
        """Read stretches of parameters from the checkpoint of that step which a member of this generation begins from.

        Returns:
            Whether they are what was written, which is told otherwise.

        Raises:
            ConfigurationError: there is no such checkpoint where this worker looks.
        """
        assert self._policy is not None
        mark = Mark(self._generation, step)
        path = self._policy.directory / mark.name

        def find() -> FoundCheckpoint | None:
            if not path.exists():
                raise VolumeFailure(
                    f"the checkpoint {path}, which others begin from, is not to be seen from this worker; give all "
                    "workers a --checkpoint-dir on one volume that they share"
                )
            return find_newest(path.parent, self._say, self._identity, only=[mark], keys=self._keys)

        found = self._persist(find)
        if found is None:
            return False
        shares = found.open_shares
        try:
            self._pieces = [piece for stretch in wanted for piece in shares.read(*stretch)]
        except ValueError as error:
            self._say(skipped(found.path, error))
            return False
        return True

    def take_share(self) -> list[SavedPiece] | None:
        """What :meth:`read_share` has read; ``None``: nothing."""
        pieces, self._pieces = self._pieces, None
        return pieces

    def _adopt(self, found: FoundCheckpoint) -> FoundCheckpoint:
        try:
            return adopt(found, self._generation)
        except FileNotFoundError:
            raise
        except OSError as error:
            sentence = (
                f"the checkpoint {found.path} cannot be renamed ({error.strerror}), which whoever begins from it must; "
                "make its directory writable for this user or use another --checkpoint-dir"
            )
            raise volume_error(error, sentence) from None

    def discard(self, step: int) -> None:
        """What was to be restored, of that step, was found damaged, here or by another worker: an older one counts."""
        if self._copied == step and self._copies is not None:
            self._copies.discard()
            return
        self._damaged.add(step)
        self._found = None

    def distrust(self, agreed: int) -> int:
        """States after the step ``agreed`` may be wrong: let nobody restore them; the newest that remains, -1 for none.

        Every worker may do this at the same time. What is set aside is for people to look at, and to remove.

        Raises:
            ConfigurationError: some could not be set aside, because the volume fails and goes on failing.
        """
        assert self._policy is not None
        self.flush(STOP_GRACE)
        if self._writer is not None:
            self._writer.trusted = agreed  # for one that a slow disk would complete after this
        return self._persist(partial(_set_aside, self._policy.directory, agreed))

    def restore(self, training: Checkpointable) -> None:
        assert self._tree is not None
        tree, self._tree = self._tree, None
        training.restore(tree)
        if self._copied >= 0:
            self._tell("checkpoint", f"the state of step {self._copied} came from the coordinator's memory")
            return
        assert self._found is not None
        self._saved_step = self._found.step
        self._complete = self._found.step, self._found.written
        self._report(CheckpointState(time.time(), self._found.step, self._found.written, directory=self._directory))

    def is_due(self, step: int) -> bool:
        return self._writer is not None and self._writer.due(step)

    def save_if_due(self, training: Checkpointable) -> None:
        """Write a checkpoint behind the training's back when it is time.

        Raises:
            Evicted: the last one was not to appear, because a newer generation has gone on without this worker.
        """
        writer, step = self._writer, training.completed_steps
        self._tell_of_success()
        self._leave_if_fenced()
        if writer is not None and writer.due(step) and writer.save(step, training.capture()):
            self._saved_step = step

    # --- together -----------------------------------------------------------------------------------------------------

    def tell_state(self) -> WriterState:
        """How it stands with what this worker was last to write of a checkpoint that is divided."""
        return WriterState.NONE if self._writer is None else self._writer.tell_state()

    def save_share(self, training: Divided, states: Sequence[WriterState], *, leads: bool) -> None:
        """Write a share of a checkpoint behind the training's back, and who ``leads`` all else; or skip it.

        Args:
            states: how it stands with all workers; one that has failed is whom others wait for in vain.

        Raises:
            Evicted: the last one was not to appear, because a newer generation has gone on without this worker.
        """
        writer, step = self._writer, training.completed_steps
        if leads:
            self._tell_of_success()
            self._leave_if_fenced()
        if writer is None:
            return
        in_vain = {WriterState.FAILED, WriterState.NONE} & {*states}
        if WriterState.WRITING in states or (WriterState.WAITING in states and not in_vain):
            if leads:
                writer.skip(step)
            return
        writer.give_up()
        writer.flush(None)  # which does nothing but wait
        if not leads:
            self._complete = None, None  # of what was written since, others tell
        if writer.save(step, training.capture_undivided() if leads else None, training.capture_share()) and leads:
            self._saved_step = step

    def is_saved(self, training: Checkpointable) -> bool:
        """Whether there is nothing to write of the present step, or nobody to write it; what goes on is ended."""
        if self._writer is not None:
            self._writer.give_up()
            self._writer.flush(None)
        return self._writer is None or self._writer.newest == training.completed_steps

    def save_share_now(self, training: Divided) -> bool:
        """Write this worker's share of a checkpoint of the present step, and wait for it; whether it is written."""
        writer = self._writer
        return writer is not None and writer.save_share_now(training.completed_steps, training.capture_share())

    def complete_now(self, training: Divided, shares: int) -> None:
        """Write all else of a checkpoint whose shares are written, and wait for it.

        Raises:
            Evicted: it was not to appear, because a newer generation has gone on without this worker.
        """
        assert self._writer is not None
        self._writer.save_now(training.completed_steps, training.capture_undivided(), shares)
        self._saved_step = training.completed_steps
        self._tell_of_success()
        self._leave_if_fenced()

    def give_up(self) -> None:
        """A worker is lost: do not wait for its share."""
        if self._writer is not None:
            self._writer.give_up()

    # --- for a worker that has all ------------------------------------------------------------------------------------

    def copy_if_due(self, training: Checkpointable, generation: Generation) -> None:
        """Send a copy of the state to the coordinator's memory when it is time; ``generation`` has no other member."""
        if self._copies is not None:
            self._copies.copy_if_due(training.completed_steps, generation, training.capture)

    def save_final(self, training: Checkpointable) -> None:
        """Write a checkpoint of the present step, and wait for it.

        Raises:
            Evicted: it was not to appear, because a newer generation has gone on without this worker.
        """
        if self._writer is None:
            return
        self._writer.flush(None)
        if self._saved_step != training.completed_steps or self._writer.failure is not None:
            self._writer.save_now(training.completed_steps, training.capture())
            self._saved_step = training.completed_steps
        self._tell_of_success()
        self._leave_if_fenced()

    def flush(self, timeout: float) -> None:
        """Wait for a write under way; a copy under way is of no use any more."""
        if self._copies is not None:
            self._copies.close(timeout)
        if self._writer is not None:
            self._writer.flush(timeout)

    def _leave_if_fenced(self, highest: Generation = NO_GENERATION) -> None:
        if self._writer is not None and max(highest, self._writer.fenced_by) > self._generation:
            assert self._policy is not None
            reason = f"this worker leaves: a newer generation of the job writes to {self._policy.directory}"
            self._say(reason)
            raise Evicted(reason)

    def _tell_of_success(self) -> None:
        if self._writer is not None and self._policy is not None and self._writer.newest != self._told:
            self._told = self._writer.newest
            self._tell("checkpoint", f"checkpoint of step {self._told} written to {self._policy.directory}")

    def _attempted(self, step: int, failure: str | None) -> None:
        """A write has ended, which may be told from the thread of the writer."""
        now = time.time()
        if failure is None:
            self._complete = step, now
        saved, written = self._complete
        self._report(CheckpointState(now, saved, written, failure, self._directory))

    def _say(self, text: str) -> None:
        self._tell("checkpoint-failed" if self.failure == text else "warning", text)


def _open_keys(policy: CheckpointPolicy, writes: bool) -> SigningKeys:
    keys = SigningKeys.read(policy.sign, policy.trust)
    if writes and keys.trusted and keys.private is None:
        raise ConfigurationError(
            "checkpoints are to be signed by a key that is trusted (--trust), and this job does not sign its own, so "
            "it could not go on from them; give it a key, too (--sign)"
        )
    return keys


def _set_aside(directory: Path, agreed: int) -> int:
    remaining = -1
    for mark, path in complete(directory):
        if mark.step <= agreed:
            remaining = max(remaining, mark.step)
            continue
        try:
            path.rename(path.with_name(f"diverged-{path.name}"))
        except FileNotFoundError:
            pass  # another worker was faster
        except OSError as error:
            raise volume_error(error, f"the checkpoint {path} cannot be renamed ({error.strerror})") from None
    return remaining
