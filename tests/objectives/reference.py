"""A second transcription of the objectives and attacks: numpy, float64, one image and one noise at a time.

It is slow and plain on purpose and shares nothing with the package: a two-layer tanh network with derivatives written
by hand, the attacks on it, and every loss as a loop over images and noises. Images are flat vectors here. The results
of attacks are arguments of the losses, so that differences of a loss hold them fixed.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Array = NDArray[np.float64]

# In eval mode the logits are multiplied by this, so that a loss in the wrong mode has other numbers.
EVAL_SCALE = 0.7


@dataclass(frozen=True)
class Network:
    """z(x) = W2 tanh(W1 x + b1) + b2, times EVAL_SCALE in eval mode."""

    w1: Array
    b1: Array
    w2: Array
    b2: Array

    def logits(self, x: Array) -> Array:
        return self.w2 @ np.tanh(self.w1 @ x + self.b1) + self.b2

    def eval_logits(self, x: Array) -> Array:
        return EVAL_SCALE * self.logits(x)

    def eval_jacobian(self, x: Array) -> Array:
        """d logits / d x in eval mode: [classes, pixels]."""
        slope = 1 - np.tanh(self.w1 @ x + self.b1) ** 2
        return EVAL_SCALE * (self.w2 * slope) @ self.w1

    def flat(self) -> Array:
        return np.concatenate([part.ravel() for part in (self.w1, self.b1, self.w2, self.b2)])

    def replaced(self, flat: Array) -> "Network":
        parts, start = [], 0
        for part in (self.w1, self.b1, self.w2, self.b2):
            parts.append(flat[start : start + part.size].reshape(part.shape))
            start += part.size
        return Network(*parts)


def log_softmax(z: Array) -> Array:
    top = max(z)
    return z - top - math.log(sum(math.exp(v - top) for v in z))


def softmax(z: Array) -> Array:
    return np.exp(log_softmax(z))


def log_floored(p: float) -> float:
    return math.log(max(p, 1e-20))


def kl(a: Array, logits: Array) -> float:
    """KL(a || softmax(logits)) = sum a (log a - log_softmax(logits))."""
    return sum(u * (log_floored(u) - v) for u, v in zip(a, log_softmax(logits), strict=True))


def entropy(p: Array) -> float:
    return -sum(v * log_floored(v) for v in p)


def warmup(epoch: int) -> float:
    return min(1.0, (epoch + 1) / 10)


# Attacks


def smoothed_gradient(network: Network, x: Array, y: int, noises: Array) -> tuple[float, Array, Array]:
    """Compute -log pbar_y in eval mode, its derivative by the chain rule, and pbar."""
    pbar = np.zeros(len(network.b2))
    slope = np.zeros_like(x)
    for delta in noises:
        p = softmax(network.eval_logits(x + delta))
        pbar += p / len(noises)
        # d p_y / d z = p_y (e_y - p)
        by_logit = -p[y] * p
        by_logit[y] += p[y]
        slope += by_logit @ network.eval_jacobian(x + delta) / len(noises)
    gradient = -slope / pbar[y] if pbar[y] > 1e-20 else np.zeros_like(x)
    return -log_floored(pbar[y]), gradient, pbar


def into_ball(x: Array, centre: Array, radius: float) -> Array:
    length = np.linalg.norm(x - centre)
    return x if length <= radius else centre + (x - centre) * (radius / length)


def pgd(
    network: Network, x: Array, y: int, noises: Array, steps: int, step_size: float, max_norm: float | None
) -> list[Array]:
    """Compute x_1, ..., x_T of one image: a normalised step, clamp to [0, 1], projection on the ball if any."""
    iterates, current = [], x
    for _ in range(steps):
        _, gradient, _ = smoothed_gradient(network, current, y, noises)
        current = np.clip(current + step_size * gradient / (np.linalg.norm(gradient) + 1e-8), 0, 1)
        if max_norm is not None:
            current = into_ball(current, x, max_norm)
        iterates.append(current)
    return iterates


def ddn(network: Network, x: Array, y: int, noises: Array, steps: int, epsilon: float) -> Array:
    """Rony et al. 2019, Algorithm 1, for one image: step length annealed from 1 to 0.01, norm factor 1 -+ 0.05."""
    delta, length, best = np.zeros_like(x), min(1.0, epsilon), None
    for k in range(steps):
        _, gradient, pbar = smoothed_gradient(network, x + delta, y, noises)
        adversarial = int(np.argmax(pbar)) != y
        if adversarial and (best is None or np.linalg.norm(delta) < np.linalg.norm(best)):
            best = delta
        annealed = 0.01 + 0.99 * (1 + math.cos(math.pi * k / steps)) / 2
        delta = delta + annealed * gradient / (np.linalg.norm(gradient) + 1e-8)
        length = min(length * (0.95 if adversarial else 1.05), epsilon)
        delta = delta * length / np.linalg.norm(delta)
        delta = np.clip(x + delta, 0, 1) - x
    return x + (delta if best is None else best)


def sphere(network: Network, x: Array, y: int, delta: Array, steps: int, epsilon: float) -> Array:
    """Move one noise by steps of `epsilon` on the CE in eval mode, rescaled to its norm, while the class is y."""
    norm = math.sqrt(sum(v * v for v in delta))
    for _ in range(steps):
        z = network.eval_logits(x + delta)
        if int(np.argmax(z)) != y:
            continue
        by_logit = softmax(z)
        by_logit[y] -= 1
        gradient = by_logit @ network.eval_jacobian(x + delta)
        delta = delta + epsilon * gradient / math.sqrt(sum(v * v for v in gradient))
        delta = delta * norm / math.sqrt(sum(v * v for v in delta))
    return delta


def noise_ball(network: Network, x: Array, phat: Array, first: Array, steps: int, epsilon: float) -> Array:
    """Move one noise against the teacher's shares: step, projection, then the mean and rms of the first noise."""
    delta = first
    for _ in range(steps):
        by_logit = softmax(network.eval_logits(x + delta)) * sum(phat) - phat
        gradient = by_logit @ network.eval_jacobian(x + delta)
        delta = delta + 2 * epsilon / steps * gradient / (math.sqrt(sum(v * v for v in gradient)) + 1e-8)
        delta = into_ball(delta, first, epsilon)
        rms, first_rms = (math.sqrt(sum(v * v for v in part) / len(part)) for part in (delta, first))
        delta = np.array([sum(first) / len(first) + first_rms * (v - sum(delta) / len(delta)) / rms for v in delta])
    return delta


