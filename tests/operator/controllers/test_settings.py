"""The operator's settings as values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from virtualflow_operator.settings import LeaseSettings, OperatorSettings


def test_the_lease_s_times_keep_their_order() -> None:
    lease = LeaseSettings()
    assert (lease.duration, lease.renew_interval, lease.deadline) == (10, 2.0, 7.0)
    for duration in (3, 10, 3600):
        lease = LeaseSettings(duration=duration)
        assert 0 < lease.renew_interval < lease.call_timeout < lease.deadline < lease.duration
        assert lease.renew_interval + lease.call_timeout < lease.deadline


def test_settings_are_values() -> None:
    with pytest.raises(FrozenInstanceError):
        OperatorSettings().image = "other"  # type: ignore[misc]
    groups = [field.default_factory for field in fields(OperatorSettings) if field.name in {"lease", "queue", "events"}]
    assert all(is_dataclass(group) for group in groups)
