"""``/metrics``, under vLLM's names, so that dashboards made for vLLM show an artifact's server as well."""

from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eagle3.runner.serve.jobs import Job

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "generation_tokens": ("generation_tokens", "Generated tokens."),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens that were looked for in the KV cache."),
    "prefix_cache_hits": ("reused_prompt_tokens", "Prompt tokens that the KV cache held."),
    "spec_decode_num_drafts": ("num_drafts", "Chains of draft tokens that were verified."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft tokens."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Draft tokens that were accepted."),
    "spec_decode_num_lookup_draft_tokens": ("num_lookup_draft_tokens", "Draft tokens of the lookup."),
    "spec_decode_num_lookup_accepted_tokens": (
        "num_lookup_accepted_tokens", "Draft tokens of the lookup that were accepted.",
    ),
}  # fmt: skip
"""The field of ``GenerationStats`` and the text of each counter, by its name."""

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class Metrics:
    """The metrics of one model. Each has the label ``model_name``."""

    def __init__(self, model_name: str):
        self._registry, self._name = CollectorRegistry(), model_name
        self.running = self._of(Gauge, "num_requests_running", "Requests whose answers are being generated.")
        self.waiting = self._of(Gauge, "num_requests_waiting", "Requests that wait.")
        self._counters = {name: self._of(Counter, name, text) for name, (_, text) in COUNTERS.items()}
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position in the chain.",
            ["model_name", "position"], registry=self._registry,
        )  # fmt: skip
        self._success = Counter(
            "vllm:request_success", "Requests that ended, by reason.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._first = self._histogram("time_to_first_token_seconds", "Seconds from the request to its first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Decoding, a token.")
        self._whole = self._histogram("e2e_request_latency_seconds", "Seconds from the request to its end.")
        self._queued = self._histogram("request_queue_time_seconds", "Seconds in the queue.")
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Seconds from leaving the queue to the first token."
        )
        self._decode = self._histogram("request_decode_time_seconds", "Seconds from the first token to the last.")
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._generation_size = self._histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)

    def _of(self, kind: type[Metric], name: str, text: str, **more: Any) -> Metric:
        return kind(f"vllm:{name}", text, ["model_name"], registry=self._registry, **more).labels(self._name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return self._of(Histogram, name, text, buckets=buckets)

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Take the numbers of running and waiting requests from these functions when metrics are read."""
        self.running.set_function(running)
        self.waiting.set_function(waiting)

    def add(self, job: Job) -> None:
        """Count a job that ended."""
        times, outcome = job.times, job.outcome
        if outcome is None:  # nothing was computed for the job
            self._success.labels(self._name, "abort").inc()
            return
        stats = outcome.stats
        self._success.labels(self._name, outcome.finish_reason).inc()
        for name, (source, _) in COUNTERS.items():
            self._counters[name].inc(getattr(stats, source))
        for position, count in enumerate(stats.accepted_at):
            self._accepted_at.labels(self._name, str(position)).inc(count)
        self._queued.observe(times.started - times.submitted)
        self._whole.observe(times.ended - times.submitted)
        self._prompt_size.observe(stats.prompt_tokens)
        self._generation_size.observe(stats.generation_tokens)
        if times.first_token:
            self._first.observe(times.first_token - times.submitted)
            self._prefill.observe(times.first_token - times.started)
            self._decode.observe(times.ended - times.first_token)
            if stats.generation_tokens > 1:
                self._between.observe((times.ended - times.first_token) / (stats.generation_tokens - 1))

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)
