"""What is certified or attacked: the classifier and the images of a call, and what a result file records of them."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, default_collate

from smoothcert.certification.cascade import Cascade
from smoothcert.certification.ensemble import RunEnsemble, names_of, training_of
from smoothcert.certification.smoothed_classifier import SmoothedClassifier, check_without_noise
from smoothcert.classifier import Classifier, device_of, evaluating, first_logits, in_float32, logits_of
from smoothcert.data import DATASETS, UNSPLIT, ImageFiles, Images, Split, images_from_dataset, with_known_classes
from smoothcert.data.images import spread
from smoothcert.errors import RequestError
from smoothcert.io.text import one_line
from smoothcert.models import Denoised, check_outputs, is_code, output_names
from smoothcert.models.ensemble import Ensemble
from smoothcert.noise import sigma_warning
from smoothcert.smoothing.batch_dependence import refuse_unsound
from smoothcert.smoothing.votes import VoteCounter
from smoothcert.training.checkpoint import Run, tensors_digest
from smoothcert.training.denoiser import Denoiser
from smoothcert.training.versions import versions

DIGEST_IMAGES = 100
"""Number of images whose pixels and predicted classes are hashed to identify unnamed data sets and user code."""

Data = Images | Dataset[Any] | DataLoader[Any]
"""Images of ours, a torch Dataset of (image, label) pairs, or a DataLoader of such a Dataset."""


@dataclass(frozen=True)
class Subject:
    """A classifier and where it comes from: a run, several runs, or a user's own module or callable under a name.

    A cascade is the subjects of its `stages`; its classifier is that of the first one.
    """

    classifier: Classifier
    name: str
    run: Run | RunEnsemble | None
    defaults: Mapping[str, Any]
    """Settings that apply unless others are given: sigma, noise, precision, batch_size and compile."""
    stages: "tuple[Subject, ...]" = ()
    denoiser: Denoiser | None = None
    """What is in front of the classifier."""
    class_names: Sequence[str] | None = None
    """Of the outputs of a published classifier, if its files contain them."""

    @property
    def runs(self) -> Sequence[Run]:
        """The run, or the members of an ensemble or of all stages; () for a user's own classifier."""
        if self.stages:
            return [run for stage in self.stages for run in stage.runs]
        if isinstance(self.run, RunEnsemble):
            return self.run.runs
        return () if self.run is None else (self.run,)

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The names of the data sets of its runs, and of the denoiser in front of it."""
        denoisers = () if self.denoiser is None or self.denoiser.run is None else (self.denoiser.run,)
        return tuple(dict.fromkeys(run.recipe.dataset for run in (*self.runs, *denoisers)))

    @classmethod
    def of(cls, model: "Certifiable | Subject", name: str | None = None) -> "Subject":
        """Return what `model` is; a module or callable is called `name`, or else after its own name or class.

        Weights of another precision than float32 are copied: smoothing chooses the precision.
        """
        if not isinstance(name, str | None):
            raise RequestError(f"name: expected a text, got {name!r}; give what the file calls the classifier")
        if isinstance(model, Subject):
            return model
        if isinstance(model, Cascade):
            stages = tuple(cls.of(stage) for stage in model.sources)
            first = stages[0]
            precisions = {str(stage.defaults.get("precision")) for stage in stages}
            if len(precisions) > 1:
                raise RequestError(f"stages: expected one precision, got {', '.join(sorted(precisions))}; choose one")
            return cls(first.classifier, name or "cascade", None, first.defaults, stages)
        if isinstance(model, Run):
            noise = {"sigma": model.recipe.sigma, "noise": model.recipe.noise}
            return cls(model.model, model.recipe.model, model, noise)
        if isinstance(model, RunEnsemble):
            sigma = {} if model.sigma is None else {"sigma": model.sigma}  # the runs may have several
            return cls(model.model, "ensemble", model, {"noise": model.noise, **sigma})
        if isinstance(model, SmoothedClassifier):
            smoothing = {"sigma": model.noise.sigma, "noise": model.noise.name, "precision": model.precision}
            passes = {"batch_size": model.batch_size, "compile": model.compiled}
            return replace(cls.of(model.classifier, name), defaults={**smoothing, **passes})
        check_without_noise(model, "model")
        # The precision is not reduced by default: an unknown network may not tolerate it.
        precision = {"precision": "fp32"}
        own_name = getattr(model, "__name__", type(model).__name__)
        return cls(in_float32(model), name or str(own_name), None, precision, class_names=output_names(model))

    def behind(self, denoiser: Denoiser | None) -> "Subject":
        """Return the classifier with `denoiser` in front, and the noise that this is for."""
        if denoiser is None:
            return self
        if not isinstance(denoiser, Denoiser):
            given = type(denoiser).__name__
            raise RequestError(f"denoiser: expected a denoiser, got {given}; use load_denoiser(FOLDER)")
        if self.stages:
            raise RequestError("denoiser: expected none with a cascade, whose stages have several sigmas; leave it out")
        front: Any = self.classifier  # which Denoised checks
        noise = {"sigma": denoiser.sigma, "noise": denoiser.noise}
        denoised = Denoised(denoiser.model, front)
        return replace(self, classifier=denoised, defaults={**self.defaults, **noise}, denoiser=denoiser)

    def check(self, data: Images, sigma: float, noise: str, device: torch.device) -> None:
        """Refuse `data` or noise that do not fit the classifier."""
        if self.denoiser is not None:
            self.denoiser.check(data.shape, sigma, noise)
        for stage in self.stages:
            stage.check(data, sigma, noise, device)
        if self.stages:
            return
        for run in self.runs:
            run.refuse_other_images(data)
        if not self.runs:
            check_outputs(self.classifier, self.name, data.shape, data.num_classes, device)

    def check_votes(self, counter: VoteCounter, data: Images, device: torch.device) -> None:
        """Refuse a classifier that fails, or whose votes are not independent, as `counter` evaluates it."""
        image = data.batch(torch.tensor([0], device="cpu"))[0].to(device, counter.dtype)
        refuse_unsound(counter.classifier, image, self.name, data.num_classes)

    def noise_warnings(self, sigma: float, noise: str) -> list[str]:
        """Return a warning about a `sigma` that is probably in units of 0..255, and one for each run that was trained
        with other noise.

        The stages of a cascade have the noise of their training; a classifier behind a denoiser need not know noise.
        """
        runs = () if self.stages or self.denoiser is not None else self.runs
        texts = (sigma_warning(sigma), *(run.noise_warning(sigma, noise) for run in runs))
        return [text for text in texts if text is not None]

    def about(self, data: Images | Tensor, device: torch.device, batch_size: int) -> dict[str, Any]:
        """Return the settings that identify the classifier; a file is continued only by the same one."""
        if self.stages:
            return _about_cascade([stage.about(data, device, batch_size) for stage in self.stages])
        about = self._about_classifier(data, device, batch_size)
        if self.denoiser is None:
            return about
        front = self.denoiser.about()
        trained = {"training_sigma": front["sigma"]} if "training_sigma" in about else {}
        return {**about, **trained, "objective": f"{about['objective']} + denoiser", "denoiser": front}

    def _about_classifier(self, data: Images | Tensor, device: torch.device, batch_size: int) -> dict[str, Any]:
        if self.run is not None and not any(is_code(run.recipe.model) for run in self.runs):
            return self.run.about()
        model = self.classifier
        weights = tensors_digest(model.state_dict()) if isinstance(model, nn.Module) else None
        named: dict[str, Any] = {"model": self.name, "objective": self.name, "weights_sha256": weights}
        if isinstance(model, Ensemble) and model.consensus is not None:
            named["consensus"] = model.consensus
        about = self.run.about() if self.run is not None else named
        return {**about, "classes_sha256": _classes_digest(model, data, device, batch_size)}

    def provenance(self, device: torch.device) -> dict[str, Any]:
        """Return what a result was computed with."""
        epoch = {"epoch": self.run.epoch} if isinstance(self.run, Run) else {}
        return {"versions": versions(device), "threads": torch.get_num_threads(), **epoch}

    def training(self) -> dict[str, Any]:
        """Return how the classifier was trained, or all members of an ensemble or stages; {} if it is not a run."""
        if self.stages:
            return {"members": [training_of(s.run) if isinstance(s.run, Run) else s.training() for s in self.stages]}
        if isinstance(self.run, Run):
            return {"model": dict(self.run.provenance)}
        return {"members": list(map(training_of, self.runs))} if self.runs else {}


Certifiable = Run | RunEnsemble | Cascade | SmoothedClassifier | Classifier
"""What `certify_dataset` accepts."""


def _about_cascade(members: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings that identify a cascade, from those of its stages, in their order."""
    objective = f"cascade of {len(members)} ({names_of(members, 'objective')})"
    digests = [member["weights_sha256"] for member in members]
    together = None if None in digests else hashlib.sha256(" ".join(digests).encode()).hexdigest()
    named = {"model": names_of(members, "model"), "objective": objective}
    return {**named, "weights_sha256": together, "members": members}


