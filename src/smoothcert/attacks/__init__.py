"""Attacks on smoothed classifiers: functions that see a callable and work for any image shape."""

from smoothcert.attacks.ddn import ddn as ddn
from smoothcert.attacks.l2 import attacked as attacked
from smoothcert.attacks.l2 import project as project
from smoothcert.attacks.on_noise import noise_ball_attack as noise_ball_attack
from smoothcert.attacks.on_noise import sphere_attack as sphere_attack
from smoothcert.attacks.smoothed_pgd import smoothed_pgd as smoothed_pgd
