"""Errors as people see them: with the line of their script, and with what to do about those of others."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from virtualflow.errors import (
    ConfigurationError,
    CoordinatorAbsent,
    VirtualFlowError,
    advise,
    describe,
    line_of_script,
    remedy,
)


def raised(path: Path, code: str, *, error: BaseException) -> BaseException:
    """``error``, raised by ``fail()`` in a script of that code."""

    def fail() -> None:
        raise error

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    with pytest.raises(type(error)) as found:
        exec(compile(code, str(path), "exec"), {"fail": fail})
    # From the script inward: a test is code of nobody's installation, too.
    trace = found.value.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    assert trace is not None
    return found.value.with_traceback(types.TracebackType(None, trace.tb_frame, trace.tb_lasti, trace.tb_lineno))


def test_an_error_of_the_library_names_the_line_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(tmp_path / "train.py", "x = 1\n\nfail()\n", error=ConfigurationError("batch_size is 0"))
    assert describe(error) == "batch_size is 0 (train.py:3)"
    nested = raised(tmp_path / "jobs" / "train.py", "fail()\n", error=ConfigurationError("batch_size is 0"))
    monkeypatch.chdir(tmp_path)
    assert describe(nested) == "batch_size is 0 (jobs/train.py:1)"


def test_an_error_that_is_about_no_line_names_none(tmp_path: Path) -> None:
    error = raised(tmp_path / "train.py", "fail()\n", error=CoordinatorAbsent("nobody answers"))
    assert describe(error) == "nobody answers"


def test_an_error_that_was_not_raised_names_no_line() -> None:
    assert describe(VirtualFlowError("a step was left")) == "a step was left"


def test_what_is_installed_is_not_the_script(tmp_path: Path) -> None:
    where = tmp_path / "lib" / "site-packages" / "other.py"
    error = raised(where, "fail()\n", error=ConfigurationError("no"))
    assert f"{where.name}:" not in (line_of_script(error) or "")


def test_advice_stands_behind_the_error_and_once() -> None:
    with pytest.raises(KeyError) as found:
        raise KeyError("RANK")
    for _ in range(2):
        advise(found.value)
    assert describe(found.value).startswith("KeyError: 'RANK'; what to do: ")
    assert len(found.value.__notes__) == 1


def test_an_error_of_the_scripts_own_gets_no_advice() -> None:
    with pytest.raises(ValueError, match="sour") as found:
        raise ValueError("the data ran sour")
    advise(found.value)
    assert describe(found.value) == "ValueError: the data ran sour"


WHERE = 'Traceback (most recent call last):\n  File "/a/train.py", line 3, in <module>\n'


@pytest.mark.parametrize(
    ("raised", "advice"),
    [
        ("ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK "
         "expected, but not set", "virtualflow run --workers N"),
        ("ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
         "remove init_process_group"),
        ("    rank = int(os.environ['RANK'])\n               ~~~~^^^\nKeyError: 'RANK'", "no RANK"),
        ("    rank = int(os.environ.get('LOCAL_RANK'))\n           ^^^^\nTypeError: int() argument must be a string",
         "no RANK"),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float", "tensor.float()"),
        ("RuntimeError: Input type (double) and bias type (float) should be the same", "tensor.float()"),
        ("RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
         "pass device="),
        ("RuntimeError: Expected all tensors to be on the same device, but found at least two devices", "pass device="),
        ("RuntimeError: stack expects each tensor to be equal size, but got [1] at entry 0 and [3] at entry 1",
         "collate_fn="),
        ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", "torch.no_grad()"),
        ("RuntimeError: Trying to backward through the graph a second time (or ...", "detach()"),
        ("    for x, y in step:\n        ^^^^\nValueError: too many values to unpack (expected 2)", "inner loop"),
        ("ValueError: Expected more than 1 value per channel when training, got input size [1, 3]", "batch_size"),
        ("RuntimeError: torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks.", "memory= out"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "virtual_nodes"),
    ],
    ids=lambda text: text.strip().split("\n")[-1][:40],
)  # fmt: skip
def test_what_is_said_of_errors_of_others(raised: str, advice: str) -> None:
    assert advice in (remedy(WHERE + raised) or "")


@pytest.mark.parametrize(
    "raised",
    [
        "KeyError: 'train'",
        "    a, b = parts\n    ^^^^\nValueError: too many values to unpack (expected 2)",
        "    n = int(config.get('layers'))\n    ^^^\nTypeError: int() argument must be a string",
        "RuntimeError: the data ran sour",
    ],
)
def test_nothing_is_said_of_errors_that_are_not_known(raised: str) -> None:
    assert remedy(WHERE + raised) is None


def test_only_the_error_that_ended_it_counts() -> None:
    first = f"{WHERE}KeyError: 'RANK'\n\nDuring handling of the above exception, another exception occurred:\n\n"
    assert remedy(f"{first}{WHERE}RuntimeError: sour") is None