def as_images(data: Data, subject: Subject, device: torch.device) -> Images:
    """Return `data` as images; torch data get as many classes as the classifier has outputs.

    Labels are matched with the outputs of a published classifier by the names of the classes.
    """
    if isinstance(data, DataLoader):
        if not isinstance(data.sampler, SequentialSampler) or data.collate_fn is not default_collate:
            raise RequestError(
                "data: expected a DataLoader in the order of its dataset (shuffle=False, no sampler) with the default "
                "collate_fn, got another; give the dataset itself, with items (image, label)"
            )
        data = data.dataset
    if isinstance(data, Images):
        return with_known_classes(data, subject.class_names)
    images = images_from_dataset(data, split=UNSPLIT)
    if subject.run is not None:
        return replace(images, num_classes=subject.run.spec.num_classes)
    first = images.batch(torch.tensor([0], device="cpu"))[0].to(device_of(subject.classifier) or device)
    outputs = first_logits(subject.classifier, first, subject.name).shape  # which are refused later if they are wrong
    return replace(images, num_classes=int(outputs[1])) if len(outputs) == 2 else images


def _classes_digest(model: Classifier, data: Images | Tensor, device: torch.device, batch_size: int) -> str:
    """Return the SHA-256 of the classes that user code gives to some images, which identifies it.

    Code that differs on other images only is not recognized.
    """
    # Few images at once: the memory that the code needs is not known yet.
    batches = torch.split(_some_images(data), min(batch_size, 10))
    device = device_of(model) or device
    with torch.no_grad(), evaluating(model):
        classes = [logits_of(model(batch.to(device))).argmax(1) for batch in batches]
    return tensors_digest({"classes": torch.cat(classes) if classes else torch.empty(0, device="cpu")})


