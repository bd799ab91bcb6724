"""The served models, the engine and the log, without HTTP: a request becomes jobs, and ended jobs become answers."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from smoothcert import __version__
from smoothcert.certification.serve.engine import Engine, Job
from smoothcert.certification.serve.log import CertificateLog
from smoothcert.certification.serve.requests import Limits, RefusedError
from smoothcert.certification.serve.rule import Plan, Question, make_plan
from smoothcert.certification.settings import CertifySettings, make_counter
from smoothcert.certification.subject import Subject
from smoothcert.data import scaled_side
from smoothcert.data.decoding import Decoder
from smoothcert.errors import RequestError
from smoothcert.smoothing.batch_dependence import refuse_unsound
from smoothcert.smoothing.certificate import MOST_VOTES
from smoothcert.smoothing.rules import votes_per_look
from smoothcert.smoothing.votes import VoteCounter
from smoothcert.training.checkpoint import InputSpec, tensors_digest

DIGEST = 12
"""Number of characters of a digest that name a model in requests and in the log."""
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper limits, in seconds, of the histogram of times to an answer."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A classifier that is ready to vote."""

    name: str
    digest: str
    counter: VoteCounter
    decoder: Decoder
    class_names: tuple[str, ...] | None
    device: torch.device
    settings: CertifySettings

    @classmethod
    def of(
        cls,
        name: str,
        subject: Subject,
        spec: InputSpec,
        dataset: str | None,
        device: torch.device,
        settings: CertifySettings,
    ) -> "ServedModel":
        """Serve `subject` as `name`, for the images and classes of `spec`, which are those of `dataset` if it is known.

        A network whose votes are not independent is refused, as `certify` refuses it.
        """
        shape = spec.shape
        model = subject.classifier
        recipe = settings.completed({}, device, shape, subject.defaults)
        if subject.denoiser is not None:
            subject.denoiser.check(shape, recipe.sigma, recipe.noise)
        # Random pixels: a network that divides by the standard deviation of an image gives NaN for a plain one.
        tried = torch.rand(1, *shape, device="cpu", generator=torch.Generator().manual_seed(0))
        weights = model.state_dict() if isinstance(model, nn.Module) else None
        digest = tensors_digest(weights) if weights else str(subject.about(tried, device, 1)["classes_sha256"])
        counter = make_counter(model, shape, spec.num_classes, recipe, device)
        if isinstance(counter.classifier, nn.Module):
            counter.classifier.eval()  # for good: several threads use it
        refuse_unsound(counter.classifier, tried.to(device, counter.dtype), name, spec.num_classes)
        decoder = Decoder(*shape, scaled_side(dataset, shape))
        return cls(name, digest, counter, decoder, spec.class_names, device, recipe)

    @property
    def key(self) -> str:
        return self.digest[:DIGEST]

    @property
    def look(self) -> int:
        """Number of votes between two looks, as `Rule` chooses it."""
        return votes_per_look(self.counter, self.device, MOST_VOTES)

    def plan(self, question: Question) -> Plan:
        """The looks of a question; a radius that its votes can never show is a RequestError."""
        return _cached_plan(question, self.counter.noise, self.settings.n0, self.look)

    def name_of(self, cls: int) -> str:
        return self.class_names[cls] if self.class_names else str(cls)

    def log_settings(self) -> dict[str, Any]:
        """What identifies the model in the log, with the noise that the radii in it depend on."""
        return {
            "name": self.name,
            "weights_sha256": self.digest,
            "sigma": self.counter.noise.sigma,
            "noise": self.counter.noise.name,
            "num_classes": self.counter.num_classes,
            "precision": self.settings.precision,
        }

    def describe(self) -> dict[str, Any]:
        """What GET /v1/model says about the model."""
        return {
            **self.log_settings(),
            "norm": self.counter.noise.norm,
            "shape": list(self.decoder.shape),
            "classes": list(self.class_names or map(str, range(self.counter.num_classes))),
            "votes_per_look": self.look,
            "votes_that_choose_the_class": self.settings.n0,
            "votes_per_forward_pass": self.counter.batch_size,
            "device": self.device.type,
        }


_cached_plan: Callable[..., Plan] = lru_cache(maxsize=256)(make_plan)


