"""What to do, validated: TrainRecipe and CertifyRecipe, to and from YAML, and `key=value` overrides."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from smoothcert.errors import RequestError
from smoothcert.io.files import write_text_atomically
from smoothcert.io.text import did_you_mean
from smoothcert.io.yaml_file import ascii_only, parse_yaml, read_yaml
from smoothcert.objectives import OBJECTIVES, Objective, UnloadedObjective, name_in_recipes
from smoothcert.smoothing.certificate import MOST_VOTES


def _objective_from(value: Any) -> Any:
    """Make an objective from its name, or from a mapping with a `name` and its hyper-parameters.

    `package.module:Class` is not imported here: see `training/user_objective.py`.
    """
    if isinstance(value, Objective):
        return value
    fields = {"name": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping) or "name" not in fields:
        raise ValueError(f"objective: expected a mapping with the key 'name', one of {', '.join(OBJECTIVES)}")
    name = fields["name"]
    outside = _is_reference(name)
    if not outside and (not isinstance(name, str) or name not in OBJECTIVES):
        raise ValueError(f"objective: unknown method {name}; {did_you_mean(name, OBJECTIVES)}")
    kind = UnloadedObjective if outside else OBJECTIVES[name]
    try:
        return kind.model_validate({k: v for k, v in fields.items() if k != "name" or outside})
    except ValidationError as error:
        raise ValueError(describe_errors(kind, error, "objective.")) from error


def _is_reference(name: object) -> bool:
    """Tell `package.module:Class` and `FILE.py:Class` from the name of a built-in method."""
    return isinstance(name, str) and name.isprintable() and all(name.rpartition(":"))


def _objective_to(objective: Objective) -> dict[str, Any]:
    unloaded = isinstance(objective, UnloadedObjective)  # its class has the defaults of fields that are not given
    return {"name": name_in_recipes(objective), **objective.model_dump(mode="json", exclude_unset=unloaded)}


AnyObjective = Annotated[Objective, BeforeValidator(_objective_from), PlainSerializer(_objective_to)]


def _numbers(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """(name, value) of all numbers in `fields` and the mappings inside."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


LARGEST = 1e30
"""What float32 arithmetic with a network's weights still takes."""
MOST = 1_000_000
"""Epochs, copies or attack steps that nobody needs."""
MOST_SHOWN = 120

NoiseName = Literal["gaussian", "laplace", "uniform"]


