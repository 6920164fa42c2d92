"""The set-up of a run: everything is checked, opened and put together before anybody waits for it.

:func:`set_up` returns a :class:`Context` whose parts are all ready; what has to be given back is in the caller's
``ExitStack``, in whatever state the set-up ended.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from virtualflow.data import Orders, Source, has_indices, open_orders, open_source
from virtualflow.device import describe_device, device_of, fingerprint, pin, probe_bits
from virtualflow.errors import ConfigurationError, VirtualFlowError, installed
from virtualflow.protocol import messages as m
from virtualflow.protocol.device_profile import Situation, block_seconds, seconds_for
from virtualflow.reduction import Row, host_memory, plan_offload
from virtualflow.state import (
    Checkpointer,
    Companions,
    JobIdentity,
    MemoryCopies,
    choose_policy,
    policy_of_run,
    schedulers_of,
    transient_buffers,
)
from virtualflow.state import signature as signature_of
from virtualflow.step import (
    HOST,
    BackwardCut,
    Guard,
    MicrobatchFusion,
    OptimizerOptions,
    Parts,
    ShardedParameters,
    SlicedValues,
    SpotChecker,
    StepPart,
    Update,
    check_averages,
    choose_sums,
    find_lost_state,
)
from virtualflow.transport import CopyClient
from virtualflow.verify import Opened
from virtualflow.worker.contents import describe_contents
from virtualflow.worker.loading import Loading, Staging
from virtualflow.worker.member_state import MemberState
from virtualflow.worker.membership import Membership
from virtualflow.worker.options import ShardParameters, describe_samples
from virtualflow.worker.parts import in_order
from virtualflow.worker.profiling import Profiling, describe_situation, given_profile
from virtualflow.worker.records import Audit, Explanation, TraceWriter
from virtualflow.worker.reporter import Pacing, PlannedActivations, Reporter, UsageMeter
from virtualflow.worker.request import Request, check_request
from virtualflow.worker.session import Session
from virtualflow.worker.standalone import AnySession, PastRunSession, StandaloneSession
from virtualflow.worker.stopwatch import Stopwatch
from virtualflow.worker.tracking import Tracking
from virtualflow.worker.train_state import Training
from virtualflow.worker.turns import DeviceTurns, open_turns

if TYPE_CHECKING:
    from virtualflow.memory.activations import Chain, LayerMajor

_Part = TypeVar("_Part", bound=StepPart | None)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every run has; what is on besides is among its ``parts``."""

    request: Request
    total_steps: int | None
    """Updates that the training takes; ``None`` when the length of the streams decides."""
    session: AnySession
    situation: Situation
    """What is about to run, as far as profiles go."""
    loading: Loading
    update: Update
    training: Training
    membership: Membership
    checkpointer: Checkpointer
    reporter: Reporter
    stopwatch: Stopwatch
    guard: Guard
    parts: Parts
    fusion: MicrobatchFusion | None
    """``None``: virtual nodes run one by one."""
    turns: DeviceTurns | None
    """``None``: no other job has its device."""
    pacing: Pacing | None
    """``None``: nobody asks how fast it is."""
    tracking: Tracking | None
    """``None``: there are no trackers."""
    layers: tuple[Chain, LayerMajor] | None
    """``None``: virtual nodes go through the whole model one after the other."""
    profiling: Profiling | None
    """``None``: the script trains."""


def open_session(request: Request, resources: ExitStack, incarnation: str) -> AnySession:
    """The membership of this process, in a job or alone, before anything else; nothing is connected yet."""
    environment, settings = request.environment, request.settings
    state = MemberState(
        max(1, request.virtual_nodes),
        fingerprint(environment.threads, request.reproducibility),
        request.run,
        tuple(former.result for former in request.former),
        reproducibility=request.reproducibility,
        device=describe_device(request.device),
        memory=m.MemoryPlan() if request.memory is not None and request.memory.plans_activations else None,
    )
    session: AnySession
    if request.over is not None:
        session = PastRunSession(state, settings)
    elif environment.coordinator is None or environment.profile_out is not None:
        session = StandaloneSession(state, settings)
    else:
        credential = environment.credential
        signer = None if isinstance(credential, str) else credential
        session = Session(
            environment, state, settings, incarnation, signer=signer, asks=request.options.shards_parameters
        )
        session.link.usage = UsageMeter(request.device, state, request.options.batch_size).read
    resources.callback(session.close)
    return session


