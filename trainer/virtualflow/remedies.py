"""What to do about errors that are not the library's own: PyTorch's and Python's, as scripts new to it meet them.

A table from what a traceback ends with to a sentence, which is put behind the original error. It knows only errors that
say little about their cause, or whose usual remedy is another one with this library.
"""

from __future__ import annotations

import re

_GROUP = (
    "a script needs no process group here, no RANK and no WORLD_SIZE: give vf.elastic the plain model and the whole "
    "dataset, and the library divides each batch among the workers and sums their gradients; remove "
    "init_process_group, DistributedDataParallel, FSDP and DistributedSampler, let run.leader say who prints, and "
    "start the script with: virtualflow run --workers N"
)
_DTYPE = (
    "the batch and the model, or the loss and its target, are of different types; convert the samples in the dataset "
    "(NumPy's numbers are float64: tensor.float()), or the model before its optimizer is made (model.double())"
)
_DEVICE = (
    "the batch and the model are on different devices; move the model before its optimizer is made, and pass device= "
    "to vf.elastic, which brings each micro-batch there"
)
_COLLATE = (
    "samples of these shapes or types make no batch by themselves; pass collate_fn= to vf.elastic, as to a "
    "DataLoader: it gets a list of samples and pads or converts them"
)
_NO_GRADIENT = (
    "the loss depends on nothing that is trained; look for torch.no_grad(), .detach(), .item() or parameters with "
    "requires_grad=False between the model and the loss"
)
_SECOND_BACKWARD = (
    "the loss depends on something that an earlier micro-batch has computed; compute it anew in the inner loop, or "
    "detach() what is kept"
)
_UNPACKING = (
    "the inner loop gets one micro-batch at a time, as collate_fn makes it of the dataset's samples: it has as many "
    "parts as a sample has"
)
_ONE_SAMPLE = (
    "a virtual node has a single sample, and batch norm needs two; use a larger batch_size, fewer virtual_nodes, or "
    "drop_last=True if it is the last batch of an epoch"
)
_MEMORY = (
    "a virtual node's micro-batch does not fit; use more virtual_nodes, which makes it smaller and leaves the batch "
    "as it is, or memory=vf.Memory(...) (virtualflow plan shows what would fit)"
)
_FORKED = 'start loader processes anew instead of by fork: pass multiprocessing_context="spawn" to vf.elastic'

_RANKS = "(?:RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT)"
_CARETS = r"\n(?:[ ~^]*\n)?"
"""Between a line of source and the error that it raised."""

_TABLE = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (rf"environment variable {_RANKS} expected", _GROUP),
        (r"Error initializing torch\.distributed", _GROUP),
        (r"Default process group has not been initialized", _GROUP),
        (rf"KeyError: '{_RANKS}'", _GROUP),
        (rf"{_RANKS}\b[^\n]*{_CARETS}TypeError: int\(\) argument", _GROUP),
        (r"Expected all tensors to be on the same device|is not on the expected device", _DEVICE),
        (r"Input type \([^)]*cuda[^)]*\) and|(?:weight|bias) type \([^)]*cuda", _DEVICE),
        (r"have the same dtype, but got|expected (?:target dtype|scalar type)|Found dtype \w+ but expected", _DTYPE),
        (r"following scalar types: |Input type \([^)]*\) and (?:weight|bias) type", _DTYPE),
        (r"input dtype \([^)]*\) does not match weight dtype", _DTYPE),
        (r"default_collate: batch must contain|each element in list of batch should be of equal size", _COLLATE),
        (r"stack expects each tensor to be equal size", _COLLATE),
        (r"does not require grad and does not have a grad_fn", _NO_GRADIENT),
        (r"Trying to backward through the graph a second time", _SECOND_BACKWARD),
        (rf"for [^\n]+ in [^\n]*\bstep\b[^\n]*{_CARETS}ValueError: (?:not enough|too many) values", _UNPACKING),
        (r"Expected more than 1 value per channel when training", _ONE_SAMPLE),
        (r"CUDA out of memory", _MEMORY),
        (r"Cannot re-initialize CUDA in forked subprocess", _FORKED),
    )
)


def remedy(traceback: str) -> str | None:
    """What to do about the error that a traceback ends with, as one sentence; ``None``: it is not known here."""
    _, _, raised = traceback.rpartition('\n  File "')
    return next((sentence for pattern, sentence in _TABLE if pattern.search(raised)), None)
