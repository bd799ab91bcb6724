"""The recipes of trained and imported runs: fields, reading, and `key=value` overrides."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from smoothcert.errors import RequestError
from smoothcert.io.field_errors import LETTERS, shown
from smoothcert.io.records import Recipe, parse_recipe, validated
from smoothcert.io.text import did_you_mean, flattened
from smoothcert.io.yaml_file import parse_yaml, read_yaml
from smoothcert.objectives import BUILT_IN, OBJECTIVES, Objective, UnloadedObjective, name_in_recipes
from smoothcert.objectives.base import LATER_FIELDS as LATER_FIELDS_OF_OBJECTIVES
from smoothcert.objectives.inner_attacks import MovesNoise
from smoothcert.training.choices import LARGEST_SIGMA, Augmentation, InputLayer, NoiseName
from smoothcert.training.run_folder import stored_fields
from smoothcert.training.sampler_settings import SAMPLERS, RadiusWeighted, SamplerSettings, Uniform


def _named(value: Any, field: str, names: Iterable[str]) -> tuple[Any, dict[str, Any]]:
    """The name and the other fields of an objective or a sampler, from its name or from a mapping with a `name`."""
    fields = {"name": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping) or "name" not in fields:
        raise ValueError(f"{field}: expected one of {', '.join(names)}, or a mapping with the key 'name'")
    return fields["name"], {key: value for key, value in fields.items() if key != "name"}


def _objective_from(value: Any) -> Any:
    """Make an objective; `package.module:Class` is not imported here: see `training/user_objective.py`."""
    if isinstance(value, Objective):
        return value
    if isinstance(value, type):
        raise ValueError(f"objective: expected an object, got the class {value.__name__}; give {value.__name__}(...)")
    name, fields = _named(value, "objective", OBJECTIVES)
    if _is_reference(name):
        return validated(UnloadedObjective, {"name": name, **fields}, "objective.")
    if isinstance(name, str) and name.endswith(".py"):
        raise ValueError(f"objective: expected FILE.py:Class, got {name}; add the name of the class after a colon")
    if not isinstance(name, str) or name not in BUILT_IN:
        otherwise = f"expected one of {', '.join(OBJECTIVES)}, or your own as FILE.py:Class"
        raise ValueError(f"objective: unknown method {name}; {did_you_mean(name, OBJECTIVES, otherwise)}")
    return validated(BUILT_IN[name], fields, "objective.")


def _is_reference(name: object) -> bool:
    """Tell `package.module:Class` and `FILE.py:Class` from the name of a built-in method."""
    return isinstance(name, str) and name.isprintable() and all(name.rpartition(":"))


def _objective_to(objective: Objective) -> dict[str, Any]:
    unloaded = isinstance(objective, UnloadedObjective)  # its class has the defaults of fields that are not given
    fields = objective.model_dump(mode="json", exclude_unset=unloaded)
    known = type(objective).model_fields
    absent = {name for name in LATER_FIELDS_OF_OBJECTIVES if name in known and known[name].default == fields[name]}
    return {"name": name_in_recipes(objective), **{name: fields[name] for name in fields if name not in absent}}


def _sampler_from(value: Any) -> Any:
    if isinstance(value, SamplerSettings):
        return value
    name, settings = _named(value, "sampler", SAMPLERS)
    if not isinstance(name, str) or name not in SAMPLERS:
        raise ValueError(f"sampler: unknown sampler {shown(str(name))}; {did_you_mean(name, SAMPLERS)}")
    if settings and not SAMPLERS[name].model_fields:
        others = " or ".join(other for other, kind in SAMPLERS.items() if kind.model_fields)
        raise ValueError(
            f"sampler.{shown(str(next(iter(settings))))}: the sampler {name} has no settings; "
            f"first set sampler to {others}"
        )
    return validated(SAMPLERS[name], settings, "sampler.")


def _sampler_to(sampler: SamplerSettings) -> dict[str, Any]:
    return {"name": sampler.name, **sampler.model_dump(mode="json")}


if TYPE_CHECKING:

    class AnyObjective:
        """The field for type checkers: it accepts an objective, a name or a mapping, and gives an objective."""

        def __get__(self, recipe: object, kind: object) -> Objective: ...

        def __set__(self, recipe: object, value: Objective | str | Mapping[str, Any]) -> None: ...

else:
    AnyObjective = Annotated[Objective, BeforeValidator(_objective_from), PlainSerializer(_objective_to)]
AnySampler = Annotated[SamplerSettings, BeforeValidator(_sampler_from), PlainSerializer(_sampler_to)]


LARGEST = 1e30
"""The largest float: arithmetic in float32 with the weights of a network stays finite."""
MOST = 1_000_000
"""The largest number of epochs, noisy copies or attack steps."""


class TrainRecipe(Recipe):
    """All settings of a training run, frozen: everything that the model depends on, apart from the data."""

    later_fields = ("augment", "schedule", "optimizer", "ema", "sampler", "teacher", "teacher_votes")

    dataset: str = Field(description="data set: see `smoothcert datasets`")
    image_size: int | None = Field(
        default=None, ge=1, le=10_000, description="for `folder:PATH`: side of the square images, at most 10,000"
    )
    augment: Augmentation | None = Field(
        default=None, description="random flips and crops of training images; null: what the data set has"
    )
    model: str = Field(description="network: see `smoothcert models`, or package.module:function")
    sigma: float = Field(
        gt=0, le=LARGEST_SIGMA, description="standard deviation of the noise, in pixels of [0, 1]; at most 1e6"
    )
    noise: NoiseName = Field(default="gaussian", description="gaussian certifies in L2, laplace and uniform in L1")
    objective: AnyObjective = Field(
        description="method, with its hyper-parameters: see `smoothcert objectives`, or package.module:Class"
    )
    teacher: "TrainRecipe | None" = Field(
        default=None, description="recipe of a network that is trained first on the same data, whose votes catrs uses"
    )
    teacher_votes: int = Field(default=1000, ge=1, le=MOST, description="votes of the teacher for each image")
    epochs: int = Field(default=90, ge=1, le=MOST, description="passes over the training images, at most a million")
    batch_size: int = Field(
        default=256, ge=1, description="noisy inputs in a step (images, for methods that do not chunk)"
    )
    learning_rate: float = Field(default=0.01, gt=0, description="of SGD at the start; at most 1e30")
    learning_rate_drops: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(30, 60), description="epochs at which the learning rate is divided by 10"
    )
    learning_rate_warm_up: int = Field(
        default=0, ge=0, description="first epochs with a lower rate (cosine: rising, step: a tenth), for deep networks"
    )
    schedule: Literal["step", "cosine"] = Field(
        default="step",
        description="step: divided by 10 at each drop; cosine: falls to 0 after a linear warm-up, without drops",
    )
    optimizer: Literal["sgd", "adamw"] = Field(default="sgd", description="sgd or adamw")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of SGD; the first beta of AdamW")
    nesterov: bool = Field(default=False, description="Nesterov momentum; the published runs used plain momentum")
    weight_decay: float = Field(default=1e-4, ge=0, description="on every parameter; at most 1e30")
    ema: float = Field(default=0.0, ge=0, lt=1, description="decay of the moving average of the weights; 0: no average")
    sampler: AnySampler = Field(
        default=Uniform(),
        description=f"which images an epoch draws: {', or '.join(SAMPLERS)}, with its settings",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="bf16: autocast; auto: where it is fast"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="of initialisation, order and noise, below 2^63")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with changed fields, which are validated. As in `--set`, fields of the objective need no prefix."""
        fields = dict(update or {})
        if "objective" not in fields:
            known = dict.fromkeys(type(self.objective).model_fields)
            names = {key: key.removeprefix("objective.") for key in fields}
            of_objective = [key for key, name in names.items() if _full_key([name], known)[0] == "objective"]
            inside = {names[key]: fields.pop(key) for key in of_objective}
            if inside:
                fields["objective"] = self.objective.model_copy(update=inside)
        return super().model_copy(update=fields)

    @property
    def method(self) -> str:
        """The name of the method in tables."""
        return re.split(r"[:.]", name_in_recipes(self.objective))[-1]

    @property
    def images_per_step(self) -> int:
        return self.batch_size // self.objective.num_noise if self.objective.chunked else self.batch_size

    @model_validator(mode="after")
    def _limited_numbers(self) -> Self:
        for name, value in flattened(self.to_mapping()).items():
            if not isinstance(value, int | float):
                continue
            if isinstance(value, float):
                most: float = LARGEST
            elif name.startswith("objective."):
                most = MOST
            else:
                continue  # limited where it is declared, or by memory
            if value > most:
                raise ValueError(f"{name}: expected at most {most:g}, got {shown(repr(value))}")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.objective.chunked and self.batch_size % self.objective.num_noise:
            raise ValueError(
                f"batch_size: expected a multiple of objective.num_noise = {self.objective.num_noise}, "
                f"got {self.batch_size}"
            )
        if self.teacher is not None and not self.objective.uses_teacher:
            raise ValueError(f"teacher: expected none for {self.method}, got a recipe; remove it (--set teacher=null)")
        if self.teacher is not None and (
            self.teacher.teacher is not None or ":" in self.teacher.model + name_in_recipes(self.teacher.objective)
        ):
            raise ValueError("teacher: expected a built-in network and objective without a teacher, got another one")
        if self.nesterov and (not self.momentum or self.optimizer != "sgd"):
            raise ValueError(f"nesterov: expected false for {self.optimizer} with momentum {self.momentum:g}, got true")
        return self

    @model_validator(mode="after")
    def _epochs_in_order(self) -> Self:
        if list(self.learning_rate_drops) != sorted(set(self.learning_rate_drops)):
            raise ValueError(f"learning_rate_drops: expected rising epochs, got {list(self.learning_rate_drops)}")
        end = min([self.epochs, *(self.learning_rate_drops if self.schedule == "step" else ())])
        if self.learning_rate_warm_up >= end:
            raise ValueError(
                f"learning_rate_warm_up: expected to end before the first drop and the last epoch, at most "
                f"{end - 1} epochs, got {self.learning_rate_warm_up}"
            )
        starts = {"sampler.start": self.sampler.start} if isinstance(self.sampler, RadiusWeighted) else {}
        if isinstance(self.objective, MovesNoise) and self.objective.noise_attack is not None:
            starts["objective.noise_attack.first_epoch"] = self.objective.noise_attack.first_epoch
        for name, start in starts.items():
            if start >= self.epochs:
                raise ValueError(
                    f"{name}: expected an epoch before the end of training, at most {self.epochs - 1}, got {start}; "
                    f"choose an earlier one with --set {name}=N"
                )
        return self