def set_up(request: Request, session: AnySession, resources: ExitStack) -> Context:
    """Check what the user asked for, and open everything that the loop needs, but for the connection."""
    check_request(request)
    options, environment, settings = request.options, request.environment, request.settings
    resources.callback(pin(environment.threads, request.reproducibility).undo)
    # First what forks loader processes, then what opens connections that they should not inherit.
    orders = open_orders(options.sampler, request.dataset, options.seed)
    source = _open_source(request, orders, resources)
    layers = _open_layers(request)  # before others keep views of parameters, which it may move
    update = _open_update(request, session, resources)
    fusion = _held(resources, _open_fusion(request, source))
    averages = [] if update.shards is None else update.shards.averages
    companions = Companions(options.state, {average.name: average for average in averages})
    _check_states(request, session)
    training = Training(
        request.model,
        request.optimizer,
        options.scheduler,
        options.scaler,
        update,
        companions,
        last_step=request.last_step,
        epochs=options.epochs,
    )
    for average in averages:
        average.repeats = lambda: training.repeats
        resources.callback(average.close)
    signature = signature_of(request.model, request.optimizer)
    if companions:
        signature["state"] = companions.names
    situation = describe_situation(request.model, options, environment, request.virtual_nodes, signature)
    samples = None if source.steps_per_epoch is None else len(request.dataset)  # of a stream nobody knows
    profiling = _open_profiling(request, samples, situation)
    if orders is not None:
        signature["sampler"] = orders.fingerprint
    # It is on the device where nothing is said. In layer-major order it steps where the model is.
    if request.host_optimizer or (request.layer_major and request.device.type != "cpu"):
        signature["placement"] = "host"
    if options.reduce_dtype is not None and update.sync.widens:
        signature["reduce_dtype"] = str(options.reduce_dtype).removeprefix("torch.")
    if update.sync.sums:
        signature["sums"] = list(update.sync.sums)
    if update.cut is not None:
        signature["backward"] = update.cut.description
    # No state depends on it, so workers need not have it in common; whoever reads a checkpoint wants to know.
    described = {**signature, "transient": transient_buffers(request.model)}
    identity = JobIdentity(request.virtual_nodes, options.seed, options.batch_size, samples, described)
    checkpointer = _open_checkpointer(request, identity, session, profiling is None, resources)
    total_steps = options.total_steps(source.steps_per_epoch)
    stopwatch = Stopwatch()
    # "cuda" alone may be another one than the model's.
    moves = options.device is not None and not request.layer_major
    staging = Staging(device_of(request.model)) if moves else None
    loading = Loading(source, fusion, training, staging, options.loader.get("collate_fn"))
    reporter = Reporter(session, training, stopwatch, total_steps, settings)
    guard = _held(resources, _open_guard(request, session, companions))
    pacing = Pacing(reporter) if session.coordinated else None
    clocks = [clock.exclude for clock in (None if pacing is None else pacing.pace, fusion) if clock is not None]
    turns = _held(resources, open_turns(environment, session, request.device, settings, clocks))
    tracking = _held(resources, _open_tracking(request, session, training))
    activations = None if profiling is not None else _held(resources, _open_activations(request, update, reporter))
    parts = in_order(
        guard=guard,
        turns=turns,
        update=update,
        fusion=fusion,
        loading=loading,
        activations=activations,
        audit=_held(resources, _open_audit(request, session, training)),
        trace=_held(resources, _open_trace(request, session, training)),
        tracking=tracking,
        explanation=_held(resources, _open_explanation(request, session, training)),
        pacing=pacing,
        reporter=reporter,
    )
    if options.shards:  # which checkpoints need not know
        copies, run = "twice" if options.redundancy == "peer" else "once", request.settings.reduction.bucket
        sharding = f"sharded in runs of {run:,} bytes and kept {copies}"
        of_each = " within each worker" if options.hybrid else ""
        what = f"with the parameters sharded{of_each}" if options.shards_parameters else "sharded"
        signature = {**signature, "optimizer": f"{signature['optimizer']}, {sharding.replace('sharded', what, 1)}"}
    if update.sharded is not None:
        signature = {**signature, "blocks": update.sharded.names}
    if update.spot_checker is not None:  # all choose the same virtual nodes
        signature = {**signature, "verify": str(update.spot_checker.sample)}
    signature = {**signature, "samples": describe_samples(options, samples)}
    if session.coordinated and request.bitwise and samples is not None:
        signature["contents"] = describe_contents(request.dataset, source, samples=samples)
    membership = Membership(session, training, checkpointer, signature, stopwatch)
    membership.parts = parts
    state = session.state
    state.total_steps, state.changes = total_steps, training.changes
    state.floor = checkpointer.floor
    return Context(
        request=request,
        total_steps=total_steps,
        session=session,
        situation=situation,
        loading=loading,
        update=update,
        training=training,
        membership=membership,
        checkpointer=checkpointer,
        reporter=reporter,
        stopwatch=stopwatch,
        guard=guard,
        parts=parts,
        fusion=fusion,
        turns=turns,
        pacing=pacing,
        tracking=tracking,
        layers=layers,
        profiling=profiling,
    )


