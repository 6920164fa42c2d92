"""What nests deeper than a program can follow: cut alone, out of whatever it comes in, and nothing else with it."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from api_clients import client_of
from fake_api.frontend import deep
from hypothesis import given
from hypothesis import strategies as st
from stage import NAMESPACE, Stage, play

from tiers import slow
from virtualflow_operator.k8s.client import JOBS, PODS, Object
from virtualflow_operator.k8s.nesting import LEFT_OUT, MAX_LEVELS, DeepObjects, cut

MOST_STORED = 10_000
"""Levels that an API server takes."""
TRICKY = st.text(alphabet='{}[]"\\,:a\n☃')
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TRICKY, inner, max_size=3),
    max_leaves=20,
)


def nested(levels: int, inner: str = "1") -> str:
    """Return mappings and lists within one another, in turn."""
    openings = ['{"a":' if level % 2 else "[" for level in range(levels)]
    closings = ["}" if level % 2 else "]" for level in reversed(range(levels))]
    return "".join((*openings, inner, *closings))


def depth(value: Any) -> int:
    levels, current = 0, [value]
    while containers := [item for item in current if isinstance(item, dict | list)]:
        levels += 1
        current = [below for item in containers for below in (item.values() if isinstance(item, dict) else item)]
    return levels


@given(value=JSON, ascii_only=st.booleans())
def test_what_is_not_too_deep_stays_as_it_is(value: Any, ascii_only: bool) -> None:
    text = json.dumps([value] * (MAX_LEVELS + 1), ensure_ascii=ascii_only).encode()
    assert cut(text) is text


@given(value=JSON, levels=st.integers(MAX_LEVELS - 3, MAX_LEVELS + 5), ascii_only=st.booleans())
def test_what_is_too_deep_becomes_a_sentence_and_all_beside_it_stays(value: Any, levels: int, ascii_only: bool) -> None:
    tricky = json.dumps(value, ensure_ascii=ascii_only)
    text = f'{{"before": {tricky}, "deep": {nested(levels, tricky)}, "after": {tricky}}}'
    read, whole = json.loads(cut(text.encode())), json.loads(text)
    assert (read["before"], read["after"]) == (value, value)
    assert depth(read) == min(depth(whole), MAX_LEVELS)
    if depth(whole) <= MAX_LEVELS:
        assert read == whole
    else:
        assert LEFT_OUT in json.dumps(read)


@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 1_200, MOST_STORED, slow(1_000_000)])
def test_however_deep_it_nests_it_can_be_read(levels: int) -> None:
    assert depth(json.loads(cut(nested(levels).encode()))) == MAX_LEVELS


def test_a_text_that_is_no_json_is_left_to_whoever_reads_it() -> None:
    for text in ("{" * 1_000, "]" * 1_000, '{"a":"' * 500, '"' + "[" * 1_000):
        with pytest.raises(ValueError, match=r"Expecting|Extra|Unterminated|Invalid"):
            json.loads(cut(text.encode()))


# Both clients


def pod(name: str) -> Object:
    return {"kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-of-{name}", "generation": 1}}


def test_one_deep_object_of_a_list_or_a_watch_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = json.dumps(pod("good")), json.dumps(pod("bad") | {"spec": "@"}).replace('"@"', nested(MOST_STORED))
    events = [f'{{"type":"ADDED","object":{text}}}\n' for text in (good, bad, good)]
    counted: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            whole = "".join(events).encode()
            for begin in range(0, len(whole), 5_000):
                await response.write(whole[begin : begin + 5_000])
            return response
        text = bad if request.path.endswith("/bad") else f'{{"kind":"PodList","items":[{good},{bad},{good}]}}'
        return web.Response(text=text, content_type="application/json")

    async def run() -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with client_of(f"http://127.0.0.1:{runner.addresses[0][1]}", too_deep=too_deep) as api:
                listed = await api.list(PODS, NAMESPACE)
                watched = [body async for _, body in api.watch(PODS, NAMESPACE, "", "", 10)]
                alone = await api.get(PODS, NAMESPACE, "bad")
        finally:
            await runner.cleanup()
        for bodies in (listed, watched):
            assert [body["metadata"]["name"] for body in bodies] == ["good", "bad", "good"]
            assert depth(bodies[1]) < MAX_LEVELS
            assert bodies[0] == bodies[2] == pod("good")
        assert depth(alone) == MAX_LEVELS

    too_deep = DeepObjects(counted.append)
    with caplog.at_level(logging.WARNING, "virtualflow_operator"):
        asyncio.run(run())
    assert counted == ["Pod"], "once, however often it is read"
    assert [record.getMessage() for record in caplog.records] == [
        f"the Pod {NAMESPACE}/bad is nested deeper than {MAX_LEVELS} levels; what lies deeper is not read"
    ]


def test_an_object_is_told_of_again_when_it_asks_for_something_else() -> None:
    counted: list[str] = []
    too_deep = DeepObjects(counted.append)
    for generation in (1, 1, 2, 2, 1):
        too_deep("VirtualFlowJob", {"uid": "a", "generation": generation})
    assert len(counted) == 2


# The whole operator


def deep_job(stage: Stage, name: str) -> None:
    """Create a job with a deep place in each template and in its volume."""
    stage.apply(name)
    groups = [dict(group) for group in stage.server.find(JOBS, NAMESPACE, name)["spec"]["workerGroups"]]  # type: ignore[index]
    groups[0]["template"] = groups[0]["template"] | {"unknown": deep(MOST_STORED)}
    volume = {"emptyDir": {"unknown": deep(MOST_STORED)}}
    coordinator = {"template": {"spec": {"unknown": deep(MOST_STORED)}}}
    stage.change(name, workerGroups=groups, coordinator=coordinator, checkpoint={"volume": volume})


@pytest.mark.slow
def test_a_deep_job_is_answered_by_its_condition_and_disturbs_no_other(tmp_path: Path) -> None:
    def answered(stage: Stage, name: str) -> bool:
        progressing = stage.condition(name, "Progressing")
        return progressing.get("reason") == "InvalidSpec" and "nested deeper" in progressing["message"]

    async def story(stage: Stage) -> None:
        deep_job(stage, "early")
        stage.apply("digits")
        stage.start()
        await stage.until(lambda: answered(stage, "early"))
        await stage.until(lambda: stage.trains("digits"))
        await stage.watching()
        deep_job(stage, "late")
        await stage.until(lambda: answered(stage, "late"))
        stage.change("digits", replicas=3)
        await stage.until(lambda: stage.trains("digits", 3))
        assert stage.server.drop_watches(JOBS) == 1  # it begins anew with a list
        await stage.watching()
        stage.apply("letters")
        await stage.until(lambda: stage.trains("letters"))
        stage.delete("early")
        stage.delete("late")
        await stage.until(lambda: stage.nothing_left("early") and stage.nothing_left("late"))
        assert stage.made_twice() == set()

    play(tmp_path, story)