class Metrics:
    """Counters that Prometheus reads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def observe(self, seconds: float) -> None:
        """Record the time to one answer."""
        name = "smoothcert_answer_seconds"
        for limit in BUCKETS:
            self.add(f'{name}_bucket{{le="{limit:g}"}}', seconds <= limit)
        self.add(f'{name}_bucket{{le="+Inf"}}')
        self.add(f"{name}_sum", seconds)
        self.add(f"{name}_count")

    def text(self, **now: float) -> str:
        """The counters in the text format of Prometheus, and the current values of gauges.

        The lines of one metric are together, and its buckets in the order in which `observe` makes them.
        """
        with self._lock:
            counts = sorted(self._counts.items(), key=lambda item: item[0].partition("{")[0])
        gauges = [(f"smoothcert_{name}", value) for name, value in now.items()]
        return "".join(f"{name} {value:.15g}\n" for name, value in (*counts, *gauges))


class Service:
    """Models by name, one engine for all of them, an optional log, and limits."""

    def __init__(self, models: Sequence[ServedModel], limits: Limits = Limits(), log: Path | None = None) -> None:
        if len({model.name for model in models}) < len(models):
            raise RequestError(
                f"expected runs with different names, got {', '.join(model.name for model in models)}; "
                "name each once, or rename a folder"
            )
        if len({model.key for model in models}) < len(models):  # which requests and the log name
            raise RequestError("expected runs with different weights, got the same weights twice; name each run once")
        self.models = tuple(models)
        self.limits = limits
        self.metrics = Metrics()
        self.log = CertificateLog(log, {model.key: model.log_settings() for model in models}) if log else None
        self.engine = Engine(limits.queue, self._record)

    def warm_up(self) -> None:
        """Load what the first answer needs, so that it takes no longer than the next."""
        for model in self.models:
            model.plan(Question(min(10_000, self.limits.votes), 0.001))
            zeros = torch.zeros(1, *model.decoder.shape, device=model.device)
            model.counter.count(zeros, [(0, 0)], "select", model.settings.n0)

    def model(self, name: str | None) -> ServedModel:
        """The model with a name or digest; the first one for None."""
        for model in self.models:
            if name is None or name in (model.name, model.key, model.digest):
                return model
        raise RefusedError(404, f"model: expected {' or '.join(m.name for m in self.models)}, got another name")

    def submit(
        self,
        model: ServedModel,
        images: Sequence[Tensor],
        plan: Plan,
        milliseconds: float | None,
        notify: Callable[[Job], None],
    ) -> list[Job]:
        """Accept the images of a request, or none of them (QueueFullError)."""
        deadline = time.monotonic() + (milliseconds or self.limits.milliseconds) / 1000
        jobs = [Job(model.counter, image.to(model.device), plan, deadline, notify) for image in images]
        self.engine.submit(jobs)
        return jobs

    def _record(self, job: Job) -> None:
        """Count and log an ended job; called once per job by the thread of the engine."""
        model = next(model for model in self.models if model.counter is job.counter)
        seconds = time.monotonic() - job.accepted
        certificate = job.certificate()
        if job.ending == "failed":
            outcome = "failed"
        elif certificate.abstained:
            outcome = "abstained"
        else:
            outcome = "certified"
        self.metrics.add(f'smoothcert_answers_total{{outcome="{outcome}",ended="{job.ending}"}}')
        self.metrics.add("smoothcert_votes_total", certificate.n0 + certificate.n)
        self.metrics.observe(seconds)
        job.seconds = seconds
        if self.log is not None and job.ending != "failed":
            try:
                self.log.append(model.key, job.plan.question, certificate, str(job.ending), seconds)
            except Exception:  # the answer is still right
                self.metrics.add("smoothcert_log_errors_total")
                logging.getLogger("smoothcert.serve").exception("an answer could not be logged")

    def close(self) -> None:
        """Finish the accepted jobs, then close the log."""
        self.engine.close()
        if self.log is not None:
            self.log.close()


def state(job: Job, model: ServedModel) -> dict[str, Any]:
    """What the last look of a job shows: the votes, and the claim, which is valid although votes may follow."""
    certificate = job.certificate()
    progress = job.progress
    return {
        "class": None if certificate.abstained else certificate.prediction,
        "name": None if certificate.abstained else model.name_of(certificate.prediction),
        "abstained": certificate.abstained,
        "radius": certificate.radius,
        "lower_bound": 0.0 if progress is None else max(0.0, 1 - progress.error_bound),
        "leading_class": None if progress is None else progress.cls,
        "votes": {str(cls): count for cls, count in certificate.votes},
        "votes_used": certificate.n + (0 if progress is None else certificate.n0),
    }


def answer(job: Job, model: ServedModel, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The answer for one image."""
    if job.ending == "failed":
        return {"error": job.error}
    asked = job.plan.question.radius
    last_look = state(job, model)
    certified = {} if asked is None else {"certified": last_look["radius"] >= asked}
    return {
        **last_look,
        **certified,
        "ended": job.ending,
        "milliseconds": round(job.seconds * 1000, 3),
        "notes": [*notes],
    }


def context(plan: Plan, model: ServedModel) -> dict[str, Any]:
    """What all answers of a request share: the model, the rule, and what the answers guarantee."""
    q = plan.question
    noise = plan.noise
    return {
        "model": {"name": model.name, "digest": model.digest, "sigma": noise.sigma, "noise": noise.name},
        "rule": {"name": q.rule, "radius": q.radius, "votes": q.votes, "alpha": q.alpha, "looks": len(plan.looks)},
        "norm": noise.norm,
        "seeds": "from the operating system, new for each image, never from the request",
        "guarantee": f"with probability at least {1 - q.alpha:.10g} over the noise, the smoothed classifier gives "
        f"this class to every image closer than the radius in {noise.norm} (pixels in [0, 1])",
        "version": __version__,
    }