class ImportRecipe(Recipe):
    """What is known about a model that was trained elsewhere and imported."""

    later_fields = ("image_size",)

    dataset: str = Field(description="data set that it was trained on")
    model: str = Field(description="network: see `smoothcert models`, or package.module:function")
    sigma: float = Field(gt=0, le=LARGEST_SIGMA, description="noise level that it was trained with")
    input_layer: InputLayer = Field(description="the layer before the network")
    source: str = Field(description="name of the imported file")
    method: str = Field(default="imported", description="how it was trained: the name of the method in tables")
    image_size: int | None = Field(default=None, ge=1, le=10_000, description="for `folder:PATH`: side of the images")

    @property
    def epochs(self) -> int:
        """Nothing is left to train."""
        return 0

    @property
    def noise(self) -> NoiseName:
        return "gaussian"


def load_train_recipe(path: Path) -> TrainRecipe:
    return parse_recipe(TrainRecipe, read_yaml(path), str(path))


def load_run_recipe(path: Path) -> TrainRecipe:
    """Read the `recipe.yaml` of a run folder, also of earlier versions; that of an imported model is refused."""
    fields = stored_fields(read_yaml(path))
    if "source" in fields:
        raise RequestError(
            f"{path.parent}: expected a run that was trained here, got an imported model; to train it, give --init "
            f"{shlex.quote(str(path.parent))} and another --out"
        )
    return parse_recipe(TrainRecipe, fields, str(path))