class Recipe(BaseModel):
    """Common to both recipes: frozen, unknown keys refused, to and from YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_mapping(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        text: str = yaml.safe_dump(self.to_mapping(), sort_keys=False)
        return text

    def save(self, path: Path) -> None:
        write_text_atomically(path, self.to_yaml())


class TrainRecipe(Recipe):
    """Everything that a trained model depends on, besides the data themselves."""

    dataset: str = Field(description="data set: see `smoothcert datasets`")
    image_size: int | None = Field(
        None, ge=1, le=10_000, description="for `folder:PATH`: side of the square images, at most 10,000"
    )
    model: str = Field(description="network: see `smoothcert models`, or package.module:function")
    sigma: float = Field(gt=0, description="standard deviation of the noise, in pixels of [0, 1]; at most 1e30")
    noise: NoiseName = Field("gaussian", description="gaussian certifies in L2, laplace and uniform in L1")
    objective: AnyObjective = Field(
        description="method, with its hyper-parameters: see `smoothcert objectives`, or package.module:Class"
    )
    epochs: int = Field(90, ge=1, le=MOST, description="passes over the training images, at most a million")
    batch_size: int = Field(256, ge=1, description="noisy inputs in a step (images, for methods that do not chunk)")
    learning_rate: float = Field(0.01, gt=0, description="of SGD at the start; at most 1e30")
    learning_rate_drops: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (30, 60), description="epochs at which the learning rate is divided by 10"
    )
    learning_rate_warm_up: int = Field(
        0, ge=0, description="first epochs with a tenth of the learning rate, without which deep networks may not start"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD")
    nesterov: bool = Field(False, description="Nesterov momentum; the published runs used plain momentum")
    weight_decay: float = Field(1e-4, ge=0, description="on every parameter; at most 1e30")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="bf16: autocast; auto: where it is fast")
    seed: int = Field(0, ge=0, lt=2**63, description="of initialisation, order and noise, below 2^63")

    @property
    def method(self) -> str:
        """What tables call this training."""
        return re.split(r"[:.]", name_in_recipes(self.objective))[-1]

    @property
    def images_per_step(self) -> int:
        return self.batch_size // self.objective.num_noise if self.objective.chunked else self.batch_size

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainRecipe":
        for name, value in _numbers(self.to_mapping()):
            most = LARGEST if isinstance(value, float) else MOST if name.startswith("objective.") else value
            if value > most:
                raise ValueError(f"{name}: expected at most {most:g}, got {_shown(repr(value))}")
        if self.objective.chunked and self.batch_size % self.objective.num_noise:
            raise ValueError(
                f"batch_size: expected a multiple of objective.num_noise = {self.objective.num_noise}, "
                f"got {self.batch_size}"
            )
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: expected false without momentum, got true")
        if list(self.learning_rate_drops) != sorted(set(self.learning_rate_drops)):
            raise ValueError(f"learning_rate_drops: expected rising epochs, got {list(self.learning_rate_drops)}")
        end = min([self.epochs, *self.learning_rate_drops])
        if self.learning_rate_warm_up >= end:
            raise ValueError(
                f"learning_rate_warm_up: expected to end before the first drop and the last epoch, at most "
                f"{end - 1} epochs, got {self.learning_rate_warm_up}"
            )
        return self


class ImportRecipe(Recipe):
    """What is known of a model that was trained elsewhere and imported."""

    dataset: str = Field(description="data set that it was trained on")
    model: str = Field(description="network: see `smoothcert models`")
    sigma: float = Field(gt=0, description="noise level that it was trained with")
    input_layer: Literal["normalize", "center", "none"] = Field(description="what stands in front of the network")
    source: str = Field(description="name of the file that it came from")
    method: str = Field("imported", description="how it was trained, as tables will call it")

    @property
    def epochs(self) -> int:
        """Nothing is left to train."""
        return 0

    @property
    def image_size(self) -> int | None:
        return None

    @property
    def noise(self) -> NoiseName:
        return "gaussian"


class CertifyRecipe(Recipe):
    """What a certificate depends on besides the model and the image."""

    sigma: float = Field(gt=0, description="standard deviation of the noise")
    noise: NoiseName = Field("gaussian", description="gaussian certifies in L2, laplace and uniform in L1")
    n0: int = Field(100, ge=1, le=MOST_VOTES, description="votes that choose the class")
    n: int = Field(100_000, ge=1, le=MOST_VOTES, description="fresh votes that bound its probability")
    alpha: float = Field(0.001, gt=0, lt=1, description="probability that a certificate is wrong, at most")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="of the network; noise is float32")
    bound: Literal["one-sided", "two-sided"] = Field("one-sided", description="two-sided bounds the runner-up too")
    radii: tuple[Annotated[float, Field(gt=0)], ...] = Field((), description="stop as soon as these are decided")
    hold_back: bool = Field(False, description="keep part of alpha for the full radius of images that come to n votes")
    radius_loss: float | None = Field(None, gt=0, description="radius, in sigmas, that may be given up for fewer votes")
    label_aware: bool = Field(False, description="no further votes for wrong images: for benchmarks only")
    sound: bool = Field(False, description="integer noise: certificates that hold in floating point too")
    compile: bool = Field(False, description="torch.compile the network")
    batch_size: int = Field(500, ge=1, le=MOST_VOTES, description="noisy images in a forward pass")
    seed: int = Field(ge=0, description="of the noise; drawn from the operating system by default")

    @model_validator(mode="after")
    def _one_rule(self) -> "CertifyRecipe":
        if list(self.radii) != sorted(set(self.radii)):
            raise ValueError(f"radii: expected rising radii, got {list(self.radii)}")
        if self.radii and self.radius_loss is not None:
            raise ValueError("radius_loss: expected none together with radii; choose one of the two rules")
        if self.bound == "two-sided" and self.radii:
            raise ValueError("bound: expected one-sided together with radii, got two-sided")
        if self.bound == "two-sided" and self.noise != "gaussian":
            raise ValueError(f"bound: expected one-sided for {self.noise} noise, got two-sided")
        if self.sound and self.noise != "gaussian":
            raise ValueError(f"sound: expected gaussian noise, got {self.noise}")
        return self


R = TypeVar("R", bound=Recipe)


def parse_recipe(kind: type[R], fields: Mapping[str, Any], source: str) -> R:
    """The recipe that `fields` describe, or a RequestError of one line that names field, value and allowed range."""
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise RequestError(f"{source}: {describe_errors(kind, error)}") from error


def describe_errors(kind: type[BaseModel], error: ValidationError, prefix: str = "") -> str:
    """One line: for each wrong field its name, what was expected, what was given; near names for unknown keys."""
    return "; ".join(_describe(kind, detail, prefix) for detail in error.errors())


def field_descriptions(kind: type[BaseModel]) -> dict[str, str]:
    """The names of all fields of a model, those of models inside it with a dot, and their descriptions."""
    found: dict[str, str] = {}
    for name, field in kind.model_fields.items():
        found[name] = field.description or ""
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel) and part is not Objective:
                found |= {f"{name}.{inner}": text for inner, text in field_descriptions(part).items()}
    return found


def _synonyms(kind: type[BaseModel], field: str, prefix: str) -> list[str]:
    """Fields that an unknown name may mean: by the symbol in their description, such as (lambda), or their initials."""
    word = field.rpartition(".")[2].lower()
    return [
        prefix + name
        for name, description in field_descriptions(kind).items()
        if f"({word})" in description or ("_" in name and word == "".join(part[:1] for part in name.split("_")))
    ]


def _describe(kind: type[BaseModel], error: Any, prefix: str) -> str:
    field = prefix + ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        names = [prefix + name for name in field_descriptions(kind)]
        hint = did_you_mean(field, sorted(names), synonyms=_synonyms(kind, field, prefix))
        return f"{_shown(field)}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{field}: missing; it must be given"
    if error["type"] == "value_error":
        # Raised by a validator of ours, which names the field, the value and what is allowed.
        return str(error["msg"]).removeprefix("Value error, ")
    expected = str(error["msg"]).removeprefix("Input should be ").replace("a valid tuple", "a list, such as [30, 60]")
    return f"{field}: expected {expected}, got {_shown(repr(error['input']))}"


def _shown(text: str) -> str:
    """What was given, for a message: not longer than a line, and printable."""
    return ascii_only(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}...")


def load_train_recipe(path: Path) -> TrainRecipe:
    return parse_recipe(TrainRecipe, read_yaml(path), str(path))


def stored_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that smoothcert stored: before there was `nesterov`, all runs used it."""
    return {"nesterov": bool(fields.get("momentum", True)), **fields}


