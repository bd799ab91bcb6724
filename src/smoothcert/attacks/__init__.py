"""Attacks on smoothed classifiers: functions that see a callable and work for any image shape."""

from smoothcert.attacks.ddn import ddn
from smoothcert.attacks.l2 import attacked, project, unit
from smoothcert.attacks.noise_ball import noise_ball_attack
from smoothcert.attacks.smoothed_pgd import smoothed_loss_and_gradient, smoothed_pgd
from smoothcert.attacks.sphere import sphere_attack

__all__ = [
    "attacked",
    "ddn",
    "noise_ball_attack",
    "project",
    "smoothed_loss_and_gradient",
    "smoothed_pgd",
    "sphere_attack",
    "unit",
]