def with_overrides(recipe: TrainRecipe, overrides: Sequence[str], source: str = "--set") -> TrainRecipe:
    """Apply `key=value` overrides and validate the result; messages name their `source`.

    `objective.eta=5`, or shorter `eta=5`, changes a field of the objective.
    """
    fields = {"sampler": _sampler_to(recipe.sampler), **recipe.to_mapping()}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise RequestError(f"--set {shown(override)}: expected key=value, for instance --set epochs=3")
        try:
            override.encode()
            value = parse_yaml(text)
        except ValueError as error:
            raise RequestError(f"--set {shown(override)}: the value is not YAML ({error}); quote it") from error
        _set(fields, _full_key(key.split("."), fields["objective"]), value, shown(override))
    return parse_recipe(TrainRecipe, fields, source if overrides else "recipe")


def _full_key(keys: list[str], objective: Any) -> list[str]:
    """Return the field that `keys` mean: `lr`, `lambda` and `m` are known, and fields of the objective need no prefix.
    A field of this very name is preferred."""
    known = objective if isinstance(objective, Mapping) else {}
    inside = keys[0] == "objective" and len(keys) > 1
    name = keys[inside]
    rest = keys[inside + 1 :]
    meant = LETTERS.get(name, name)
    if not inside and meant in TrainRecipe.model_fields:
        return [meant, *rest]
    for candidate in (name, meant):
        if candidate in known and candidate != "name":
            return ["objective", candidate, *rest]
    # Fields of a user's objective are not known yet; one that resembles a field of the recipe is refused with a hint.
    of_user = _is_reference(known.get("name")) and not get_close_matches(name, TrainRecipe.model_fields, cutoff=0.8)
    if name in LETTERS and not of_user and not inside:
        return ["objective", meant, *rest]  # which this method does not have: the message lists those that it has
    others = known.keys() - {"name"}  # which would choose another method
    misspelt = others.intersection(get_close_matches(name, [*TrainRecipe.model_fields, *sorted(others)], n=1))
    return ["objective", *keys] if (of_user or misspelt) and not inside else keys