def load_run_recipe(path: Path) -> TrainRecipe:
    """The `recipe.yaml` of a run folder, also of earlier versions."""
    return parse_recipe(TrainRecipe, stored_fields(read_yaml(path)), str(path))


def with_overrides(recipe: TrainRecipe, overrides: Sequence[str]) -> TrainRecipe:
    """`recipe` with `key=value` overrides, validated as a whole; `objective.eta=5` reaches into the objective."""
    fields = recipe.to_mapping()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise RequestError(f"--set {_shown(override)}: expected key=value, for instance --set epochs=3")
        try:
            override.encode()
            value = parse_yaml(text)
        except ValueError as error:
            raise RequestError(f"--set {_shown(override)}: the value is not YAML ({error}); quote it") from error
        _set(fields, key.split("."), value, _shown(override))
    return parse_recipe(TrainRecipe, fields, "--set" if overrides else "recipe")


def _set(fields: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    if keys == ["objective"] or keys == ["objective", "name"]:
        # Another method has other hyper-parameters: start from its defaults.
        if _is_reference(value):
            same = fields["objective"]["name"] == value  # the user allows the code that the recipe names
            fields["objective"] = fields["objective"] if same else {"name": value}
            return
        known = isinstance(value, str) and value in OBJECTIVES
        fields["objective"] = _objective_to(OBJECTIVES[value]()) if known else value
        return
    *parents, last = keys
    for parent in parents:
        inner = fields.get(parent)
        if inner is None and parent in fields:
            inner = fields[parent] = {}
        if not isinstance(inner, dict):
            with_parts = [key for key, part in fields.items() if isinstance(part, dict)]
            hint = did_you_mean(parent, with_parts, f"keys with parts: {_nested(fields)}")
            raise RequestError(f"--set {override}: {parent} has no parts; {hint}")
        fields = inner
    fields[last] = value


def _nested(fields: Mapping[str, Any]) -> str:
    return ", ".join(k for k, v in fields.items() if isinstance(v, dict)) or "none"
