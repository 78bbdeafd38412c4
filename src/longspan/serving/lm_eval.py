"""Tasks of lm-evaluation-harness on any model that a pool serves."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from .._utils.progress import track
from ..models.sampling import Sampling
from .pool import Pool
from .text import Stops

START = -1  # stands for the start token, which a pool adds itself


class Judge(TemplateLM):
    """A model as lm-evaluation-harness takes it.

    A text without a beginning is scored after the first token that ends a stream, as the harness does with models of
    transformers, or after the start token of a model of bytes. Texts are read whole, not in windows.

    Args:
        pool: The pool of the model.
        codec: Text to tokens and back, such as ``serving.text.Bytes``.

    Raises:
        ValueError: The model has neither a start token nor one that ends a stream.
    """

    def __init__(self, pool: Pool, codec: Any):
        super().__init__()
        self.pool, self.codec = pool, codec
        if pool.model.start is None and not codec.ends:
            raise ValueError("the model has no start token and its tokenizer no end; pass --stop TOKEN")

    @property
    def eot_token_id(self) -> int:
        """The token before the first one of a text."""
        return self.codec.ends[0] if self.codec.ends else START

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, with special ones at its beginning unless ``add_special_tokens`` is False."""
        return self.codec.encode_more(string) if add_special_tokens is False else self.codec.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return self._scored([(before, after) for _, before, after in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text in nats."""
        texts = [([self.eot_token_id], self.tok_encode(one.args[0], False)) for one in requests]
        return [score for score, _ in self._scored(texts)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text up to the first of its stop strings, which is not part of it."""
        return list(track(self._continued(requests), len(requests), "answers"))

    def _continued(self, requests: Sequence[Any]) -> Iterator[str]:
        for text, given in (one.args for one in requests):
            until = given.get("until") or []
            stops = Stops([until] if isinstance(until, str) else until)
            sampling = Sampling(temperature=float(given.get("temperature", 0.0)) if given.get("do_sample") else 0.0)
            count = int(given.get("max_gen_toks", given.get("max_new_tokens", 256)))
            decoding, pieces = self.codec.decoder(), list[str]()
            for token in self.pool.stream(
                self.codec.encode(text), max_new_tokens=count, sampling=sampling, stop=self.codec.ends
            ):
                pieces.append(stops.add(decoding.add(token)))
                if stops.stopped:
                    break
            yield "".join(pieces) + stops.add(decoding.end()) + stops.end()

    def _scored(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return for tokens after others their log-probability, and whether each is the most likely one."""
        found = []
        for begin in track(range(0, len(texts), self.pool.slots), -(-len(texts) // self.pool.slots), "texts"):
            some = texts[begin : begin + self.pool.slots]
            streams = []
            for before, after in some:
                tokens = [token for token in (*before, *after) if token != START]
                streams += self.pool.submit(tokens, max_new_tokens=0, score_prompt=True, top=1)
            self.pool.run()
            for stream, (_, after) in zip(streams, some, strict=True):
                if stream.finished == "error":
                    raise RuntimeError(f"the model failed: {stream.error}")
                first = len(stream.prompt) - len(after)
                tops = stream.prompt_top_log_probs[first:]
                best = all(top and token in top for top, token in zip(tops, after, strict=True))
                found.append((math.fsum(score or 0.0 for score in stream.prompt_log_probs[first:]), best))
        return found


def evaluate(
    pool: Pool, codec: Any, tasks: Sequence[str], *, folder: str = "", examples: int = 0, shots: int | None = None
) -> dict[str, dict[str, float]]:
    """Run tasks -> the values and standard errors of their metrics.

    Args:
        pool: The pool of the model.
        codec: Text to tokens and back.
        tasks: Names of tasks.
        folder: Where YAML files of further tasks are; "" for none.
        examples: The first examples of each task; 0: all.
        shots: Examples before each question; None: as the task says.

    Raises:
        ValueError: A task is unknown, or the model is without a start token and an end.
    """
    manager = TaskManager(include_path=folder or None)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(f"unknown task {unknown[0]!r}; lm-eval ls tasks lists them, and --task-path adds a folder")
    options = {"num_fewshot": shots, "limit": examples or None, "task_manager": manager}
    run: Any = lm_eval.simple_evaluate  # its type names no arguments
    found = run(Judge(pool, codec), tasks=list(tasks), **options)
    return {
        task: {name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, int | float)}
        for task, values in found["results"].items()
    }