def _held(resources: ExitStack, part: _Part) -> _Part:
    """A part that is on, to be closed with the run, however far its set-up comes."""
    if part is not None:
        resources.callback(part.close)
    return part


def _check_states(request: Request, session: AnySession) -> None:
    """See that a joiner, and whoever begins from a checkpoint, gets all that optimizers and schedulers keep."""
    options = request.options
    lost = find_lost_state(request.optimizer, options.scheduler, options.state)
    if lost is None:
        return
    if session.coordinated or choose_policy(options.checkpoint, request.environment) is not None:
        raise ConfigurationError(lost)
    session.note("warning", lost)


def connect(context: Context) -> None:
    """Enter the job, or wait beside it until it has a place."""
    session, request = context.session, context.request
    warning = None
    if session.coordinated:
        profile, warning = given_profile(request.environment, context.situation)
        micro_batch = context.situation.micro_batch
        if profile is not None:
            session.state.pace = seconds_for(profile, micro_batch)
        cut = context.update.cut
        if cut is not None:
            if profile is not None:
                cut.costs = replace(cut.costs, seconds=block_seconds(profile, micro_batch, cut.names))
            session.state.classes, session.state.capacity = cut.classes(), request.capacity
        if request.bitwise:
            session.state.self_test = probe_bits(request.device)
    try:
        session.start()
    except VirtualFlowError as error:
        error.of_script = False
        raise
    if warning is not None:
        session.note("warning", warning)


def _open_source(request: Request, orders: Orders | None, resources: ExitStack) -> Source:
    options, dataset = request.options, request.dataset
    drop_last = options.drop_last
    if request.environment.profile_out is not None:
        # A short batch is no measure of a step, and may be one that the script cannot train on.
        drop_last |= has_indices(dataset) and (len(dataset) if orders is None else orders.length) >= options.batch_size
    source = open_source(
        dataset,
        batch_size=options.batch_size,
        virtual_nodes=request.virtual_nodes,
        seed=options.seed,
        shuffle=options.shuffle,
        drop_last=drop_last,
        epochs=options.epochs,
        options=options.loader,
        orders=orders,
    )
    resources.callback(source.close)
    return source


