"""From a classifier f to the smoothed classifier g: votes under noise, bounds, stopping rules, certificates.

Modules are imported from here by name, so that bounds and certificates can be read without torch.
"""
