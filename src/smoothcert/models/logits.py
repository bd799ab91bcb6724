"""The last layer of a network: logits in float32, whatever the precision of the layers before it."""

import torch
from torch import Tensor, nn
from torch.fx import Proxy


def linear_logits(layer: nn.Linear, features: Tensor) -> Tensor:
    """Compute logits [n, classes] of features [n, channels]: in float32 under autocast.

    In bf16 a logit has 8 bits, so the two largest are often equal. MACER, which multiplies them by 16, then learns a
    classifier with fewer large radii.
    """
    logits: Tensor
    if isinstance(features, Proxy) or not torch.is_autocast_enabled(features.device.type):
        logits = layer(features)
        return logits
    with torch.autocast(features.device.type, enabled=False):
        logits = layer(features.float())
    return logits
