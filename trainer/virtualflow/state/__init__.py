"""The training's state as bytes: captured and put back to the bit, striped over donors on its way to a joiner, and in
checkpoints on disk. Also the pure decision who gives it to whom.
"""

from virtualflow.state.capture import Companions, StayingHook, copy_optimizer_state, placed
from virtualflow.state.checkpoint_format import (
    FoundCheckpoint,
    JobIdentity,
    find_by_path,
    load,
    load_undivided,
    skipped,
)
from virtualflow.state.checkpoint_shares import NATIVE, OwnShare, SavedPiece, ShareFiles, cut_state, join_states
from virtualflow.state.checkpoint_writer import CheckpointPolicy, WriterState
from virtualflow.state.checkpointing import Checkpointer, Kind, choose_policy, policy_of_run
from virtualflow.state.codec import snapshot
from virtualflow.state.digests import content_hash, signature, transient_buffers
from virtualflow.state.memory_copies import MemoryCopies
from virtualflow.state.several import Optimizers, join_optimizers, join_schedulers, optimizers_of, schedulers_of
from virtualflow.state.striping import Path, Piece, share_out, size_of, split
from virtualflow.state.transfer import Moving, Reserve, elder, make_room, move_state, pack_state, tell_room
from virtualflow.state.transfer_plan import SPOILED, Origin, Standing, Transfer, plan_transfer, someone_has_state
