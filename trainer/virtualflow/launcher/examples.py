"""What the help of each command shows of its use; a test parses all of them."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "": (
        "virtualflow check train.py",
        "virtualflow run --workers 3 train.py --lr 0.1",
    ),
    "run": (
        "virtualflow run --workers 3 train.py --lr 0.1",
        "virtualflow run --workers 3 -m package.train --lr 0.1",
        'virtualflow run --schedule "10:=3,20:kill" --report report.json train.py',
        "virtualflow run --checkpoint-dir checkpoints -f job.yaml",
    ),
    "check": (
        "virtualflow check train.py --lr 0.1",
        "virtualflow check --steps 3 --workers 4 -m package.train",
    ),
    "bisect": ("virtualflow bisect traces/alone traces/three-workers",),
    "profile": (
        "virtualflow profile train.py",
        "virtualflow profile --out v100.json --sizes 1,2 train.py --lr 0.1",
    ),
    "plan": (
        "virtualflow plan --device 12GiB train.py",
        "virtualflow plan v100.json --device 12GiB",
        "virtualflow plan v100.json t4.json --devices V100:2,T4:4",
    ),
    "explain": ("virtualflow explain --workers 4 train.py --lr 0.1",),
    "report": ("virtualflow report report.json",),
    "status": ("virtualflow status", "virtualflow status train --json"),
    "scale": ("virtualflow scale 4", "virtualflow scale 4 --job train"),
    "drain": ("virtualflow drain worker-1", "virtualflow drain worker-1 --deadline 30"),
    "coordinator": ("VIRTUALFLOW_TOKEN=secret virtualflow coordinator --host 127.0.0.1 --port 7700 --wanted 2",),
    "turns": ("virtualflow turns /tmp/turns.sock",),
}
"""By the command's name; of none of them: of all."""
