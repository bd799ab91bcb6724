"""What `on_progress` is called with during training."""

from dataclasses import dataclass

from smoothcert.io.text import duration, rate

REPORT_SECONDS = 0.5
"""Between two reports of progress."""


@dataclass(frozen=True)
class TrainingStatus:
    """The progress of training; loss and accuracy are means over the current epoch."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    noisy_accuracy: float | None
    """None for a denoiser that is trained without a classifier."""
    images_per_second: float
    seconds_left: float

    @property
    def done(self) -> int:
        """Steps of all epochs."""
        return self.epoch * self.steps + self.step

    @property
    def total(self) -> int:
        return self.epochs * self.steps

    @property
    def now(self) -> str:
        """What is being done, and how well."""
        accuracy = "" if self.noisy_accuracy is None else f" noisy acc {self.noisy_accuracy:.1%}"
        return f"epoch {self.epoch + 1}/{self.epochs} loss {self.loss:.3f}{accuracy}"

    def __str__(self) -> str:
        # The speed is last: a narrow terminal cuts the end.
        return f"{self.now} {duration(self.seconds_left)} left {rate(self.images_per_second)} img/s"


@dataclass(frozen=True)
class TeacherVotesStatus(TrainingStatus):
    """The progress of the votes of a teacher, before the first epoch: `images` of `all_images` have theirs.

    Speed and time left are those of the votes. There is no loss yet (nan).
    """

    images: int
    all_images: int

    @property
    def done(self) -> int:
        return self.images

    @property
    def total(self) -> int:
        return self.all_images

    @property
    def now(self) -> str:
        return f"votes of the teacher {self.images:,}/{self.all_images:,} images"