def data_settings(data: Images) -> dict[str, Any]:
    """Return what a certificates file records of the images."""
    return {
        "dataset": data.name,
        "split": data.split,
        # The splits of a name in DATASETS stand for their images; the content of user data may change.
        **({} if data.name in DATASETS and data.split in get_args(Split) else {"images_sha256": _images_digest(data)}),
        **({"classes": list(data.class_names or ())} if data.relabelled else {}),
    }


def _images_digest(data: Images) -> str:
    """Return the SHA-256 of all labels and of some images; of files, of their names and sizes and the shape of images.

    An added or removed image changes it, an edited one may not.
    """
    if isinstance(data, ImageFiles):
        return data.digest()
    return tensors_digest({"labels": data.labels, "images": _some_images(data)})


def _some_images(data: Images | Tensor) -> Tensor:
    """Return float32 [n, c, h, w], spread over the data; a tensor as it is."""
    return data if isinstance(data, Tensor) else data.batch(spread(len(data), DIGEST_IMAGES))[0]


def missing_classes(data: Images, indices: Sequence[int]) -> str | None:
    """Return a warning if the selected images lack a class that as many random images would have had; else None.

    At most one random selection in twenty gets it.
    """
    counts = torch.bincount(data.labels.cpu(), minlength=data.num_classes)
    chosen = torch.bincount(data.labels.cpu()[list(indices)], minlength=data.num_classes)
    expected = counts * (len(indices) / len(data))
    classes = int((counts > 0).sum())
    missing = ((chosen == 0) & (expected >= math.log(20 * classes))).nonzero().flatten().tolist()
    if not missing:
        return None
    known = data.class_names or ()  # a user's own data may have fewer names than classes
    names = [one_line(known[label]) if label < len(known) else str(label) for label in missing[:5]]
    some = ", ".join(names) + (", ..." if len(missing) > 5 else "")
    return (
        f"{len(missing)} of {classes} classes ({some}) are missing from the {len(indices):,} selected images, because "
        f"of the order of {data.name}; ACR and accuracies describe the other classes: choose another skip, or more "
        "images"
    )