def _open_update(request: Request, session: AnySession, resources: ExitStack) -> Update:
    options = request.options
    optimizing = OptimizerOptions(
        request.optimizer,
        scheduler=options.scheduler,
        scheduler_interval=options.scheduler_interval,
        scaler=options.scaler,
        clip_norm=options.clip_grad_norm,
        clip_value=options.clip_grad_value,
        shard_copies=(2 if options.redundancy == "peer" else 1) if options.shards else 0,
        alike=request.bitwise,
        shards_values=options.shards_parameters,
        meta=request.meta,
        averages=check_averages(request.model, options.state) if options.shards_parameters else {},
        host=host_memory(device_of(request.model)) if request.host_optimizer else None,
    )
    sample = request.environment.verify
    spot_checker = (
        SpotChecker(request.model, seed=options.seed, virtual_nodes=request.virtual_nodes, sample=sample)
        if sample
        else None
    )
    update = Update(
        request.model,
        optimizing,
        request.summation,
        micro_batch=request.micro_batch,
        reduction=replace(options.reduction(request.settings.reduction), scratch=request.scratch),
        # Alone, or where other bits are as good, there is nobody to compare with.
        watch=request.settings.watch
        if request.bitwise and session.coordinated and not options.shards_parameters
        else None,
        spot_checker=spot_checker,
        cut=_held(resources, _open_cut(request)),
        sums=choose_sums(request.model, options.buffers),
        sharded=partial(_open_sharded, request) if options.shards_parameters else None,
    )
    resources.callback(update.close)
    return update


def _open_sharded(request: Request, values: SlicedValues, row: Row) -> ShardedParameters:
    with installed():
        from virtualflow.memory.activations import find_blocks
    shard = request.options.shard
    reduction = replace(request.settings.reduction, scratch=request.scratch)
    summation = request.summation
    size = sum(p.numel() * summation.precision.of(p.dtype).itemsize for p in request.model.parameters())
    blocks, _ = find_blocks(
        request.model,
        shard.blocks if isinstance(shard, ShardParameters) else None,
        argument="name its blocks: shard=vf.ShardParameters({})",
        compiled="compile its blocks, as in: for block in model.blocks: block.compile()",
        opaque=True,
    )
    return ShardedParameters(
        request.model,
        blocks,
        values,
        row,
        summation,
        request.settings.communicator.wait_slice,
        plan_offload(device_of(request.model), size, reduction) if request.scratch is not None else None,
        hybrid=request.options.hybrid,
    )


def _open_cut(request: Request) -> BackwardCut | None:
    backward = request.backward
    if backward is None:
        return None
    with installed():
        from virtualflow.memory.activations import find_blocks
    blocks, _ = find_blocks(
        request.model,
        backward.blocks,
        argument="name its blocks: vf.PartialBackward({})",
        compiled="train the model as it is, or leave out backward=",
    )
    return BackwardCut(request.model, blocks, backward, request.virtual_nodes)


def _open_guard(request: Request, session: AnySession, companions: Companions) -> Guard:
    options = request.options
    return Guard(
        request.model,
        request.optimizer,
        travels=companions.knows,
        schedulers=[
            *schedulers_of(options.scheduler),
            *(s for s in options.state.values() if isinstance(s, LRScheduler)),
        ],
        sharded=options.shards,
        divided=options.shards_parameters,
        settings=request.settings.guard,
        warn=partial(session.note, "warning"),
    )


def _open_activations(request: Request, update: Update, reporter: Reporter) -> PlannedActivations | None:
    memory, device = request.memory, device_of(request.model)
    if memory is None or not memory.plans_activations:
        return None
    from virtualflow.memory.activations import Activations, ActivationSettings, bytes_of_state

    def optimizer_bytes() -> int:
        shards, there = update.shards, HOST if memory.optimizer == "host" else device
        if shards is None:
            return bytes_of_state(request.optimizer.state.values(), there)
        here = bytes_of_state(shards.states_here, there)
        return here if update.sharded is None else math.ceil(here / (shards.portion or 1.0))

    activations = Activations(
        request.model,
        device,
        memory,
        micro_batch=request.micro_batch,
        virtual_nodes=request.virtual_nodes,
        optimizer_bytes=optimizer_bytes,
        settings=request.settings.activations or ActivationSettings(),
        divided=update.sharded,
        copies=2 if request.options.redundancy == "peer" else 1,
        precision=request.summation.precision,
    )
    return PlannedActivations(activations, reporter)


def _open_layers(request: Request) -> tuple[Chain, LayerMajor] | None:
    memory = request.memory
    if memory is None or not memory.layer_major:
        return None
    from virtualflow.memory.activations import Carrier, Chain, LayerMajor

    chain = Chain(request.model, memory.blocks)
    if request.device.type == "cuda":
        chain.pin()
    return chain, LayerMajor(chain, Carrier(request.device), request.summation, memory.budget)


