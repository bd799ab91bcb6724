"""From a recipe to a run folder: recipe, loop, step, metrics, checkpoint, import of published checkpoints."""