# Losses: x [batch, pixels], y [batch], noise [num_noise, batch, pixels]


def cross_entropies(network: Network, x: Array, y: Array, noise: Array) -> float:
    total = 0.0
    for i in range(noise.shape[0]):
        for b in range(len(x)):
            total += -log_softmax(network.logits(x[b] + noise[i, b]))[y[b]]
    return total / (noise.shape[0] * len(x))


def gaussian(network: Network, x: Array, y: Array, noise: Array) -> dict[str, float]:
    value = cross_entropies(network, x, y, noise)
    return {"loss": value, "cross_entropy": value}


def stability(network: Network, x: Array, y: Array, noise: Array, weight: float) -> dict[str, float]:
    clean, stable = 0.0, 0.0
    for b in range(len(x)):
        target = softmax(network.logits(x[b]))
        predicted = log_softmax(network.logits(x[b] + noise[0, b]))
        clean += -log_softmax(network.logits(x[b]))[y[b]] / len(x)
        stable += -sum(t * q for t, q in zip(target, predicted, strict=True)) / len(x)
    return {"loss": clean + weight * stable, "cross_entropy": clean, "stability": stable}


def macer_fates(network: Network, x: Array, y: Array, noise: Array, gamma: float, beta: float) -> list[str]:
    """Say for each image whether its robustness term is kept, or dropped as wrong, saturated or beyond gamma."""
    fates = []
    for b in range(len(x)):
        q = sum(softmax(beta * network.logits(x[b] + delta)) for delta in noise[:, b]) / len(noise)
        second, first = sorted(q)[-2:]
        if int(np.argmax(q)) != y[b]:
            fates.append("wrong")
        elif not math.isfinite(ndtri(first) - ndtri(second)):
            fates.append("saturated")
        else:
            fates.append("kept" if ndtri(first) - ndtri(second) <= gamma else "beyond")
    return fates


def macer(
    network: Network, x: Array, y: Array, noise: Array, weight: float, gamma: float, beta: float, sigma: float
) -> dict[str, float]:
    natural, robust = 0.0, 0.0
    fates = macer_fates(network, x, y, noise, gamma, beta)
    for b in range(len(x)):
        pbar_y, q = 0.0, np.zeros(len(network.b2))
        for delta in noise[:, b]:
            z = network.logits(x[b] + delta)
            pbar_y += softmax(z)[y[b]] / len(noise)
            q += softmax(beta * z) / len(noise)
        natural += -math.log(pbar_y + 1e-10)
        if fates[b] == "kept":
            second, first = sorted(q)[-2:]
            robust += sigma / 2 * (gamma - (ndtri(first) - ndtri(second)))
    return {
        "loss": (natural + weight * robust) / len(x),
        "natural": natural / len(x),
        "robust": robust / len(x),
    }