def _open_fusion(request: Request, source: Source) -> MicrobatchFusion | None:
    cap = request.environment.max_fused or request.options.max_fused
    memory = request.memory
    by_themselves = request.backward is not None or (memory is not None and memory.device is not None)
    if request.bitwise or not source.fuses or by_themselves or cap == 1:
        return None
    return MicrobatchFusion(
        request.model,
        cap,
        request.micro_batch,
        request.options.batch_norm,
    )


def _open_checkpointer(
    request: Request, identity: JobIdentity, session: AnySession, trains: bool, resources: ExitStack
) -> Checkpointer:
    policy = choose_policy(request.options.checkpoint, request.environment) if trains else None
    if policy is not None:
        policy = policy_of_run(policy, request.run, [former.checkpoints for former in request.former])

    def report(state: m.CheckpointState) -> None:
        session.send(m.Checkpointed(state), keep=True)

    # Only workers that come to the same bits compare their states, and only states that are not divided.
    compared = request.bitwise and session.coordinated and not request.options.shards_parameters
    doubt = request.settings.watch.sweep if compared else 0
    copies = _open_copies(request, identity, session) if trains else None
    checkpointer = Checkpointer(
        policy,
        identity,
        session.note,
        report,
        doubt,
        copies,
        joins=session.coordinated,
        volume=request.settings.volume,
        only_reads=request.over is not None,
    )
    resources.callback(checkpointer.flush, request.settings.stop_grace)
    return checkpointer


def _open_copies(request: Request, identity: JobIdentity, session: AnySession) -> MemoryCopies | None:
    """Copies of the state in the coordinator's memory, if they are wanted; a sharded optimizer's would not be whole."""
    environment, settings = request.environment, request.settings
    if not environment.checkpoint_memory or isinstance(session, StandaloneSession) or request.options.shards:
        return None
    assert environment.coordinator is not None
    link = session.link

    def limit() -> int:
        return 0 if link.welcome is None else link.welcome.memory_copy

    def tell(text: str) -> None:
        session.note("warning", text)

    place = CopyClient(environment.coordinator, environment.credential, settings.copy)
    return MemoryCopies(place, limit, session.incarnation, identity, tell, settings.memory_copy)


def _open_profiling(request: Request, samples: int | None, situation: Situation) -> Profiling | None:
    if request.environment.profile_out is None:
        return None
    return Profiling(
        request.model,
        request.optimizer,
        request.dataset,
        request.options,
        request.environment,
        virtual_nodes=request.virtual_nodes,
        situation=situation,
        samples=samples,
        settings=request.settings,
    )


def _open_audit(request: Request, session: AnySession, training: Training) -> Audit | None:
    directory = request.environment.audit_dir
    if not session.coordinated or directory is None:
        return None
    return Audit(directory, session, training, request.run)


def _open_explanation(request: Request, session: AnySession, training: Training) -> Explanation | None:
    path = request.environment.explain_out
    return None if path is None else Explanation(path, session, training)


def _open_tracking(request: Request, session: AnySession, training: Training) -> Tracking | None:
    told, trackers = request.environment, request.options.trackers
    trains = told.trace_dir is None and told.profile_out is None and told.explain_out is None and request.over is None
    return Tracking(trackers, session, training, request.settings.tracking) if trackers and trains else None


def _open_trace(request: Request, session: AnySession, training: Training) -> TraceWriter | None:
    environment = request.environment
    if environment.trace_dir is None or environment.profile_out is not None or request.over is not None:
        return None
    opened = Opened(
        session.worker,
        session.incarnation,
        request.virtual_nodes,
        request.options.seed,
        request.options.batch_size,
        request.reproducibility,
        str(torch.__version__),
        os.environ.get("PYTHONHASHSEED", ""),
    )
    earlier = sum(former.result.step for former in request.former)
    return TraceWriter(environment.trace_dir, opened, training, environment.trace_repeat, earlier)
