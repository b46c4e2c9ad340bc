"""`tidegate serve` with the default model, from the command line to the official client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tidegate.observe.records import read_records
from tidegate.observe.steplog import read_steps

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"
COUNT = "1, 2, 3, 4,"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def process(logs: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    config = logs / "tidegate.toml"
    files = [f'{name} = "{logs}/{name}.jsonl"\n' for name in ("decisions", "records", "steps")]
    config.write_text("[observe]\n" + "".join(files))
    command = [sys.executable, "-m", "tidegate", "serve", "--port", "0", "--kv-memory", "64MiB", "--max-num-seqs", "8"]
    command += ["--config", str(config)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | paths, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            ready = server.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", ready)
            assert found is not None, ready
            yield server, found[0]
        finally:
            server.kill()


@pytest.fixture(scope="module")
def client(process: tuple[subprocess.Popen[str], str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{process[1]}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def test_a_chat_answer_makes_sense(client: openai.OpenAI) -> None:
    question = "What is the capital of France? Answer in one word."
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=24
    )
    assert "Paris" in (answer.choices[0].message.content or "")


def test_greedy_streams_say_what_greedy_answers_say(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=COUNT, temperature=0, max_tokens=12).choices[0].text
    chunks = client.completions.create(model=MODEL, prompt=COUNT, temperature=0, max_tokens=12, stream=True)
    assert whole.startswith(" 5, 6, 7")
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    choice = client.completions.create(model=MODEL, prompt=COUNT, temperature=0, max_tokens=30, stop=[", 7"]).choices[0]
    assert (choice.text, choice.finish_reason) == (" 5, 6", "stop")


def test_a_schema_is_followed_even_by_a_hot_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a person."}],
        temperature=1.5,
        seed=11,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert set(person) == {"name", "age"}
    assert person["age"] <= 120
    assert answer.choices[0].finish_reason == "stop"


def test_a_schema_that_cannot_be_followed_is_refused_at_the_door(client: openai.OpenAI) -> None:
    schema = {"type": "string", "minLength": 5, "maxLength": 2}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "none", "schema": schema}},
        )


def test_logprobs_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say hello."}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    text = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert text == (answer.choices[0].message.content or "").encode()
    for entry in logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


def test_a_seed_repeats_and_copies_differ(client: openai.OpenAI) -> None:
    def sample() -> list[str]:
        answer = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8, n=3, seed=5)
        return [choice.text for choice in answer.choices]

    first = sample()
    assert sample() == first
    assert len(set(first)) == 3


def test_more_clients_than_seats_all_get_their_own_answer(client: openai.OpenAI) -> None:
    def count_from(start: int) -> str:
        prompt = ", ".join(str(start + i) for i in range(5)) + ","
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6)
        return answer.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(count_from, range(10, 34, 2)))
    assert all(text.startswith(f" {start + 5}") for start, text in zip(range(10, 34, 2), together, strict=True))


def test_extreme_sampling_harms_nobody(client: openai.OpenAI) -> None:
    extremes: list[dict[str, object]] = [
        {"temperature": 2, "top_p": 1e-6},
        {"temperature": 1e-5, "min_p": 1},
        {"top_k": 1 << 31, "repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": -2},
        {"repetition_penalty": 0.01, "seed": -(1 << 63)},
        {"logit_bias": {str(i): -100.0 for i in range(1000)}, "logprobs": 20, "seed": (1 << 63) - 1},
        {"min_tokens": 5, "stop_token_ids": list(range(64)), "ignore_eos": True},
    ]
    for extra in extremes:
        answer = client.completions.create(model=MODEL, prompt="x", max_tokens=5, extra_body=extra)
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 5


def test_the_warm_up_is_in_nobodys_numbers_and_sigterm_ends_the_server(
    process: tuple[subprocess.Popen[str], str], client: openai.OpenAI, logs: Path
) -> None:
    server, url = process
    metrics = httpx.get(f"{url}/metrics").text
    assert 'tenant="default"' in metrics
    assert "warm-up" not in metrics
    assert "tidegate_kv_used_blocks 0.0" in metrics
    stream = client.completions.create(model=MODEL, prompt=COUNT, temperature=0, max_tokens=20, stream=True)
    next(stream)
    server.send_signal(signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert server.wait(30) == 0
    records = read_records(logs / "records.jsonl")
    decisions = [json.loads(line) for line in (logs / "decisions.jsonl").read_text().splitlines()]
    assert len(records) == sum(d["event"] == "finished" for d in decisions) > 5
    assert records[-1].output_tokens == 20
    assert "warm-up" not in {r.tenant for r in records}
    steps = read_steps(logs / "steps.jsonl")
    assert sum(s.prefill_tokens + s.decodes for s in steps) >= sum(r.output_tokens for r in records)
    assert all(s.seconds > 0 and s.running + s.waiting >= 0 and s.free_blocks > 0 for s in steps)
    assert [s.start_s for s in steps] == sorted(s.start_s for s in steps)
    assert records[0].arrival_s < steps[0].start_s < steps[-1].start_s < records[-1].finish_s, "one clock"