def _set(fields: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    if keys in (["objective"], ["objective", "name"]):
        # Another method has other hyper-parameters: start from its defaults.
        if _is_reference(value):
            current = fields["objective"]
            known_name = str(current.get("name")) if isinstance(current, Mapping) else str(current)
            if _is_reference(known_name) and known_name.rpartition(":")[2] == value.rpartition(":")[2]:
                current["name"] = value  # the user allows its code, wherever the file is now
            else:
                fields["objective"] = {"name": value}
            return
        known = isinstance(value, str) and value in BUILT_IN
        fields["objective"] = _objective_to(BUILT_IN[value]()) if known else value
        return
    if keys in (["sampler"], ["sampler", "name"]) and isinstance(value, str) and value in SAMPLERS:
        fields["sampler"] = _sampler_to(SAMPLERS[value]())
        return
    *parents, last = keys
    for parent in parents:
        inner = fields.get(parent)
        if inner is None and (parent in fields or parent in LATER_FIELDS_OF_OBJECTIVES):
            inner = fields[parent] = {}
        if not isinstance(inner, dict):
            with_parts = [key for key, part in fields.items() if isinstance(part, dict)]
            hint = did_you_mean(parent, with_parts, f"keys with parts: {', '.join(with_parts) or 'none'}")
            raise RequestError(f"--set {override}: {parent} has no parts; {hint}")
        fields = inner
    fields[last] = value