def consistency(
    network: Network, x: Array, y: Array, noise: Array, form: str, weight: float, entropy_weight: float
) -> dict[str, float]:
    divergence, average_entropy, squared = 0.0, 0.0, 0.0
    for b in range(len(x)):
        logits = [network.logits(x[b] + delta) for delta in noise[:, b]]
        p = [softmax(z) for z in logits]
        pbar = sum(p) / len(p)
        divergence += sum(kl(pbar, z) for z in logits) / len(p) / len(x)
        average_entropy += entropy(pbar) / len(x)
        squared += sum((u - v) ** 2 for u, v in zip(p[0], p[1], strict=True)) / len(x)
    natural = cross_entropies(network, x, y, noise)
    if form == "mse":
        return {"loss": natural + weight * squared, "cross_entropy": natural, "mse": squared}
    regularizer = {
        "kl_entropy": weight * divergence + entropy_weight * average_entropy,
        "xent": weight * (divergence + average_entropy),
        "kl": weight * divergence,
    }[form]
    return {
        "loss": natural + regularizer,
        "cross_entropy": natural,
        "kl": divergence,
        "entropy": average_entropy,
    }


def smoothmix_right(network: Network, clean: Array, y: Array, noise: Array) -> list[bool]:
    """Say for each image whether argmax pbar = y, so that its mixed term counts."""
    right = []
    for b in range(len(clean)):
        pbar = sum(softmax(network.logits(clean[b] + delta)) for delta in noise[:, b])
        right.append(int(np.argmax(pbar)) == y[b])
    return right


def smoothmix(
    network: Network,
    clean: Array,
    adversarial: Array,
    y: Array,
    noise: Array,
    uniform: Array,
    weight: float,
) -> dict[str, float]:
    """`uniform` in [0, 1) gives lam = uniform / 2; `weight` is eta * w(epoch)."""
    classes, mix = len(network.b2), 0.0
    right = smoothmix_right(network, clean, y, noise)
    for b in range(len(clean)):
        lam = uniform[b] / 2
        pbar = sum(softmax(network.logits(clean[b] + delta)) for delta in noise[:, b]) / len(noise)
        target = (1 - lam) * pbar + lam / classes
        point = (1 - lam) * clean[b] + lam * adversarial[b]
        for delta in noise[:, b]:
            if right[b]:
                mix += kl(target, network.logits(point + delta))
    mix /= len(clean) * len(noise)
    natural = cross_entropies(network, clean, y, noise)
    return {"loss": natural + weight * mix, "cross_entropy": natural, "mix": mix}


def binomial_quantile(trials: int, share: float, uniform: float) -> int:
    """Return the smallest k >= 1 with P(Binomial(trials, share) <= k) > uniform."""
    below = 0.0
    for k in range(trials + 1):
        below += math.comb(trials, k) * share**k * (1 - share) ** (trials - k)
        if below > uniform:
            return max(k, 1)
    return trials


def catrs_kept(network: Network, x: Array, y: Array, noise: Array, uniform: Array) -> list[int]:
    """Return the number K of noises of each image that count."""
    kept = []
    for b in range(len(x)):
        right = sum(int(np.argmax(network.logits(x[b] + delta))) == y[b] for delta in noise[:, b])
        kept.append(binomial_quantile(len(noise), right / len(noise), uniform[b]))
    return kept


def catrs(
    network: Network, x: Array, y: Array, noise: Array, attacked: Array, phat: Array, uniform: Array, weight: float
) -> dict[str, float]:
    low, high, kept = 0.0, 0.0, catrs_kept(network, x, y, noise, uniform)
    for b in range(len(x)):
        losses = sorted(-log_softmax(network.logits(x[b] + delta))[y[b]] for delta in noise[:, b])
        low += sum(losses[: kept[b]]) / len(noise) / len(x)
        if kept[b] == len(noise):
            high += max(kl(phat[b], network.logits(x[b] + delta)) for delta in attacked[:, b]) / len(x)
    natural = cross_entropies(network, x, y, noise)
    return {"loss": low + weight * high, "cross_entropy": natural, "low": low, "high": high}
